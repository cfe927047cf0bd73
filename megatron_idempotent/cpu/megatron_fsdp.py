"""Megatron-FSDP on CPU ranks: upstream's wrapper and its sharding strategies, on gloo.

gloo lacks one thing that it uses, the reduction that scales as it sums (`PREMUL_SUM`), and upstream
has an option for that: gradients are divided first.
"""

from __future__ import annotations

from typing import Any, Literal

Strategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]


def options(strategy: Strategy) -> dict[str, Any]:
    """Fields of DistributedDataParallelConfig for a model under Megatron-FSDP."""
    return {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": strategy,
        "gradient_reduce_div_fusion": False,
        "bucket_size": None,
    }


def wrapped(config: Any, ddp_config: Any, module: Any) -> Any:
    """The model chunk in Megatron-FSDP, with each transformer layer as a unit."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    # main has two of them, and names both.
    name = "FullyShardedDataParallelV1"
    wrapper = getattr(adapter, name, None) or adapter.FullyShardedDataParallel
    return wrapper(config=config, ddp_config=ddp_config, module=module)


def is_wrapped(chunk: Any) -> bool:
    """Whether the chunk is in Megatron-FSDP, the first version."""
    return hasattr(chunk.module, "param_and_grad_buffer")


def gradients(chunk: Any) -> list[Any]:
    """The gradients that this rank's optimizer would step with, in the order of the parameters."""
    found = []
    for _, parameter in chunk.module.param_and_grad_buffer.optimizer_named_parameters:
        gradient = getattr(parameter, "decoupled_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            found.append(getattr(gradient, "_local_tensor", gradient))
    return found


def parameters(chunk: Any) -> list[Any]:
    """What this rank's optimizer holds of the parameters, in their order."""
    named = chunk.module.param_and_grad_buffer.optimizer_named_parameters
    return [getattr(each, "_local_tensor", each).detach() for _, each in named]
