"""An `evaluate()` that raises, or runs into the time limit, leaves the model in evaluation mode.

Symptom:
    After an `evaluate()` that raised: every module in evaluation mode (no dropout in the training
    that follows), the rerun state machine DISABLED, `config.timers` None; and the next
    `evaluate()` dies with `AssertionError: timer has already been started`. After one that ran
    into `--exit-duration-in-mins`: evaluation mode and the timer.

Cause:
    `evaluate()` undoes what it set up at its end, without a `finally`, and returns early at the
    time limit.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only. What
    the patch does: however `evaluate()` ends, each module's mode is what it was before the call,
    also where the caller was in evaluation mode, which upstream ends; rerun mode and
    `config.timers` are what they were, and the timers it started are stopped.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/training.py,
    `evaluate`.

Remove when:
    `evaluate()` undoes its changes in a `finally`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.engine import UNTRIED, Patch, Reproduction, arguments

from . import _train
from ._timers import stopping

_TIMER = "evaluate"


def evaluate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around upstream's `evaluate`: undo what it set up."""
    from megatron.training import get_timers

    call = arguments(original, args, kwargs)
    return undone(
        original, args, kwargs, chunks=call["model"], config=call["config"], timers=get_timers()
    )


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
    for module, training in modes:
        if module.training is not training:
            module.training = training


def reproduce() -> None:
    """One evaluation whose data raises."""
    import contextlib

    from megatron.training import training

    from megatron_idempotent.cpu import program

    running = program.start(["--eval-iters", "1"])

    def broken(*_: Any) -> None:
        raise _train.Broken("a microbatch that cannot be read")

    with contextlib.suppress(_train.Broken):
        training.evaluate(broken, running.data[0], running.chunks, None, running.config)
    if not running.chunks[0].training:
        raise RuntimeError("the model is in evaluation mode after evaluate()")


PATCH = Patch(
    id="evaluate-not-undone",
    summary="an evaluate() that raises leaves evaluation mode, its timer and rerun mode DISABLED",
    since="0.12",
    before=UNTRIED,
    groups=("abort",),
    targets=(
        _train.target(
            evaluate,
            "rerun_state_machine.set_mode(rerun_mode)",
            "timers('evaluate').stop()",
            "model_module.eval()",
            "model_module.train()",
            "config.timers = None",
            function="evaluate",
            parts={
                "dfe2bf52ee41": "0.12.0 to 0.13.1",
                "3066d11ed931": "0.14.0 to 0.16.1",
                "0355b231e161": "0.17.0 to 0.19.2",
                "e1a49514e082": "main, August 2026",
                "fbcf983b7089": "dev, August 2026",
            },
        ),
    ),
    upstream=_train.UPSTREAM,
    reproduction=Reproduction(
        run=reproduce,
        ranks=2,
        stock_error=r"RuntimeError: the model is in evaluation mode after evaluate\(\)",
    ),
)
