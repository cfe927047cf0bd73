"""Connects `accumulation_window()` with the schedules: it registers here, their wrapper asks.

Only the helper fills the list, so that without it a schedule's wrapper looks at an empty list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from megatron_idempotent.engine.per_process import PerProcessList
from megatron_idempotent.megatron import schedules


class Window(Protocol):
    """Runs the schedule calls of some model chunks."""

    def holds(self, chunk: Any) -> bool:
        """Returns whether the chunk is one of the window's."""

    def run(self, schedule: Callable[..., Any], **call: Any) -> Any:
        """One call of the schedule, as part of the window."""


open_windows: list[Window] = PerProcessList(__name__, "open_windows")


def are_held(chunks: list[Any]) -> bool:
    """Returns whether an open window holds one of the chunks."""
    return any(window.holds(chunk) for window in open_windows for chunk in chunks)


def around(schedule: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """`schedule`, or the same inside of the open window that holds a chunk of `model`."""
    for window in open_windows:
        if any(window.holds(chunk) for chunk in schedules.chunks(model)):
            return partial(window.run, schedule)
    return schedule
