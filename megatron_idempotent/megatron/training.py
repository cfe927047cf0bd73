"""Cleans up after calls of `megatron.training.training` that raise.

Such a call leaves timers running, settings as `evaluate` changed them, and the rerun state machine
inside of a step.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from megatron_idempotent.patching.weak_keys import PerProcessWeakKeys

from .schedules import stopping
from .targets import TRAINING

#: Upstream adds this number times the pipeline rank to the seed.
STAGE_OFFSET = 100


def locals_of(function: str, error: BaseException) -> Mapping[str, Any] | None:
    """Return a copy of the local variables that upstream's `function` had when it raised `error`.

    None if the traceback does not have the function. `train` keeps its counters in local variables,
    and returns them only if it does not raise.
    """
    link = error.__traceback__
    while link is not None:
        frame = link.tb_frame
        if frame.f_code.co_name == function and frame.f_globals.get("__name__") == TRAINING:
            # A copy: from Python 3.13 on f_locals is a proxy, whose keys() is a list and not a set.
            return dict(frame.f_locals)
        link = link.tb_next
    return None


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
    """Call an `evaluate` function, and afterwards restore the settings that it changed.
    Return the function's result. The settings are also restored if the function raises.

    These are training modes, the rerun mode, the config's timers and the function's own timer.
    """
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
    was_training_by_module = dict(modes)
    for chunk in chunks:
        if chunk.training is not was_training_by_module[chunk]:
            chunk.train(
                was_training_by_module[chunk]
            )  # first, because a module may do more here than set its mode
    for module, was_training in modes:
        if module.training is not was_training:
            module.training = was_training


# State of the machine inside of a step → the state in which the next step must begin.
_INTERRUPTED = {
    "INITIAL_RUN": "NOT_RUNNING_YET",
    "RERUNNING_IN_PLACE": "NOT_RUNNING_YET",
    "RERUNNING_FROM_CHECKPOINT": "WILL_RERUN_FROM_CHECKPOINT",
}
_RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
#: Modules whose frames are between the calling function and our wrapper.
_BETWEEN = ("megatron_idempotent.patching", "wrapt")

#: Machine → the frame of the function that began its step. Only the frame shows if that function
#: has raised. Kept from the beginning of a step to its end, or to the next beginning.
_began: PerProcessWeakKeys[Any, FrameType] = PerProcessWeakKeys(__name__, "_began")


def live_machine() -> Any:
    """Return the process's rerun state machine; None if there is none.
    Upstream's getter would create one.
    """
    from megatron.core import rerun_state_machine

    return rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE


def abandon(machine: Any) -> None:
    """Reset the rerun state machine to its state before the current step, if it is in a step."""
    _began.pop(machine, None)
    waiting = _INTERRUPTED.get(machine.state.name)
    if waiting is None:
        return
    machine.state = type(machine.state)[waiting]
    machine.restart_again_requested = False
    machine.continue_requested = False
    if waiting == "NOT_RUNNING_YET":  # else a checkpoint's state still has to be rerun
        machine.current_iteration -= 1
        machine.rerun_requested = False
        machine.checkpoint_requested = False
        machine.failed_validation_call = None
        machine.initial_result = None
        machine.saved_state = None
        machine.saved_results = {}


def began(machine: Any) -> None:
    """Record the Python stack frame of the function that began the rerun state machine's current
    step by calling `should_run_forward_backward`. The frame later shows if an exception has left
    that function.
    """
    _began[machine] = next(
        frame
        for frame in _outwards(sys._getframe(2))
        if not frame.f_globals.get("__name__", "").startswith(_BETWEEN)
    )


def ended(machine: Any) -> None:
    """Drop the frame that `began` recorded.
    Call it after the loop of the rerun state machine's step has ended normally.
    """
    _began.pop(machine, None)


def abandon_if_left(machine: Any) -> None:
    """Call `abandon` if an exception has left the function that began the machine's current step.
    `abandon` resets the rerun state machine to its state before that step.

    If the function returned, or caught the exception itself, the step may still end, and is not
    changed.
    """
    frame = _began.get(machine)
    if frame is not None and _left_by_exception(frame):
        abandon(machine)


def _left_by_exception(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_flags & _SUSPENDABLE:  # it may be suspended
        return False
    if code.co_code[frame.f_lasti] in _RETURNS:
        return False
    threads = sys._current_frames().values()
    return not any(frame is running for thread in threads for running in _outwards(thread))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
