"""After an exception in the optimizer Bridge's next `train_step` cannot start its timer.

Symptom:
    `AssertionError: timer has already been started` from the `train_step` after one whose
    optimizer step raised, with `timing_log_level` 1 or 2.

Cause:
    Bridge's `train_step` starts the timer "optimizer", and stops it without a `finally`. (Other
    effects of an exception are repaired in Megatron itself, and so for Bridge too, by
    `rerun-state-after-exception` and `timers-left-running`.)

Affects:
    Every release, read from 0.3.1 to 0.6.2 and main of August 2026. What the patch does: if the
    step raises, the timers that it started are stopped.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/train.py,
    `train_step`.

Remove when:
    Bridge's `train_step` stops its timers in a `finally`.
    `upstream/bridge-step-after-exception` has the repair.
"""

from __future__ import annotations

import contextlib
from typing import Any

from megatron_idempotent.patches._case import Broken, Original, Patch, arguments, target

from megatron_idempotent.megatron.schedules import stopping

from . import _copies


def train_step(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run Bridge's `train_step`; if it raises, stop the timers that the step started."""
    timers = arguments(original, args, kwargs)["global_state"].timers
    return stopping(timers, original, *args, **kwargs)


def reproduce() -> None:
    """Run a Bridge `train_step` whose optimizer raises, and then a good one.
    Without the patch the second call asserts that a timer has already been started.
    """
    from ._bridge import Bridge

    bridge = Bridge()
    optimizer = bridge.program.optimizer
    step = optimizer.step

    def fails() -> Any:
        raise Broken("an optimizer without memory")

    optimizer.step = fails
    with contextlib.suppress(Broken):
        bridge.step()
    optimizer.step = step
    bridge.step()


PATCH = Patch(
    "after an exception in the optimizer Bridge's next train_step cannot start its timer",
    target(
        "bridge.training.train:train_step",
        train_step,
        "timers = global_state.timers",
        'timers("optimizer").stop()',
    ),
    since="0.3",
    fixed_when=_copies.cleans_up("timers('optimizer').stop()"),
    stock_error=r"AssertionError: timer has already been started",
)
