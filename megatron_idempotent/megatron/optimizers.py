"""Applies the loss scale of Megatron's optimizers, and lists what they train."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def is_torch_adam(optimizer: Any) -> bool:
    """Return whether an optimizer counts steps per parameter, as only torch's Adam does."""
    import torch
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE and all(
        isinstance(one, (torch.optim.Adam, torch.optim.AdamW))
        for one in stepping(optimizer.optimizer)
    )


def is_hybrid(inner: Any) -> bool:
    """Return whether a torch optimizer is Megatron's that steps on the host, at any fraction."""
    return hasattr(inner, "param_to_inner_param")


def stepping(inner: Any) -> list[Any]:
    """Return the torch optimizers that step: those inside of a hybrid one, or the one itself."""
    return list(inner.sub_optimizers) if is_hybrid(inner) else [inner]


def renew_copies(hybrid: Any, *, widened: bool = True) -> None:
    """Copy parameters to what a hybrid optimizer steps on instead, on the host or in float32.

    Without `widened` leave out float32 copies of 16-bit parameters, which hold more than these.
    """
    for parameter, inner in hybrid.param_to_inner_param.items():
        if inner is not parameter and (widened or inner.dtype == parameter.dtype):
            inner.data.copy_(parameter.data)


SCALED = "_megatron_idempotent_scaled_by_caller"


OURS = "_megatron_idempotent_scaling"


class LossScale:
    """Calls `optimizer.scale_loss`, and does not keep alive, copy or pickle the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer; None if it no longer exists."""
        return self._optimizer()

    def __call__(self, loss: Tensor) -> Tensor:
        """Return `loss`, of any shape, times the optimizer's current loss scale.

        Return it as it is if the optimizer is gone, or if the caller has scaled by hand.
        """
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

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Another process has no such optimizer; None is what upstream's config starts with.
        return type(None), ()


# Attributes that hold lists of a model's parameters, where the inner optimizer has copies: of
# optimizers in half precision, and of the distributed one.
_MODELS_OWN = (
    "float16_groups",
    "fp32_from_fp32_groups",
    "model_float16_groups",
    "model_fp32_groups",
)


def trained_by(optimizer: Any) -> list[Any]:
    """Return the model's parameters that an optimizer, or a chain of them, updates on this rank.

    Those of a kind of optimizer that is not Megatron's own are not known, and left out.
    """
    found: list[Any] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(part, "chained_optimizers"):
            found += trained_by(part)
            continue
        groups = [group for name in _MODELS_OWN for group in getattr(part, name, ())]
        if not groups and type(part).__name__ == "FP32Optimizer":
            inner = getattr(part, "optimizer", None)
            groups = [group["params"] for group in getattr(inner, "param_groups", ())]
        found += [param for group in groups for param in group if param is not None]
    return found


def parts(optimizer: Any) -> list[Any]:
    """Return the optimizer and, if it is a chain, the optimizers in it."""
    return [optimizer, *getattr(optimizer, "chained_optimizers", ())]
