"""Records what each loop did and when, and writes it in Chrome's trace event format.

The format's rules are those of Google's "Trace Event Format" document: times in microseconds, `X`
events of one thread nested or apart, `M` events that name processes and threads.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
import math
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Laid(Generic[T]):
    """Gives a span its start and end in whole microseconds.

    Example: `Laid(what=span, start_us=0, end_us=5)`.
    """

    what: T
    """The span."""
    start_us: int
    """Microseconds from the timeline's first event to its start."""
    end_us: int
    """Microseconds from the timeline's first event to its end."""


def lay_out(spans: Sequence[Laid[T]]) -> list[list[Laid[T]]]:
    """Distribute spans over lanes, and return the lanes, at least one.

    If all spans nest or are apart, as the phases of a pump do, they are on one lane. Otherwise
    there are as many lanes as spans at once, and a span takes the lowest one that is free. Spans
    of a lane are sorted by start, outer ones before those inside them.
    """
    ordered = sorted(spans, key=lambda each: (each.start_us, -each.end_us))
    if _nest(ordered):
        return [ordered]
    lanes: list[list[Laid[T]]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # end_us, lane
    for span in ordered:
        while busy and busy[0][0] <= span.start_us:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(span)
        heapq.heappush(busy, (span.end_us, lane))
    return lanes


def _nest(ordered: Sequence[Laid[T]]) -> bool:
    open_ends: list[int] = []
    for span in ordered:
        while open_ends and open_ends[-1] <= span.start_us:
            open_ends.pop()
        if open_ends and span.end_us > open_ends[-1]:
            return False
        open_ends.append(span.end_us)
    return True


_PROCESS = 1
# Apart from all process ids: a thread with its process's id would be shown as the main one.
_FIRST_THREAD = 1_000


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write a timeline's trace to a file, whole or not at all. Errors: `OSError`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms",\n"otherData": ')
            file.write(json.dumps({"dropped_events": timeline.dropped}))
            file.write(',\n"traceEvents": [')
            separator = "\n"
            for event in trace_events(timeline):
                file.write(separator + json.dumps(event, allow_nan=False))
                separator = ",\n"
            file.write("\n]}\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield all events of the trace, those of names first; times count from the first event.

    A track whose spans nest or are apart is one thread of the process "controller". A track with
    overlapping spans is a process of its own, which viewers can fold, with a thread per lane.
    """
    spans, counts, marks = timeline.spans, timeline.counts, timeline.marks
    moments = [each.start_s for each in spans]
    moments += [each.at_s for each in marks] + [each.at_s for each in counts]
    zero_s = min(moments, default=0.0)

    laid: defaultdict[str, list[Laid[Span]]] = defaultdict(list)
    for span in spans:
        start_us, end_us = _us(span.start_s - zero_s), _us(span.end_s - zero_s)
        laid[span.track].append(Laid(what=span, start_us=start_us, end_us=end_us))
    marked: defaultdict[str, list[Mark]] = defaultdict(list)
    for mark in marks:
        marked[mark.track].append(mark)

    yield from _process(_PROCESS, "controller")
    yield from _counters(counts, zero_s)
    process, thread = _PROCESS, _FIRST_THREAD
    for track in timeline.tracks():
        lanes = lay_out(laid[track])
        home = _PROCESS
        if len(lanes) > 1:
            process += 1
            home = process
            yield from _process(home, track)
        yield from _instants(marked[track], zero_s, home, thread)
        for number, lane in enumerate(lanes, start=1):
            yield from _thread(home, thread, f"{track} {number}" if len(lanes) > 1 else track)
            yield from _complete(lane, home, thread)
            thread += 1


def _us(seconds: float) -> int:
    # Whole microseconds: a fraction that a viewer rounds could push a span over its parent's end.
    return round(seconds * 1e6)


def _complete(lane: Sequence[Laid[Span]], process: int, thread: int) -> Iterator[dict[str, Any]]:
    for laid in lane:
        event: dict[str, Any] = {
            "ph": "X",
            "name": laid.what.name,
            "cat": laid.what.track,
            "ts": laid.start_us,
            "dur": laid.end_us - laid.start_us,
            "pid": process,
            "tid": thread,
        }
        if laid.what.args:
            event["args"] = _shown(laid.what.args)
        yield event


def _instants(
    marks: Sequence[Mark], zero_s: float, process: int, thread: int
) -> Iterator[dict[str, Any]]:
    for mark in marks:
        at_us, place = _us(mark.at_s - zero_s), {"pid": process, "tid": thread}
        yield {"ph": "i", "s": "t", "name": mark.name, "ts": at_us, **place}


def _counters(counts: Sequence[Count], zero_s: float) -> Iterator[dict[str, Any]]:
    for count in counts:
        if math.isfinite(count.value):
            at_us, args = _us(count.at_s - zero_s), {"value": count.value}
            yield {"ph": "C", "name": count.name, "ts": at_us, "pid": _PROCESS, "args": args}


def _process(process: int, name: str) -> Iterable[dict[str, Any]]:
    for what, args in (
        ("process_name", {"name": name}),
        ("process_sort_index", {"sort_index": process}),
    ):
        yield {"ph": "M", "name": what, "pid": process, "ts": 0, "args": args}


def _thread(process: int, thread: int, name: str) -> Iterable[dict[str, Any]]:
    for what, args in (
        ("thread_name", {"name": name}),
        ("thread_sort_index", {"sort_index": thread}),
    ):
        yield {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _shown(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values for JSON: finite numbers and texts as they are, and all else as text."""
    return {
        str(name): value
        if isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
        else str(value)
        for name, value in args.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Records something that took time. Example: `span.end_s - span.start_s`."""

    track: str
    """The row that it is drawn in."""
    name: str
    """The phase, or a name with a number at its end, such as `group 17`."""
    start_s: float
    """The event loop's time at its start, in seconds."""
    end_s: float
    """The event loop's time at its end, in seconds."""
    args: Mapping[str, Any] | None = None
    """Values that viewers show with it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Records a value that holds from a moment until the next one of its name.

    Example: `count.value`.
    """

    name: str
    """The name of the curve."""
    at_s: float
    """The event loop's time from which on it holds, in seconds."""
    value: float
    """The value; one that is not finite leaves a gap."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Records an event at a moment. Example: `Mark(track="train", name="version 3", at_s=1.5)`."""

    track: str
    """The row that it is drawn in."""
    name: str
    """The text of the mark; `version 3` or `v3` is drawn as a line through all rows."""
    at_s: float
    """The event loop's time, in seconds."""


class Timeline:
    """Keeps the newest `capacity` events of a run, some 400 bytes each, and counts dropped ones.

    All times are the event loop's, in seconds. Recording an event takes microseconds and no lock:
    call `span`, `count` and `mark` from the event loop's thread. `write`, `spans`, `counts` and
    `marks` may be used from any thread.
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
        """Record a span from `start_s` to `end_s`. Spans of one track may overlap.

        Viewers show `args` with the span. Errors: `ValueError` if it ends before it starts, or a
        time is not finite.
        """
        if not (math.isfinite(start_s) and math.isfinite(end_s) and start_s <= end_s):
            raise ValueError(
                f"span {name!r} of track {track!r} is from {start_s} s to {end_s} s; it has to end "
                "when it starts or later"
            )
        self._record(Span(track=track, name=name, start_s=start_s, end_s=end_s, args=args))

    def count(self, name: str, at_s: float, value: float) -> None:
        """Record a value that holds from `at_s` on. A value that is not finite leaves a gap."""
        self._record(Count(name=name, at_s=at_s, value=value))

    def mark(self, track: str, name: str, at_s: float) -> None:
        """Record an event at `at_s`; one named `version 3` or `v3` is a line in the picture."""
        self._record(Mark(track=track, name=name, at_s=at_s))

    @property
    def dropped(self) -> int:
        """The number of events that were recorded and are not kept any more."""
        return self._recorded - len(self._events)

    @property
    def spans(self) -> list[Span]:
        """The spans that are kept, in the order in which they were recorded."""
        return [each for each in self._events.copy() if isinstance(each, Span)]

    @property
    def counts(self) -> list[Count]:
        """The counts that are kept, in the order in which they were recorded."""
        return [each for each in self._events.copy() if isinstance(each, Count)]

    @property
    def marks(self) -> list[Mark]:
        """The marks that are kept, in the order in which they were recorded."""
        return [each for each in self._events.copy() if isinstance(each, Mark)]

    def tracks(self) -> list[str]:
        """Return the names of tracks with spans or marks, in their order on the screen."""
        used = {each.track for each in self._events.copy() if not isinstance(each, Count)}
        first = [name for name in self._first_tracks if name in used]
        return first + sorted(used.difference(first))

    def write(self, path: Path) -> None:
        """Write a trace that ui.perfetto.dev and chrome://tracing open; `path` ends in `.json`.

        It is written under another name and renamed, so that `path` never has half a trace. 100,000
        events take about a second: call it from a thread while an event loop runs.
        Errors: `OSError`.
        """
        write_trace(self, path)

    def _record(self, event: Span | Count | Mark) -> None:
        self._events.append(event)
        self._recorded += 1
