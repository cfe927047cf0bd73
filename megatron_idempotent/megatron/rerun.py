"""The rerun state machine's step: when an exception has left it, and how to end it."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from megatron_idempotent.engine.weak_keys import PerProcessWeakKeys

# A step is under way: state by name → where a next step has to find the machine.
_INTERRUPTED = {
    "INITIAL_RUN": "NOT_RUNNING_YET",
    "RERUNNING_IN_PLACE": "NOT_RUNNING_YET",
    "RERUNNING_FROM_CHECKPOINT": "WILL_RERUN_FROM_CHECKPOINT",
}
_RETURNS = {dis.opmap[name] for name in ("RETURN_VALUE", "RETURN_CONST") if name in dis.opmap}
_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
#: Modules that stand between the function that asks and the wrapper that it reaches.
_BETWEEN = ("megatron_idempotent.engine", "wrapt")

#: By machine: the call of a function that began its step. Nothing but the frame can tell that an
#: exception has left that call. Held from the start of a step to its end, or to the next start.
_began: PerProcessWeakKeys[Any, FrameType] = PerProcessWeakKeys(__name__, "_began")


def live_machine() -> Any:
    """The process's rerun state machine, or None: upstream's getter would make one."""
    from megatron.core import rerun_state_machine

    return rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE


def abandon(machine: Any) -> None:
    """Take the machine out of the step it is in, if it is in one."""
    _began.pop(machine, None)
    waiting = _INTERRUPTED.get(machine.state.name)
    if waiting is None:
        return
    machine.state = type(machine.state)[waiting]
    machine.restart_again_requested = False
    machine.continue_requested = False
    if waiting == "NOT_RUNNING_YET":  # what was loaded from a checkpoint is still to be rerun
        machine.current_iteration -= 1
        machine.rerun_requested = False
        machine.checkpoint_requested = False
        machine.failed_validation_call = None
        machine.initial_result = None
        machine.saved_state = None
        machine.saved_results = {}


def began(machine: Any) -> None:
    """Remember that the function that called the caller, a wrapper, runs the machine's step."""
    _began[machine] = next(
        frame
        for frame in _outwards(sys._getframe(2))
        if not frame.f_globals.get("__name__", "").startswith(_BETWEEN)
    )


def ended(machine: Any) -> None:
    """Forget who ran the step: its loop has ended as it should."""
    _began.pop(machine, None)


def abandon_if_left(machine: Any) -> None:
    """End the machine's step where an exception has left the call that ran it.

    A function that returned, or catches the exception itself, may still ask for the step's end:
    its step is left alone.
    """
    frame = _began.get(machine)
    if frame is not None and _left_by_exception(frame):
        abandon(machine)


def _left_by_exception(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_flags & _SUSPENDABLE:  # may be waiting to go on
        return False
    if code.co_code[frame.f_lasti] in _RETURNS:
        return False
    threads = sys._current_frames().values()
    return not any(frame is running for thread in threads for running in _outwards(thread))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
