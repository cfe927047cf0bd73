"""Patch targets in `LayerWiseDistributedOptimizer`, and the groups that it writes and gathers.

It is a chain of optimizers, each with whole parameters of this rank, and no DistributedOptimizer:
its updates do not pass the methods that `gather` watches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import Target
from megatron_idempotent.megatron import gather
from megatron_idempotent.megatron.ddp import bucket_groups

_OPTIMIZER = "megatron.core.optimizer.optimizer"
_LAYER_WISE = "megatron.core.optimizer.layer_wise_optimizer"
UPSTREAM = (
    "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/"
    "layer_wise_optimizer.py"
)
_CHUNKS = "_megatron_idempotent_chunks"


def step_target(wrapper: Callable[..., Any]) -> Target:
    """The method in which the chain updates its parameters.

    The base class's, because 0.17 overrides `step` and later releases `step_with_ready_grads`;
    either calls this one.
    """
    return Target(
        address=f"{_OPTIMIZER}:ChainedOptimizer.step_with_ready_grads",
        wrapper=wrapper,
        reviewed={"0a192e06e8f3": "0.17.0 to 0.17.1", "8255106bc090": "0.18.0 to 0.19.2"},
    )


def chunks_target() -> Target:
    """The constructor that tells the chunks to an optimizer which gathers by lists."""
    return Target(
        address=f"{_LAYER_WISE}:LayerWiseDistributedOptimizer.set_bucket_layerwise_params_list",
        wrapper=remember_chunks,
        reviewed={
            "db6d20368be6": "0.17.0 to 0.17.1",
            "86d5a2f4bf49": "main, April 2026",
            "b40214db7eb1": "0.18.0 to 0.18.2",
            "15796a7c7ddc": "0.19.0 to 0.19.2",
            "10c0be459ae3": "main, July 2026, and dev, August 2026",
        },
    )


def remember_chunks(original: Callable[..., None], self: Any, model_chunks: Any) -> None:
    """0.17, and commits between it and 0.18, forget them."""
    original(self, model_chunks)
    setattr(self, _CHUNKS, list(model_chunks))


def deferred_groups(optimizer: Any) -> list[Any]:
    """The bucket groups whose gather this optimizer leaves to the forward pre-hooks.

    The same on all ranks, whether they own any of the parameters or not.
    """
    if not _defers(optimizer):
        return []
    return [
        group
        for chunk in _chunks(optimizer)
        for group in bucket_groups(chunk)
        if gather.is_layer_wise(group)
    ]


def watch(optimizer: Any) -> None:
    """Remember the chunks, for a checkpoint."""
    if _defers(optimizer):
        for chunk in _chunks(optimizer):
            gather.watch(chunk)


def outdate(group: Any) -> None:
    """Marks the group's gathered parameters as out of date, as they are after a step."""
    if group.param_gather_handle is not None:
        # Only waited for: what it brings is about to be overwritten.
        group.param_gather_handle.wait()
        group.param_gather_handle = None
        for bucket in group.buckets:
            bucket.layerwise_gather_list = None
    group.param_gather_dispatched = False
    gather.mark(group)


def _defers(optimizer: Any) -> bool:
    if not hasattr(optimizer, "set_bucket_layerwise_params_list"):
        return False  # some other chain
    # The second is the name that 0.17 has for it.
    return bool(
        getattr(optimizer, "overlap_param_gather", False)
        or getattr(optimizer, "async_allgather", False)
    )


def _chunks(optimizer: Any) -> list[Any]:
    known = getattr(optimizer, "model_chunks", None) or getattr(optimizer, _CHUNKS, None)
    if known is None:
        import warnings

        warnings.warn(
            "a LayerWiseDistributedOptimizer, which on this Megatron forgets its model chunks, was "
            "built before megatron_idempotent.apply(): its updates are not watched. Call apply() "
            "first",
            stacklevel=2,
        )
        setattr(optimizer, _CHUNKS, [])  # said once
        return []
    return list(known)
