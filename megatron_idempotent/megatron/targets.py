"""Gives short names to the functions that patches wrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.patching import Target

_DISTRIBUTED = "megatron.core.distributed"
_BUFFER = f"{_DISTRIBUTED}.param_and_grad_buffer"
_FSDP = f"{_DISTRIBUTED}.fsdp.src.megatron_fsdp.megatron_fsdp"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
TRAINING = "megatron.training.training"
_PREFIXES = {
    # A wrapped chunk, its bucket groups (each is reduced or gathered by one collective) and its
    # buffers, which are zeroed by `reset` from 0.16 on.
    "ddp": f"{_DISTRIBUTED}.distributed_data_parallel:DistributedDataParallel.",
    "group": f"{_BUFFER}:_ParamAndGradBucketGroup.",
    "buffer": f"{_BUFFER}:_ParamAndGradBuffer.",
    # The base class of a wrapped chunk, with its forward; Megatron-FSDP's wrapper shares it.
    "chunk": f"{_DISTRIBUTED}.data_parallel_base:_BaseDataParallel.",
    "finalize": f"{_DISTRIBUTED}.finalize_model_grads:",
    # The first version of Megatron-FSDP.
    "fsdp": f"{_FSDP}:MegatronFSDP.",
    "optimizer": "megatron.core.optimizer:",
    "any": f"{_OPTIMIZER}:MegatronOptimizer.",
    "mixed": f"{_OPTIMIZER}:MixedPrecisionOptimizer.",
    "fp32": f"{_OPTIMIZER}:FP32Optimizer.",
    # The distributed optimizer writes its shard of the parameters in `step_with_ready_grads`; a
    # layer-wise one in `step` on 0.17, and in the chain's `step_with_ready_grads` later.
    "distributed": "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.",
    "chained": f"{_OPTIMIZER}:ChainedOptimizer.",
    "layer_wise": "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.",
    "schedules": "megatron.core.pipeline_parallel.schedules:",
    "training": f"{TRAINING}:",
    "utils": "megatron.core.utils:",
    "random": "megatron.core.tensor_parallel.random:",
    "layers": "megatron.core.tensor_parallel.layers:",
    "moe": "megatron.core.transformer.moe.",
    "mtp": "megatron.core.transformer.multi_token_prediction:",
    "checkpointing": "megatron.training.checkpointing:",
    "core": "megatron.core.",
    "bridge": "megatron.bridge.",
    "peft": "megatron.bridge.peft.",
}


def address(name: str) -> str:
    """Return a function's `module:qualname`; `name` is that, or a short form like `ddp.no_sync`.

    `moe.router:TopKRouter.forward` and `core.parallel_state:destroy_model_parallel` are short
    forms, too.
    """
    first, _, function = name.partition(".")
    return f"{_PREFIXES[first]}{function}" if first in _PREFIXES else name


def target(name: str, wrapper: Callable[..., Any], *relies_on: str, **more: Any) -> Target:
    """Return a `Target`: a function to wrap, by its address or a short form, and its wrapper."""
    return Target(address(name), wrapper, *relies_on, **more)


def step_targets(wrapper: Callable[..., Any]) -> tuple[Target, ...]:
    """Return `Target`s that wrap `step` of all Megatron optimizers with `wrapper`.
    DistributedOptimizer inherits one of these methods.
    """
    return tuple(target(f"{kind}.step", wrapper) for kind in ("chained", "mixed", "fp32"))


#: The schedules that defer the embedding's gradient.
PIPELINED = (
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)


def schedule_targets(wrapper: Callable[..., Any], *names: str) -> tuple[Target, ...]:
    """Return `Target`s that wrap the schedules called `names`, by default all, with `wrapper`."""
    names = names or ("forward_backward_no_pipelining", *PIPELINED)
    return tuple(target(f"schedules.{name}", wrapper) for name in names)
