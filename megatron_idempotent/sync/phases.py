"""Tells a caller's timer of the phases of an update; a timer that fails never holds one up."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from .records import Phase, PhaseTimer

_log = logging.getLogger(__name__)


class Phases:
    """Times the phases of one update. Example: `with Phases(timer).time("commit"): …`."""

    def __init__(self, timer: PhaseTimer | None) -> None:
        self._timer = timer

    @contextlib.contextmanager
    def time(self, phase: Phase) -> Iterator[None]:
        """Enters the timer's context of a phase, unless there is no timer or it has raised."""
        stack = contextlib.ExitStack()
        if self._timer is not None:
            with self._harmless(phase):
                stack.enter_context(self._timer.time(phase))
        try:
            yield
        finally:
            # By itself: what the phase raises is not the timer's to see, or to swallow.
            with self._harmless(phase):
                stack.close()

    @contextlib.contextmanager
    def _harmless(self, phase: Phase) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (a measurement; engines may be paused meanwhile)
            self._timer = None
            _log.warning("the timer failed in phase %s, and is not asked again: %r", phase, error)
