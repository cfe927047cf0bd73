"""A checkpoint that is saved while parameters are offloaded reads freed memory.

Symptom:
    A segmentation fault, on a GPU an illegal memory access, from `dist_checkpointing.save` between
    a buffer's `offload_to_cpu()` and `reload_from_cpu()`: a save right after a validation or while
    inference engines use the memory.

Cause:
    Offloading shrinks the storage to zero bytes, and leaves the parameters as they were: a
    `sharded_state_dict` holds views of this storage.

Affects:
    0.16.0 and later. What the patch does: the save raises an error that says what to do, before it
    reads anything, on all ranks whose parameters are offloaded. Move them back, save, and offload
    again. The patch does not see exports that read parameters themselves.

Upstream:
    https://github.com/NVIDIA-NeMo/RL/pull/3605: NeMo-RL moves the model back before it saves.
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `_ParamAndGradBuffer.offload_to_cpu`.

Remove when:
    `dist_checkpointing.save` refuses parameters whose memory is released.
    `upstream/checkpoint-while-offloaded` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Original, Patch, address, arguments, bench, shared_folder, target


def save(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap `dist_checkpointing.save`: raise if a tensor to save is offloaded, so has no memory."""
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    for value in nested_values(arguments(original, args, kwargs)["sharded_state_dict"]):
        tensor = getattr(value, "data", value)
        # A quantized parameter keeps its values in other tensors, and has no memory of its own.
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
            continue
        if tensor.numel() and not tensor.untyped_storage().size():
            raise RuntimeError(
                f"{getattr(value, 'key', 'a tensor')} has {tensor.numel()} values and no memory: "
                "its buffer is offloaded. Call reload_from_cpu() on the model's buffers, save, and "
                "offload them again"
            )
    return original(*args, **kwargs)


def reproduce() -> None:
    """Save a model whose parameter buffers are offloaded to the host.
    On stock Megatron the process dies with a segmentation fault; with the patch the save raises.
    """
    from megatron.core import dist_checkpointing

    model = bench()
    model.train_step(1, data_seed=0)
    _offload(model)
    try:
        dist_checkpointing.save(model.chunks[0].module.sharded_state_dict(), shared_folder())
    except RuntimeError as refusal:
        if "no memory: its buffer is offloaded" not in str(refusal):
            raise


def control() -> object:
    """Save while only gradients are offloaded, and after parameters are back, as a control.
    Return the parameters' bytes.
    """
    from megatron.core import dist_checkpointing

    model = bench()
    model.train_step(1, data_seed=0)
    _offload(model, move_params=False)
    dist_checkpointing.save(model.chunks[0].module.sharded_state_dict(), shared_folder())
    _offload(model)
    for buffer in model.chunks[0].buffers:
        buffer.reload_from_cpu()
    dist_checkpointing.save(model.chunks[0].module.sharded_state_dict(), shared_folder())
    return model.bits()


def _offload(model: Any, **options: Any) -> None:
    for buffer in model.chunks[0].buffers:
        buffer.offload_to_cpu(**options)


PATCH = Patch(
    "a checkpoint saved while parameters are offloaded is a segmentation fault",
    target("core.dist_checkpointing.serialization:save", save, "sharded_state_dict"),
    since="0.16",
    came_with=(address("buffer.offload_to_cpu"), ""),
    groups=("offload",),
    fixed_by=(
        (
            address("core.dist_checkpointing.serialization:save"),
            "tensor.untyped_storage().size() == 0",
        ),
    ),
    stock_error=r"died with signal SIGSEGV|CUDA error: an illegal memory access",
)
