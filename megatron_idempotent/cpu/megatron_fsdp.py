"""Megatron-FSDP on CPU ranks: upstream's wrapper and its sharding strategies, on gloo.

gloo lacks one thing that it uses, the reduction that scales as it sums (`PREMUL_SUM`), and upstream
has an option for that: gradients are divided first. There are two versions of the wrapper, the
second one on Megatron main.
"""

from __future__ import annotations

from typing import Any, Literal

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params", "v2"]
"""The state that the first version shards; the second one shards all three."""


def options(strategy: Strategy) -> dict[str, Any]:
    """Fields of DistributedDataParallelConfig for a model under Megatron-FSDP."""
    second = strategy == "v2"
    return {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": "optim_grads_params" if second else strategy,
        "gradient_reduce_div_fusion": False,
        "bucket_size": None,
        **({"megatron_fsdp_version": 2} if second else {}),
    }


def wrapped(config: Any, ddp_config: Any, module: Any) -> Any:
    """The model chunk in Megatron-FSDP, with each transformer layer as a unit."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    options = {"config": config, "ddp_config": ddp_config, "module": module}
    if getattr(ddp_config, "megatron_fsdp_version", 1) == 2:
        from megatron.core.process_groups_config import ProcessGroupCollection

        _give_streams()
        options["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    return adapter.FullyShardedDataParallel(**options)


def _give_streams() -> None:
    """Let buffers of the second version have a stream, which they note down on a CUDA device only.

    It asserts that they have one. The one thing of upstream that is replaced here.
    """
    import torch
    from megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer import DBuffer

    DBuffer.allocation_stream = property(
        lambda self: torch.cuda.current_stream(), lambda self, stream: None
    )


def is_wrapped(chunk: Any) -> bool:
    """Returns whether the chunk is in Megatron-FSDP."""
    return hasattr(chunk.module, "param_and_grad_buffer") or _is_second(chunk)


def gradients(chunk: Any) -> list[Any]:
    """The gradients that this rank's optimizer would step with, in the order of the parameters."""
    found = []
    for parameter in _held(chunk):
        gradient = getattr(parameter, "decoupled_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            found.append(getattr(gradient, "_local_tensor", gradient))
    return found


def parameters(chunk: Any) -> list[Any]:
    """Returns this rank's optimizer's parts of the parameters, in their order."""
    return [getattr(each, "_local_tensor", each).detach() for each in _held(chunk)]


def _held(chunk: Any) -> list[Any]:
    if _is_second(chunk):
        return list(chunk.parameters())
    return [each for _, each in chunk.module.param_and_grad_buffer.optimizer_named_parameters]


def _is_second(chunk: Any) -> bool:
    return getattr(getattr(chunk, "ddp_config", None), "megatron_fsdp_version", 1) == 2
