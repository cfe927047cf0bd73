"""An exception inside a window or a step leaves timers running: the next one cannot start them.

Symptom:
    `AssertionError: timer has already been started` from the window or the optimizer step after one
    that raised, for example in `config.timers('forward-backward',
    log_level=1).start(barrier=config.barrier_with_L1_time)`, with `--timing-log-level` 1 or 2, or
    with any `config.timers`.

Cause:
    The schedules, `finalize_model_grads` and the optimizers start and stop their timers without a
    `finally`.

Affects:
    Every release. What the patch does: if a schedule, `finalize_model_grads` or an optimizer's
    `step` raises, the timers that were started inside are stopped. Their times of earlier
    iterations stay; the failed one does not count. Direct calls of `prepare_grads` and
    `step_with_ready_grads` are not covered. `accumulation_window()` reaches the schedules through
    this patch if `aux-loss-scale-left-set` has been removed.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/timers.py, `Timer.start`.

Remove when:
    the schedules and the optimizers stop their timers in a `finally`.
    `upstream/timers-left-running` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import schedules
from megatron_idempotent.megatron.schedules import stopping

from ._case import (
    Original,
    Patch,
    address,
    bench,
    interrupt_window,
    schedule_targets,
    step_targets,
    target,
)


def schedule(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a schedule; if it raises, stop the timers that it started."""
    original = schedules.around(original, kwargs["model"])
    timers = schedules.config_of(kwargs["model"]).timers
    return stopping(timers, original, *args, **kwargs)


def finalize(original: Original, model: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Run `finalize_model_grads`; if it raises, stop the timers that it started."""
    return stopping(schedules.config_of(model).timers, original, model, *args, **kwargs)


def step(original: Original, self: Any) -> Any:
    """Run an optimizer's `step`; if it raises, stop the timers that it started."""
    # An empty chain, on a rank whose parameters are frozen, has no config.
    return stopping(getattr(getattr(self, "config", None), "timers", None), original, self)


def reproduce() -> None:
    """Run a forward-only window with timers that raises, then one that does not.
    On stock Megatron the second window asserts that a timer has already been started.
    """
    from megatron.core.timers import Timers

    model = bench(overlap_grad_reduce=False)
    model.config.timers = Timers(2, "minmax")
    interrupt_window(model, at=0, forward_only=True)
    model.forward_backward(2, data_seed=0, forward_only=True)


PATCH = Patch(
    "an exception in a window or a step leaves timers running, and the next one asserts",
    *schedule_targets(schedule),
    target("finalize.finalize_model_grads", finalize),
    *step_targets(step),
    groups=("abort",),
    fixed_by=(
        (
            address("core.timers:Timer.start"),
            "logger.warning(f'timer {self.name} was still running, and is started again')",
        ),
    ),
    provides=(schedules.ASKS_WINDOWS,),
    stock_error=r"AssertionError: timer has already been started",
)
