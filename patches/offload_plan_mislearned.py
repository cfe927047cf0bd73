"""Activation offload takes its plan from a forward-only or aborted first window.

Symptom:
    With `fine_grained_activation_offloading`, if the first window of the process is forward-only
    (log-probabilities, a reference model, `evaluate()`): on 0.16 every training window raises
    `AssertionError: Chunk mismatch`. From 0.17 on, after one in eval mode, the first training
    window raises `AttributeError: 'NoneType' object has no attribute 'tensor_pop'` and later ones
    offload nothing. After one in train mode the plan has its number of microbatches and sizes of 0:
    more microbatches than that are not offloaded, and on 0.19 `activation_offload_fraction` is
    ignored, while with `delta_offload_bytes_across_pp_ranks` later stages raise `Chunk mismatch`.
    On 0.16 a later forward-only window makes the next training window offload nothing. If the first
    training window raises in its loss, every later one raises `Chunk mismatch`, on all releases.

Cause:
    The offload manager, one per process, records each forward until the first `reset()`. Schedules
    call `reset()` at their end, but not when they raise, and on 0.16 not after forward-only ones.
    The manager does not check whether a backward will follow.

Affects:
    0.16 and later. What the patch does: a forward of a forward-only window, or one without
    gradients, offloads nothing and leaves the plan alone. If a window raises while the plan is
    learned, the next one learns it again; if a later window raises, the plan's position is reset
    and its tensors are released. Not covered: training windows with more microbatches than the
    first one offload only as many, and a second model that is trained takes the plan of the first;
    call `PipelineOffloadManager.reset_instance()` on all ranks in between. Tested with the
    manager's real bookkeeping, with copies that stay on the host; stand-ins replace Transformer
    Engine's flag and 0.19's check whether a tensor is on a device. Never run with CUDA graphs.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/pipeline_parallel/fine_grained_activation_offload.py,
    `PipelineOffloadManager.init_model_chunk_offload_handler`.

Remove when:
    forwards without a backward are not part of the plan, and schedules reset the manager when they
    raise. `upstream/offload-plan-mislearned` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import schedules

from ._case import Fault, Original, Patch, address, bench, schedule_targets, target

_IDLE = "_megatron_idempotent_idle"

_running = {"forward_only": False}


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a schedule, and record during it if it is forward-only.
    If a training call raises, reset the activation offload manager.
    """
    config = schedules.config_of(kwargs["model"])
    if not getattr(config, "fine_grained_activation_offloading", False):
        return original(*args, **kwargs)
    outer = _running["forward_only"]
    _running["forward_only"] = bool(kwargs["forward_only"])
    try:
        return original(*args, **kwargs)
    except BaseException:
        if not kwargs["forward_only"]:
            _abort()
        raise
    finally:
        _running["forward_only"] = outer


def _abort() -> None:
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        PipelineOffloadManager,
    )

    manager = PipelineOffloadManager.OFFLOAD_MGR
    if manager is None:
        return
    if manager._is_warmup:
        # Not reset(), which would make the partial record the plan, and is a collective.
        PipelineOffloadManager.OFFLOAD_MGR = None
        return
    manager.reset()
    for chunk in manager._cached_chunks_forward:
        for group in chunk.offload_groups:
            group._tensors.clear()


def begin_forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the activation offload manager's start of a chunk: skip it if no backward follows."""
    idle = _no_backward()
    setattr(self, _IDLE, idle)
    if idle:
        self._cur_forward_chunk = None  # it still has the last chunk, which is complete
    else:
        original(self, *args, **kwargs)


def next_chunk(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the activation offload manager's next chunk.
    Return None if no backward follows: then nothing is offloaded.
    """
    # Check both: a recomputed layer's first forward has no gradients, and the capture of CUDA
    # graphs calls layers without `begin_forward`.
    if getattr(self, _IDLE, False) and _no_backward():
        return None
    return original(self, *args, **kwargs)


def _no_backward() -> bool:
    import torch

    return _running["forward_only"] or not torch.is_grad_enabled()


def offloading(**layout: Any) -> Any:
    """Build a tiny model that offloads the activations saved by attention and the norm before it.
    So that no GPU is needed, also replace Transformer Engine's `cpu_offload`, and 0.19's check that
    a tensor is on a device.
    """
    from types import SimpleNamespace

    import torch
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as upstream

    transformer_engine.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)
    if hasattr(upstream.ChunkOffloadHandler, "_can_manage_tensor_for_offload"):
        upstream.ChunkOffloadHandler._can_manage_tensor_for_offload = staticmethod(
            lambda tensor: not isinstance(tensor, torch.nn.Parameter)
        )
    overrides = {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn", "attn_norm"],
        "min_offloaded_tensor_size": 1,
        **layout.pop("config_overrides", {}),
    }
    return bench(with_optimizer=False, config_overrides=overrides, **layout)


def offloaded() -> int:
    """Return the number of tensors copied to the host since the offload manager was created."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        PipelineOffloadManager,
    )

    count: int = PipelineOffloadManager.get_instance().cpu_tensor_pool._stats["allocation_requests"]
    return count


def reproduce() -> None:
    """Compute log-probs in eval mode, then train two windows with activation offload.
    On stock Megatron the training raises, or offloads nothing.
    """
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):  # upstream prints its plan
        model = offloading()
        (chunk,) = model.chunks
        chunk.eval()
        model.forward_backward(2, data_seed=0, forward_only=True)
        chunk.train()
        model.forward_backward(2, data_seed=0)
        learned = offloaded()
        model.forward_backward(2, data_seed=0)
    if not learned or offloaded() == learned:
        raise Fault("training offloads nothing")


PATCH = Patch(
    "activation offload raises, or offloads nothing, after a forward-only first window",
    target(
        "core.pipeline_parallel.fine_grained_activation_offload:"
        "PipelineOffloadManager.init_model_chunk_offload_handler",
        begin_forward,
    ),
    target(
        "core.pipeline_parallel.fine_grained_activation_offload:"
        "PipelineOffloadManager.pop_forward_chunk",
        next_chunk,
    ),
    *schedule_targets(schedule),
    since="0.16",
    fixed_by=(
        (
            address("schedules.forward_backward_no_pipelining"),
            "off_interface.start_schedule(forward_only)",
        ),
    ),
    stock_error=r"AssertionError: Chunk mismatch"
    r"|AttributeError: 'NoneType' object has no attribute 'tensor_pop'",
    loudness="both",
)
