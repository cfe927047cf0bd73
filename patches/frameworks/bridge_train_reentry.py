"""A second `train()` of Megatron-Bridge fails with "timer has already been started".

Symptom:
    `AssertionError: timer has already been started` from the second call of
    `megatron.bridge.training.train.train`. After a call without a successful iteration
    `config.param_sync_func` is None, and with `manual_gc` Python's garbage collector stays off.

Cause:
    The loop descends from upstream's `train()`: it starts "interval-time" on entry and never stops
    it, unsets `param_sync_func` without a `finally`, and calls only `gc.disable()`.

Affects:
    Every release, read from 0.3.1 to 0.6.2. What the patch does: the same as
    `train-interval-timer`, `param-sync-func-lost` and `gc-stays-off` for upstream. If `train()`
    raises, the timers that were started inside are stopped. The number of iterations, in
    `state.train_state.step`, is right. With overlap_param_gather the second call also needs
    `forward-pre-hook-reentry`. Not covered: at its end `train()` shuts down asynchronous
    checkpoints, straggler detection and energy monitor, and exits the process on an exit condition.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/train.py,
    `train`.

Remove when:
    Bridge's `train()` stops its timers and restores the config and the collector when it leaves.
    `upstream/bridge-train-reentry` has the repair.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_idempotent.patches._case import (
    Original,
    Patch,
    a_body_has,
    address,
    arguments,
    target,
)

from megatron_idempotent.megatron.schedules import stopping

from . import _copies

_TIMER = "interval-time"


def train(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run Bridge's `train`; reset timers and config before and after, so that it can run again."""
    from megatron.core.utils import get_model_config

    call = arguments(original, args, kwargs)
    timers, config = call["global_state"].timers, get_model_config(call["model"][0])
    timer = getattr(timers, "_timers", {}).get(_TIMER)
    if timer is not None:
        timer.reset()  # even if it is stopped, because it may have time from an earlier call
    return _copies.restoring(
        partial(stopping, timers, original),
        args,
        kwargs,
        config=config,
        param_sync_func=config.param_sync_func,
    )


def reproduce() -> None:
    """Run Bridge's `train()` twice without overlap.
    Without the patch the second call asserts that a timer has already been started.
    """
    from ._bridge import Bridge

    bridge = Bridge()
    bridge.train(1)
    bridge.train(1)


PATCH = Patch(
    'a second train() of Megatron-Bridge fails with "timer has already been started"',
    target(
        "bridge.training.train:train",
        train,
        "timers = global_state.timers",
        f"timers('{_TIMER}', log_level=0).start(barrier=True)",
        "param_sync_func = model_config.param_sync_func",
        "model_config.param_sync_func = None",
    ),
    since="0.3",
    # The loop stops and restarts the timer around evaluation; only a stop after it is a repair.
    fixed_when=a_body_has(f"timers('{_TIMER}').stop()", outside_loops=True),
    fixed_by=(
        (address("bridge.training.train:train"), "timers('interval-time', log_level=0).reset()"),
    ),
    stock_error=r"AssertionError: timer has already been started",
)
