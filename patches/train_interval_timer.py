"""A second `train()` fails with "timer has already been started".

Symptom:
    `AssertionError: timer has already been started` from the second call of
    `megatron.training.training.train`, in `timers('interval-time',
    log_level=0).start(barrier=True)`, with or without overlap. After an exception inside the first
    call also from other timers: "optimizer", "eval-time" or "save-checkpoint".

Cause:
    `train()` starts the timer "interval-time" on entry and never stops it; the logging in between
    reads it while it runs. It stops its other timers without a `finally`.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: on entry it resets the "interval-time" of an earlier call, so that the time
    between two calls (such as a rollout) is in no interval. If `train()` or `train_step()` raises,
    the timers that were started inside are stopped.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py, `train`.

Remove when:
    `train()` stops its timers when it leaves. `upstream/train-interval-timer` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.schedules import stopping

from ._case import Original, Patch, a_body_has, address, program, target

_TIMER = "interval-time"


def train(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Reset the timer that an earlier call left running, then run upstream's `train`."""
    from megatron.training import get_timers

    timers = get_timers()
    # Not `timers(name)`, which would create it at a log level that upstream's call does not match.
    timer = timers._timers.get(_TIMER) if timers is not None else None
    if timer is not None:
        timer.reset()  # even if it is stopped, because it may have time from an earlier call
    return stopping(timers, original, *args, **kwargs)


def train_step(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `train_step`; if it raises, stop the timers that it started."""
    from megatron.training import get_timers

    return stopping(get_timers(), original, *args, **kwargs)


def reproduce() -> None:
    """Run `train()` twice; on stock Megatron the second call asserts on its interval timer."""
    running = program()
    running.train(1)
    running.train(1)


PATCH = Patch(
    'a second train() fails with "timer has already been started"',
    target("training.train", train, f"timers('{_TIMER}', log_level=0).start(barrier=True)"),
    target("training.train_step", train_step, "timers('optimizer', log_level=1)"),
    groups=("train-again",),
    # The loop stops and restarts the timer around evaluation; only a stop after it is a repair.
    fixed_when=a_body_has(f"timers('{_TIMER}').stop()", outside_loops=True),
    fixed_by=((address("training.train"), "timers('interval-time', log_level=0).reset()"),),
    stock_error=r"AssertionError: timer has already been started",
)
