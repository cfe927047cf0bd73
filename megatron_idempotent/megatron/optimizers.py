"""Patch targets in Megatron's optimizers: their steps and their factory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_idempotent.engine import Target

MODULE = "megatron.core.optimizer.optimizer"

# Body hash → releases, read by a person for every case file that wraps `step` as a whole.
_REVIEWED = {
    "ChainedOptimizer": {
        "4fd61c3e485d": "0.12.0 to 0.12.3",
        "d818bd287c1e": "0.13.0 to 0.13.1",
        "c30da5d35482": "0.14.0 to 0.17.1",
        "c5cecdd9658c": "0.18.0 to 0.18.2",
        "ae1b5bfed51c": "0.19.0 to 0.19.2",
        "454c5e79c2f2": "main, July 2026",
    },
    "MixedPrecisionOptimizer": {
        "5c5d2a035b76": "0.12.0 to 0.18.2",
        "d430f8b4abee": "0.19.0 to 0.19.2",
    },
    "FP32Optimizer": {"eeb0640de682": "0.12.0 to 0.18.2", "a6f03ced2b0c": "0.19.0 to 0.19.2"},
}


def step_target(kind: str, wrapper: Callable[..., Any]) -> Target:
    """`step` of one class."""
    return Target(address=f"{MODULE}:{kind}.step", wrapper=wrapper, reviewed=_REVIEWED[kind])


def step_targets(wrapper: Callable[..., Any]) -> tuple[Target, ...]:
    """`step` of all classes; a DistributedOptimizer has that of MixedPrecisionOptimizer."""
    return tuple(step_target(kind, wrapper) for kind in _REVIEWED)


def factory_target(wrapper: Callable[..., Any]) -> Target:
    """`get_megatron_optimizer`."""
    return Target(
        address="megatron.core.optimizer:get_megatron_optimizer",
        wrapper=wrapper,
        reviewed={
            "8706a90a392d": "0.12.0 to 0.12.3",
            "244495507815": "0.13.0 to 0.13.1",
            "2b8bb29f619d": "0.14.0",
            "44f549babf3c": "0.15.0 to 0.15.3",
            "93060c83cddd": "0.16.0 to 0.17.1",
            "47d770315c43": "0.18.0 to 0.18.2",
            "5ecdbe1eaf4e": "0.19.0 to 0.19.2",
        },
        relies_on=("model_chunks",),
        parts={"efec8d254753": "0.12.0 to 0.19.2"},
    )
