"""Keeps what a step changes on Megatron, apart from gradients and parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Protocol

from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron_idempotent.megatron import moe
from megatron_idempotent.megatron.ddp import bucket_groups
from megatron_idempotent.window.accumulation import configs_of

from .snapshot import (
    AttributeSnapshot,
    FunctionSnapshot,
    GroupSnapshot,
    ModuleSnapshot,
    StateUndo,
    TorchSnapshot,
)

_MOE = "megatron.core.transformer.moe"
# What a step sets aside while it runs. Each is back when a call ends, in whatever way; but that a
# second exception interrupts the putting back.
_ASIDE = (
    "finalize_model_grads_func",
    "grad_scale_func",
    "grad_sync_func",
    "no_sync_func",
    "param_sync_func",
)
_WATCHED = ("step_with_ready_grads", "get_grad_norm", "clip_grad_norm")
_OVERRIDDEN = ("start_grad_sync", "start_param_sync", "register_grad_ready", "check_grads")


class _Part(Protocol):
    def restore(self) -> None: ...


class SharedSnapshot:
    """Keeps what a step changes in the modules and the process, as it is now."""

    def __init__(self, chunks: list[Any], *, auxiliary: bool = True) -> None:
        """With `auxiliary`, layers may have losses of their own, which they scale and log."""
        self.modules = ModuleSnapshot(chunks)
        self._parts: list[_Part] = [self.modules, TorchSnapshot(), TrackerSnapshot()]
        for config in configs_of(chunks):
            self._parts.append(FunctionSnapshot(config, _ASIDE))
        steps = ("backward_step", "forward_step", "forward_step_calc_loss")
        self._parts.append(FunctionSnapshot(schedules, steps))
        if auxiliary:
            self._parts.append(LogSnapshot())
        for scaler in moe.scalers() if auxiliary else ():
            self._parts.append(AttributeSnapshot(scaler, ["main_loss_backward_scale"]))

    def restore(self) -> None:
        """Put all of it back; may be called again."""
        for part in self._parts:
            part.restore()


class MegatronSnapshot(SharedSnapshot):
    """Keeps all that a step changes, but for gradients, parameters and the optimizer's state."""

    def __init__(
        self, chunks: list[Any], optimizer: Any, scheduler: Any, *, auxiliary: bool
    ) -> None:
        super().__init__(chunks, auxiliary=auxiliary)
        self._parts += [
            FunctionSnapshot(group, _OVERRIDDEN) for c in chunks for group in bucket_groups(c)
        ]
        if optimizer is not None:
            self._parts.append(FunctionSnapshot(optimizer, _WATCHED))
        for one in _optimizers(optimizer):
            scaler = getattr(one, "grad_scaler", None)
            if scaler is not None:
                self._parts.append(AttributeSnapshot(scaler))
            if getattr(one, "optimizer", None) is not None:
                self._parts.append(GroupSnapshot(one.optimizer.param_groups))
        if scheduler is not None:
            self._parts.append(AttributeSnapshot(scheduler))


class TrackerSnapshot:
    """Keeps the random states of Megatron's tracker, which forwards draw dropout from."""

    def __init__(self) -> None:
        self._states = {
            name: state.clone() if isinstance(state, Tensor) else state
            for name, state in get_cuda_rng_tracker().get_states().items()
        }
        # Of a fork that was left in the wrong order; Transformer Engine's tracker has none.
        self._current = vars(get_cuda_rng_tracker()).get("_current_state_name")

    def restore(self) -> None:
        tracker = get_cuda_rng_tracker()
        states = {n: s.clone() if isinstance(s, Tensor) else s for n, s in self._states.items()}
        tracker.set_states(states)
        if self._current is not None:
            tracker._current_state_name = self._current


class LogSnapshot:
    """Keeps the totals that MoE, MTP and DSA layers log; with `empty`, zeros instead."""

    def __init__(self, *, empty: bool = False) -> None:
        self._values = [] if empty else [(value, value.clone()) for value in _logged()]

    def restore(self) -> None:
        """Put the totals back; those that layers have begun to log since then become zero."""
        known = {id(value): before for value, before in self._values}
        for value in _logged():
            before = known.get(id(value))
            if before is None:
                value.zero_()
            else:
                value.copy_(before)

    def add(self) -> None:
        """Add the kept totals to those that are logged now."""
        for value, before in self._values:
            value.add_(before)


def _logged() -> Iterator[Tensor]:
    logging = sys.modules.get(f"{_MOE}.moe_logging")
    state = sys.modules.get("megatron.core.parallel_state")
    moe_utils = sys.modules.get(f"{_MOE}.moe_utils")
    if logging is not None:  # from 0.18 on
        yield from (entry.values for entry in logging.get_moe_metrics_tracker().metrics.values())
    else:
        for owner in (moe_utils, state):
            get = getattr(owner, "get_moe_layer_wise_logging_tracker", None)
            if get is not None:
                yield from (entry["values"] for entry in get().values())
                break
    yield from moe.layer_logs()


def undo_of(chunks: list[Any], optimizer: Any) -> StateUndo:
    """Copies the trained parameters and the optimizer's state, to go back to."""
    inner = [one.optimizer for one in _optimizers(optimizer)]
    return StateUndo(
        [param for chunk in chunks for param in chunk.param_to_bucket_group],
        [one for one in inner if one is not None],
    )


def _optimizers(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
