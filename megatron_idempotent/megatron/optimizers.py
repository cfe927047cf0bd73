"""Megatron's optimizers: patch targets in their steps and checkpoints, and the loss scale."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_idempotent.patching import Target

if TYPE_CHECKING:
    from torch import Tensor


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


_MODULE = "megatron.core.optimizer.distrib_optimizer"
UPSTREAM = (
    "https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/"
    "distrib_optimizer.py"
)

# Body hash → releases, read by a person for every case file that uses the method.
_REVIEWED_CHECKPOINTS = {
    "state_dict": {
        "a8f5b130215d": "0.12.0 to 0.13.1",
        "ed939f25d63c": "0.14.0",
        "517a44685655": "0.15.0 to 0.19.2",
        "7b945c8203df": "slime's patch and miles' fork, August 2026",
    },
    "load_state_dict": {
        "8caa0198d084": "0.12.0 to 0.12.3",
        "4ab433e14e59": "0.13.0 to 0.13.1",
        "bc2722b2d5a9": "0.14.0",
        "94e171bc79ce": "0.15.0 to 0.15.3",
        "cbe25a473496": "0.16.0 to 0.18.2",
        "0bc9f68a4a8c": "0.19.0 to 0.19.2",
        "29e68aa9b850": "miles' fork, August 2026",
        "7e4330203d8a": "dev, August 2026",
    },
}


def target(method: str, wrapper: Callable[..., Any]) -> Target:
    """A method of `DistributedOptimizer`."""
    return Target(
        address=f"{_MODULE}:DistributedOptimizer.{method}",
        wrapper=wrapper,
        reviewed=_REVIEWED_CHECKPOINTS[method],
    )


def is_torch_adam(optimizer: Any) -> bool:
    """Returns whether an optimizer counts steps per parameter, as only torch's Adam does."""
    import torch
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE and isinstance(
        optimizer.optimizer, (torch.optim.Adam, torch.optim.AdamW)
    )


SCALED = "_megatron_idempotent_scaled_by_caller"


OURS = "_megatron_idempotent_scaling"


class LossScale:
    """`optimizer.scale_loss` without keeping, copying or pickling the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, loss: Tensor) -> Tensor:
        """`loss` of any shape times the optimizer's current loss scale."""
        optimizer = self._optimizer()
        if optimizer is None or any(SCALED in vars(part) for part in parts(optimizer)):
            return loss
        setattr(optimizer, OURS, True)
        try:
            scaled: Tensor = optimizer.scale_loss(loss)
        finally:
            delattr(optimizer, OURS)
        return scaled

    def __deepcopy__(self, memo: dict[int, Any]) -> LossScale:
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        # Another process has no such optimizer; None is what upstream's config starts with.
        return _unwired, ()


def _unwired() -> None:
    return None


def parts(optimizer: Any) -> list[Any]:
    return [optimizer, *getattr(optimizer, "chained_optimizers", ())]
