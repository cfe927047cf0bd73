"""Records a timeline of a run, and writes it in Chrome's trace event format.

The format's rules are those of Google's "Trace Event Format" document: times are in microseconds,
`X` events of a thread are nested or disjoint, and `M` events name processes and threads.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .loggers import write_whole


class _Span(NamedTuple):
    track: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] | None


class _Count(NamedTuple):
    name: str
    start_s: float
    value: float


class _Mark(NamedTuple):
    track: str
    name: str
    start_s: float


class Timeline:
    """Keeps the newest `capacity` events of a run, of about 400 bytes each; counts dropped ones.

    All times are the event loop's, in seconds. Recording an event takes microseconds and no lock:
    call `span`, `count` and `mark` from the event loop's thread. `write` is thread-safe.

    Example: `timeline.span("train", "finish", started, loop.time(), {"version": 3})`.
    """

    def __init__(self, *, capacity: int = 200_000, tracks: Sequence[str] = ()) -> None:
        """Keep up to `capacity` events; `tracks` come first and in this order, others by name."""
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; allowed: 1 event or more")
        self._events: deque[_Span | _Count | _Mark] = deque(maxlen=capacity)
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
        """Record a span from `start_s` to `end_s`. Spans of one track may overlap.

        Viewers show `args` with the span.

        Raises:
            ValueError: the span ends before it starts, or a time is not finite.
        """
        if not (math.isfinite(start_s) and math.isfinite(end_s) and start_s <= end_s):
            raise ValueError(
                f"span {name!r} of track {track!r} is from {start_s} s to {end_s} s; it has to end "
                "when it starts or later"
            )
        self._record(_Span(track, name, start_s, end_s, args))

    def count(self, name: str, at_s: float, value: float) -> None:
        """Record a counter's value from `at_s` on. A value that is not finite leaves a gap."""
        self._record(_Count(name, at_s, value))

    def mark(self, track: str, name: str, at_s: float) -> None:
        """Record an instant event at `at_s`."""
        self._record(_Mark(track, name, at_s))

    def _record(self, event: _Span | _Count | _Mark) -> None:
        self._events.append(event)
        self._recorded += 1

    @property
    def dropped(self) -> int:
        """The number of events that were recorded and dropped since."""
        return self._recorded - len(self._events)

    def write(self, path: Path) -> None:
        """Write a trace that ui.perfetto.dev and chrome://tracing open; `path` ends in `.json`.

        The file is replaced atomically. 100,000 events take about a second: call it in a thread
        while an event loop runs.

        Raises:
            OSError: the file cannot be written.
        """
        dropped = json.dumps({"dropped_events": self.dropped})
        trace = _trace(list(self._events.copy()), self._first_tracks)
        events = ",\n".join(json.dumps(event, allow_nan=False) for event in trace)
        head = f'{{"displayTimeUnit": "ms",\n"otherData": {dropped},\n"traceEvents": ['
        write_whole(path, f"{head}\n{events}\n]}}\n")


_PROCESS = 1
# Above all process ids: a thread with its process's id would be shown as the main thread.
_FIRST_THREAD = 1_000


def _trace(
    events: Sequence[_Span | _Count | _Mark], first_tracks: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace; times count from the first event.

    A track without overlapping spans (nested ones do not count) is one thread of the process
    "controller". A track with overlapping spans is a separate process, which viewers can fold, with
    a thread per lane.
    """
    zero_s = min((event.start_s for event in events), default=0.0)

    def us(seconds: float) -> int:
        # Integers: a viewer that rounds fractions could move a span past its parent's end.
        return round((seconds - zero_s) * 1e6)

    yield from _metadata("process", "controller", _PROCESS)
    for count in events:
        if isinstance(count, _Count) and math.isfinite(count.value):
            at_us, value = us(count.start_s), {"value": count.value}
            yield {"ph": "C", "name": count.name, "ts": at_us, "pid": _PROCESS, "args": value}
    used = {event.track for event in events if not isinstance(event, _Count)}
    first = [name for name in first_tracks if name in used]
    process, thread = _PROCESS, _FIRST_THREAD
    for track in (*first, *sorted(used.difference(first))):
        spans = [
            (us(event.start_s), us(event.end_s), event)
            for event in events
            if isinstance(event, _Span) and event.track == track
        ]
        lanes = _lanes(spans)
        home = _PROCESS
        if len(lanes) > 1:
            process += 1
            home = process
            yield from _metadata("process", track, home)
        for mark in events:
            if isinstance(mark, _Mark) and mark.track == track:
                location = {"ts": us(mark.start_s), "pid": home, "tid": thread}
                yield {"ph": "i", "s": "t", "name": mark.name, **location}
        for number, lane in enumerate(lanes, start=1):
            yield from _metadata(
                "thread", f"{track} {number}" if len(lanes) > 1 else track, home, thread
            )
            for start_us, end_us, span in lane:
                location = {"ts": start_us, "dur": end_us - start_us, "pid": home, "tid": thread}
                args = {"args": _json_args(span.args)} if span.args else {}
                yield {"ph": "X", "name": span.name, "cat": track, **location, **args}
            thread += 1


_Laid = tuple[int, int, _Span]
"""A span with its start and its end in microseconds from the first event."""


def _lanes(spans: Sequence[_Laid]) -> list[list[_Laid]]:
    """Distribute spans over lanes, and return the lanes, at least one.

    If all spans are nested or disjoint, like the phases of a pump, they share one lane. Otherwise
    there are as many lanes as concurrent spans, and a span takes the lowest free lane. Spans of a
    lane are sorted by start, outer spans before nested ones.
    """
    ordered = sorted(spans, key=lambda laid_span: (laid_span[0], -laid_span[1]))
    if _nest(ordered):
        return [ordered]
    lanes: list[list[_Laid]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # end, lane
    for span in ordered:
        while busy and busy[0][0] <= span[0]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, len(lanes))
            lanes.append([])
        lane = heapq.heappop(free)
        lanes[lane].append(span)
        heapq.heappush(busy, (span[1], lane))
    return lanes


def _nest(ordered: Sequence[_Laid]) -> bool:
    open_ends: list[int] = []
    for start_us, end_us, _ in ordered:
        while open_ends and open_ends[-1] <= start_us:
            open_ends.pop()
        if open_ends and end_us > open_ends[-1]:
            return False
        open_ends.append(end_us)
    return True


def _metadata(
    kind: str, name: str, process: int, thread: int | None = None
) -> list[dict[str, Any]]:
    """Return the metadata events that name a process or thread and set its sort order."""
    location = {"pid": process} if thread is None else {"pid": process, "tid": thread}
    order = process if thread is None else thread
    args_by_name = {f"{kind}_name": {"name": name}, f"{kind}_sort_index": {"sort_index": order}}
    return [
        {"ph": "M", "name": key, "ts": 0, **location, "args": args}
        for key, args in args_by_name.items()
    ]


def _json_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for JSON: finite numbers and strings unchanged, other values as strings."""
    return {
        str(name): value
        if isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
        else str(value)
        for name, value in args.items()
    }
