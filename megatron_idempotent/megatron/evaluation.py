"""The part of `evaluate` that upstream does not undo when it raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.megatron.timers import stopping

_TIMER = "evaluate"


def undone(
    original: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    chunks: Sequence[Any],
    config: Any,
    timers: Any,
) -> Any:
    """Call an `evaluate`, upstream's or a copy, and undo what it set up, however it ends."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine

    rerun = get_rerun_state_machine()
    modes = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    rerun_mode, config_timers = rerun.get_mode(), config.timers
    try:
        return stopping(timers, original, *args, **kwargs)
    finally:
        _put_back(chunks, modes)
        rerun.set_mode(rerun_mode)
        if config.timers is None:
            config.timers = config_timers
        timer = timers._timers.get(_TIMER)
        if timer is not None and timer._started:  # the return at the time limit
            timer.reset()


def _put_back(chunks: Sequence[Any], modes: Sequence[tuple[Any, bool]]) -> None:
    before = dict(modes)
    for chunk in chunks:
        if chunk.training is not before[chunk]:
            chunk.train(before[chunk])  # first, because a module may do more here than set its mode
    for module, was_training in modes:
        if module.training is not was_training:
            module.training = was_training
