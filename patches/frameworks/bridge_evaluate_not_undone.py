"""Bridge's `evaluate()`, where it raises or runs out of time, leaves the model in evaluation mode.

Symptom:
    After an `evaluate()` that raised: every module in evaluation mode, the rerun state machine
    DISABLED, `config.timers` None; and the next `evaluate()` dies with `AssertionError: timer has
    already been started`. After one that ran into `exit_duration_in_mins`: evaluation mode and the
    timer.

Cause:
    As in `evaluate-not-undone`: it undoes what it set up at its end, without a `finally`, and
    returns early at the time limit.

Affects:
    Every release, read from 0.3.1 to 0.6.2. What the patch does: what `evaluate-not-undone` does
    for upstream.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/eval.py,
    `evaluate`.

Remove when:
    Bridge's `evaluate()` undoes its changes in a `finally`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from megatron_idempotent.patches._case import Broken, Fault, Original, Patch, arguments, target

from megatron_idempotent.megatron.training import undone


def evaluate(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run Bridge's `evaluate`, and undo its changes also if it raises."""
    call = arguments(original, args, kwargs)
    return undone(
        original,
        args,
        kwargs,
        chunks=call["model"],
        config=call["config"],
        timers=call["state"].timers,
    )


def reproduce() -> None:
    """Run one evaluation whose data raises."""
    from ._bridge import Bridge

    bridge = Bridge()

    def broken(*_: Any) -> None:
        raise Broken("a microbatch that cannot be read")

    bridge.forward_step = broken
    with contextlib.suppress(Broken):
        bridge.evaluate()
    if not bridge.program.chunks[0].training:
        raise Fault("the model is in evaluation mode after evaluate()")


PATCH = Patch(
    "Bridge's evaluate(), where it raises, leaves evaluation mode, timer and rerun mode",
    target(
        "bridge.training.eval:evaluate",
        evaluate,
        "timers = state.timers",
        "timers('evaluate').stop()",
        "rerun_state_machine.set_mode(rerun_mode)",
        "config.timers = state.timers",
    ),
    since="0.3",
)
