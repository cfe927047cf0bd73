"""Calls a Megatron optimizer's `step()`, and stops it before it updates with what is not finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from .megatron_snapshot import undo_of
from .records import NonFinite, skipped_for
from .snapshot import StateUndo


class CheckedUpdate:
    """Runs an optimizer's `step()`, checks the norm in it, and knows how far it has come."""

    def __init__(
        self, chunks: Sequence[Any], optimizer: Any, rule: NonFinite, *, keeps_undo: bool
    ) -> None:
        self.updating = False
        """True once parameters may have been changed."""
        self.undo: StateUndo | None = None
        """The state to go back to, once parameters may have been changed; None without a copy."""
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._rule = rule
        self._keeps_undo = keeps_undo
        self._norms: list[Any] = []

    def reset(self) -> None:
        """Forget an earlier step."""
        self.updating, self.undo, self._norms = False, None, []

    @property
    def lowers_scale(self) -> bool:
        """True if a loss scale is lowered where gradients are not finite."""
        return any(isinstance(each, DynamicGradScaler) for each in self._scalers())

    def run(self) -> tuple[float | None, str | None]:
        """Call `step()`; return the gradients' norm, and the reason if there was no update.

        Raises:
            RuntimeError: the norm is not finite, and the rule is "refuse". Nothing was updated.
        """
        self.reset()
        # A scale is never written in place, so these are the values from before.
        scales = [(scaler, scaler.scale) for scaler in self._scalers()]
        with self._watched() as reasons:
            updated, grad_norm, _ = self._optimizer.step()
        norm = None if grad_norm is None else float(grad_norm)
        if updated:
            return norm, None
        if reasons:
            return norm, reasons[0]
        if norm is None:
            return None, _overflow(scales)
        if not self.updating:
            return norm, f"the norm of the gradients, {norm:g}, is above grad_norm_skip_threshold"
        return norm, "the optimizer reports that it has not updated"

    @contextmanager
    def _watched(self) -> Iterator[list[str]]:
        """Have the optimizer check the norm, which is that of all ranks, right before its update.

        Yields the reasons to skip the update. The norm is read here instead of at the end, so that
        the host waits for the device no more often.
        """
        optimizer, reasons = self._optimizer, list[str]()
        begin_update = optimizer.step_with_ready_grads

        def noting(compute: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **kwargs: Any) -> Any:
                self._norms = [compute(*args, **kwargs)]
                return self._norms[0]

            return noted

        def update(*args: Any, **kwargs: Any) -> Any:
            reason = self._reason_to_skip()
            if reason is not None:
                reasons.append(reason)
                return False
            if self._keeps_undo:
                self.undo = undo_of(self._chunks, optimizer)
            self.updating = True
            return begin_update(*args, **kwargs)

        replaced = {"step_with_ready_grads": update}
        if self._rule != "update":
            replaced["get_grad_norm"] = noting(optimizer.get_grad_norm)
            replaced["clip_grad_norm"] = noting(optimizer.clip_grad_norm)
        try:
            for name, function in replaced.items():
                setattr(optimizer, name, function)
            yield reasons
        finally:
            for name in replaced:
                vars(optimizer).pop(name, None)

    def _reason_to_skip(self) -> str | None:
        # Those of parameter groups that Megatron clips by themselves are not in the norm of all.
        by_group = getattr(self._optimizer, "grad_norms_by_group", None) or {}
        for norm in (*self._norms, *by_group.values()):
            if norm is not None:
                reason = skipped_for(float(norm), self._rule)
                if reason is not None:
                    return reason
        return None

    def _scalers(self) -> list[Any]:
        parts = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        scalers = [getattr(part, "grad_scaler", None) for part in parts]
        return [scaler for scaler in scalers if scaler is not None]


def _overflow(scales: Sequence[tuple[Any, Any]]) -> str:
    """Returns the reason for a skip after an overflow, with what became of the loss scale."""
    found = [(scaler, float(before), float(scaler.scale)) for scaler, before in scales]
    lowered = [each for each in found if each[2] < each[1]]
    scaler, before, now = (lowered or found)[0]
    if lowered:
        return f"gradients overflowed; the loss scale is {now:g} now, not {before:g}"
    if not isinstance(scaler, DynamicGradScaler):
        return f"gradients overflowed, or are NaN, under a fixed loss scale of {now:g}: lower it"
    if now <= float(scaler.min_scale):
        return f"gradients overflowed, and the loss scale of {now:g} is the least that is allowed"
    return f"gradients overflowed; the loss scale stays at {now:g}, as its hysteresis says"
