"""Records what every pump did and when: spans, curves and marks, in memory until written."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .trace import write_trace


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that took time. Example: `span.end_s - span.start_s`."""

    track: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """A value from a moment on, until the next one of that name. Example: `count.value`."""

    name: str
    at_s: float
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Something that happened at a moment. Example: `Mark(track="train", name="v3", at_s=1.5)`."""

    track: str
    name: str
    at_s: float


class Timeline:
    """The newest `capacity` events of a run, of some 400 bytes each; older ones are dropped
    and counted.

    All times are the event loop's, in seconds. Recording one takes microseconds and no lock: it
    belongs to the event loop's thread. `write`, and the three sequences, may be used from any.
    Example: `timeline.span("train", "finish", started, loop.time(), {"version": 3})`.
    """

    def __init__(self, *, capacity: int = 200_000, tracks: Sequence[str] = ()) -> None:
        """Keep up to `capacity` events; `tracks` come first and in this order, others by name."""
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; allowed: 1 event or more")
        self._events: deque[Span | Count | Mark] = deque(maxlen=capacity)
        self._recorded = 0
        self._first_tracks = tuple(tracks)

    def span(
        self,
        track: str,
        name: str,
        start_s: float,
        end_s: float,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Record what took from `start_s` to `end_s`. Spans of one track may overlap.

        `args` are shown with the span. Errors: `ValueError` where it ends before it starts.
        """
        if not (math.isfinite(start_s) and math.isfinite(end_s) and start_s <= end_s):
            raise ValueError(
                f"span {name!r} of track {track!r} is from {start_s} s to {end_s} s; it has to end "
                "when it starts or later"
            )
        self._record(Span(track=track, name=name, start_s=start_s, end_s=end_s, args=args))

    def count(self, name: str, at_s: float, value: float) -> None:
        """Record a value that holds from `at_s` on. One that is not finite leaves a gap."""
        self._record(Count(name=name, at_s=at_s, value=value))

    def mark(self, track: str, name: str, at_s: float) -> None:
        """Record that something happened at `at_s`."""
        self._record(Mark(track=track, name=name, at_s=at_s))

    @property
    def dropped(self) -> int:
        """Events that were recorded and are not kept any more, the oldest first."""
        return self._recorded - len(self._events)

    @property
    def spans(self) -> list[Span]:
        """Returns the kept ones, in the order in which they were recorded."""
        return [each for each in self._events.copy() if isinstance(each, Span)]

    @property
    def counts(self) -> list[Count]:
        """Returns the kept ones, in the order in which they were recorded."""
        return [each for each in self._events.copy() if isinstance(each, Count)]

    @property
    def marks(self) -> list[Mark]:
        """Returns the kept ones, in the order in which they were recorded."""
        return [each for each in self._events.copy() if isinstance(each, Mark)]

    def tracks(self) -> list[str]:
        """Names of the tracks that hold something, in their order on the screen."""
        used = {each.track for each in self._events.copy() if not isinstance(each, Count)}
        first = [name for name in self._first_tracks if name in used]
        return first + sorted(used.difference(first))

    def write(self, path: Path) -> None:
        """Write a trace that ui.perfetto.dev and chrome://tracing open; `path` ends in `.json`.

        Written beside its name and renamed, so there is an old one or a whole one. 100,000 events
        take about a second: call it from a thread where a loop runs. Errors: `OSError`.
        """
        write_trace(self, path)

    def _record(self, event: Span | Count | Mark) -> None:
        self._events.append(event)
        self._recorded += 1
