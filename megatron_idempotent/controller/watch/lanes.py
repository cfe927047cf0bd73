"""Spans of one track put beside each other where they overlap."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Laid(Generic[T]):
    """A span in whole microseconds. Example: `Laid(what=span, start_us=0, end_us=5)`."""

    what: T
    start_us: int
    end_us: int


def lay_out(spans: Sequence[Laid[T]]) -> list[list[Laid[T]]]:
    """Lanes, each by start time with outer spans before those inside them; at least one lane.

    One lane where all spans nest or are apart, as the phases of a pump do. Otherwise as few lanes
    as there are spans at once, none of which overlap on a lane: a span takes the lowest free one.
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
