"""An `evaluate()` that raises, or runs into the time limit, leaves the model in evaluation mode.

Symptom:
    After an `evaluate()` that raised, every module is in evaluation mode (no dropout in the
    training that follows), the rerun state machine is DISABLED, `config.timers` is None, and the
    next `evaluate()` dies with `AssertionError: timer has already been started`. After one that ran
    into `--exit-duration-in-mins`, the evaluation mode and the running timer remain.

Cause:
    `evaluate()` undoes its changes at its end, without a `finally`, and returns early at the time
    limit.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: when `evaluate()` ends, even by an exception, each module has its mode from
    before the call, even an evaluation mode, which upstream ends. Rerun mode and `config.timers`
    have their earlier values, and the timers that it started are stopped.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py,
    `evaluate`.

Remove when:
    `evaluate()` undoes its changes in a `finally`. `upstream/evaluate-not-undone` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron.training import undone

from ._case import Broken, Fault, Original, Patch, address, arguments, program, target


def evaluate(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's `evaluate`, and restore the settings that it changed, even if it raises."""
    from megatron.training import get_timers

    call = arguments(original, args, kwargs)
    return undone(
        original, args, kwargs, chunks=call["model"], config=call["config"], timers=get_timers()
    )


def reproduce() -> None:
    """Run `evaluate()` with a forward step that raises.
    On stock Megatron the model is in evaluation mode afterwards.
    """
    import contextlib

    from megatron.training import training as upstream

    running = program(["--eval-iters", "1"])

    def broken(*_: Any) -> None:
        raise Broken("a microbatch that cannot be read")

    with contextlib.suppress(Broken):
        upstream.evaluate(broken, running.data[0], running.chunks, None, running.config)
    if not running.chunks[0].training:
        raise Fault("the model is in evaluation mode after evaluate()")


PATCH = Patch(
    "an evaluate() that raises leaves evaluation mode, its timer and rerun mode DISABLED",
    target(
        "training.evaluate",
        evaluate,
        "rerun_state_machine.set_mode(rerun_mode)",
        "timers('evaluate').stop()",
        "model_module.eval()",
        "model_module.train()",
        "config.timers = None",
    ),
    groups=("abort",),
    fixed_by=(
        (address("training.evaluate"), "_undo_evaluation_on_error(model, config, rerun_mode)"),
    ),
    loudness="both",
)
