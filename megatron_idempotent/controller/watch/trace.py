"""A timeline in the trace event format of Chrome: complete events, counters, instants, names.

The format's rules are those of Google's "Trace Event Format" document: times in microseconds, `X`
events of one thread nested or apart, `M` events that name processes and threads.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .lanes import Laid, lay_out

if TYPE_CHECKING:
    from .timeline import Count, Mark, Span, Timeline

_PROCESS = 1
# Apart from all process ids: a thread with its process's id would be shown as the main one.
_FIRST_THREAD = 1_000


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the file, whole or not at all."""
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
    """All events of the file, names first. The first moment is 0.

    A track whose spans nest, or do not meet, is one thread of the process "controller". One with
    many things at once is a process of its own, which viewers can fold, with a thread per lane.
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
    """Values as JSON has them: numbers that are finite and texts; the rest as text."""
    return {
        str(name): value
        if isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
        else str(value)
        for name, value in args.items()
    }
