"""Records a timeline of a run, and writes it in Chrome's trace event format.

The format's rules are those of Google's "Trace Event Format" document: times are in microseconds,
`X` events of a thread are nested or disjoint, and `M` events name processes and threads.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .loggers import write_whole

_PROCESS = 1
# Above all process ids: a thread with its process's id would be shown as the main thread.
_FIRST_THREAD = 1_000


class _Event(NamedTuple):
    kind: Literal["X", "C", "i"]
    track: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Any]


class Timeline:
    """Keeps the newest `capacity` events of a run for a trace file; counts the events that it has
    dropped.

    All times are the event loop's, in seconds. Recording an event takes microseconds and no lock:
    call `span`, `count` and `mark` from the event loop's thread. `write` is thread-safe.

    Example: `timeline.span("train", "finish", started, loop.time(), {"version": 3})`.
    """

    def __init__(self, *, capacity: int = 200_000, tracks: Sequence[str] = ()) -> None:
        """Keep up to `capacity` events. In the trace, `tracks` come first and in this order, and
        all other tracks follow by name.
        """
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; allowed: 1 event or more")
        self._events: deque[_Event] = deque(maxlen=capacity)
        self._recorded = 0
        self._first_tracks = {name: order for order, name in enumerate(tracks)}

    def span(
        self,
        track: str,
        name: str,
        start_s: float,
        end_s: float,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Record an activity `name` on a track, from `start_s` to `end_s`. Spans of one track are
        nested or disjoint.

        Viewers show `args` with the span.

        Raises:
            ValueError: the span ends before it starts, or a time is not finite.
        """
        if not (math.isfinite(start_s) and math.isfinite(end_s) and start_s <= end_s):
            raise ValueError(
                f"span {name!r} of track {track!r} is from {start_s} s to {end_s} s; it has to end "
                "when it starts or later"
            )
        self._record(_Event("X", track, name, start_s, end_s, args or {}))

    def count(self, name: str, at_s: float, value: float) -> None:
        """Record that a counter has `value` from `at_s` on. A value that is not finite is not
        recorded.
        """
        if math.isfinite(value):
            self._record(_Event("C", "", name, at_s, at_s, {"value": value}))

    def mark(self, track: str, name: str, at_s: float) -> None:
        """Record an event without duration on a track, at `at_s`."""
        self._record(_Event("i", track, name, at_s, at_s, {}))

    def _record(self, event: _Event) -> None:
        self._events.append(event)
        self._recorded += 1

    @property
    def dropped(self) -> int:
        """The number of recorded events that are no longer kept, because more than `capacity`
        events were recorded.
        """
        return self._recorded - len(self._events)

    def write(self, path: Path) -> None:
        """Write the events as a trace file that ui.perfetto.dev and chrome://tracing open; `path`
        ends in `.json`.

        The file is replaced atomically. 100,000 events take about a second: call it in a thread
        while an event loop runs.

        Raises:
            OSError: the file cannot be written.
        """
        dropped = json.dumps({"dropped_events": self.dropped})
        events = ",\n".join(json.dumps(event) for event in self._trace(list(self._events.copy())))
        head = f'{{"displayTimeUnit": "ms",\n"otherData": {dropped},\n"traceEvents": ['
        write_whole(path, f"{head}\n{events}\n]}}\n")

    def _track_order(self, track: str) -> tuple[int, str, int]:
        """Return the key by which a trace sorts `track`: the position of its name in the
        constructor's `tracks` (names that are not there come last), its name without a number, and
        the number at its end.

        A number at the end of a name is compared as a number: `rollouts 2` comes before
        `rollouts 10`, and both have the position that `tracks` gives to `rollouts`.
        """
        name, number = re.fullmatch(r"(.*?)(?: (\d+))?", track, re.DOTALL).groups()  # type: ignore[union-attr] # any text matches
        return self._first_tracks.get(name, len(self._first_tracks)), name, int(number or 0)

    def _trace(self, events: Sequence[_Event]) -> Iterator[dict[str, Any]]:
        """Yield the events of a trace: names of the process and of a thread per track, then
        `events`. Times count from the first event.
        """
        zero_s = min((event.start_s for event in events), default=0.0)
        used = {event.track for event in events if event.kind != "C"}
        tracks = sorted(used, key=self._track_order)
        threads = {track: _FIRST_THREAD + number for number, track in enumerate(tracks)}
        titles = [("process", "controller", dict[str, int](), _PROCESS)]
        titles += [("thread", track, {"tid": tid}, tid) for track, tid in threads.items()]
        for kind, name, thread, order in titles:
            row = {"ph": "M", "ts": 0, "pid": _PROCESS, **thread}
            yield {**row, "name": f"{kind}_name", "args": {"name": name}}
            yield {**row, "name": f"{kind}_sort_index", "args": {"sort_index": order}}
        for event in events:
            # Integers: a viewer that rounds fractions could move a span past its parent's end.
            start_us = round((event.start_s - zero_s) * 1e6)
            end_us = round((event.end_s - zero_s) * 1e6)
            args = {
                # Numbers that JSON does not have, and other objects, are shown as text.
                name: value if isinstance(value, int | str) or _is_number(value) else str(value)
                for name, value in event.args.items()
            }
            row = {"ph": event.kind, "name": event.name, "ts": start_us, "pid": _PROCESS}
            if event.kind == "X":
                row |= {"tid": threads[event.track], "dur": end_us - start_us}
            elif event.kind == "i":
                row |= {"tid": threads[event.track], "s": "t"}
            yield {**row, "args": args}


def _is_number(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value)
