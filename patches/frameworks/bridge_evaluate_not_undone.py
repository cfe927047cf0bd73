"""Bridge's `evaluate()`, if it raises or runs out of time, leaves the model in evaluation mode.

Symptom:
    After an `evaluate()` that raised, every module is in evaluation mode, the rerun state machine
    is DISABLED, `config.timers` is None, and the next `evaluate()` dies with `AssertionError: timer
    has already been started`. After one that ran into `exit_duration_in_mins`, the evaluation mode
    and the running timer remain.

Cause:
    As in `evaluate-not-undone`: it undoes its changes at its end, without a `finally`, and returns
    early at the time limit.

Affects:
    Every release, read from 0.3.1 to 0.6.2. What the patch does: the same as `evaluate-not-undone`
    for upstream.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/eval.py,
    `evaluate`.

Remove when:
    Bridge's `evaluate()` undoes its changes in a `finally`.
    `upstream/bridge-evaluate-not-undone` has the repair.
"""

from __future__ import annotations

import contextlib
from typing import Any

from megatron_idempotent.patches._case import (
    Broken,
    Fault,
    Original,
    Patch,
    address,
    arguments,
    target,
)

from megatron_idempotent.megatron.training import undone


def evaluate(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run Bridge's `evaluate`, and restore the settings that it changes, even if it raises."""
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
    """Run Bridge's `evaluate()` with a forward step that raises.
    Without the patch the model is in evaluation mode afterwards.
    """
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
    fixed_by=(
        (
            address("bridge.training.eval:evaluate"),
            "_undo_evaluation_on_error(model, config, rerun_mode)",
        ),
    ),
    loudness="both",
)
