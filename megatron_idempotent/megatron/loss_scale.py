"""The loss scale of an optimizer as a model's `grad_scale_func`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


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
