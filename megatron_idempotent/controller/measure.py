"""Seconds by phase on the controller's clock, and the same phases on a timeline."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .watch.timeline import Timeline


class Measure:
    """Phases of a run. Example: `with measure.phase("policy_training"): …`"""

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @staticmethod
    def now() -> float:
        """The event loop's clock in seconds, which may be a virtual one."""
        return asyncio.get_running_loop().time()

    @contextmanager
    def phase(self, name: str, *, track: str = "train", **args: Any) -> Iterator[None]:
        """Measure a block; one that raises counts too."""
        start = self.now()
        try:
            yield
        finally:
            end = self.now()
            self._seconds[name] += end - start
            self.span(track, name, start, args)

    def span(self, track: str, name: str, start: float, args: Mapping[str, Any]) -> None:
        """Draw what began at `start` and ends now."""
        if self._timeline is not None:
            self._timeline.span(track, name, start, self.now(), args)

    def count(self, name: str, value: float) -> None:
        """Draw a number that changed."""
        if self._timeline is not None:
            self._timeline.count(name, self.now(), value)

    def mark(self, track: str, name: str) -> None:
        """Draw something that happened."""
        if self._timeline is not None:
            self._timeline.mark(track, name, self.now())

    def take(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        taken = dict(self._seconds)
        self._seconds.clear()
        return taken
