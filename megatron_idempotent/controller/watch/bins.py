"""Reduces a timeline to what can be drawn, if there is too much of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .lanes import Laid

if TYPE_CHECKING:
    from .timeline import Span

Floats = NDArray[np.float64]

_ID_AT_THE_END = re.compile(r"[\s#:/._-]*\d+$")


def kind(name: str) -> str:
    """A span's name without the number at its end: `group 17` is a `group`."""
    return _ID_AT_THE_END.sub("", name) or name


def innermost(lane: Sequence[Laid[Span]]) -> dict[str, tuple[Floats, Floats]]:
    """Returns by kind the starts and ends, in seconds, of times as the innermost span.

    `lane` is one of `lay_out`: spans nest or are apart, outer ones first.
    """
    pieces: dict[str, list[tuple[int, int]]] = {}
    open_spans: list[tuple[str, int]] = []  # kind, end_us
    reached_us = 0

    def close_until(at_us: int) -> None:
        nonlocal reached_us
        while open_spans:
            name, end_us = open_spans[-1]
            until_us = min(end_us, at_us)
            if until_us > reached_us:
                pieces.setdefault(name, []).append((reached_us, until_us))
                reached_us = until_us
            if end_us > at_us:
                return
            open_spans.pop()

    for laid in lane:
        close_until(laid.start_us)
        reached_us = laid.start_us
        open_spans.append((kind(laid.what.name), laid.end_us))
    close_until(max((laid.end_us for laid in lane), default=0))
    found = {}
    for name, bounds in pieces.items():
        seconds = np.array(bounds, dtype=np.float64) / 1e6
        found[name] = (seconds[:, 0], seconds[:, 1])
    return found


def covered(starts: Floats, ends: Floats, edges: Floats) -> Floats:
    """Share of each bin that is inside pieces, which are sorted and apart: seconds / seconds."""
    at = np.stack([starts, ends], axis=1).ravel()
    length = ends - starts
    behind = np.cumsum(length)
    sums = np.stack([behind - length, behind], axis=1).ravel()
    return np.diff(np.interp(edges, at, sums, left=0.0)) / np.diff(edges)


def at_once(lanes: Sequence[Sequence[Laid[Span]]]) -> tuple[Floats, Floats]:
    """Times in seconds, and how many spans are open from each on."""
    starts = np.array([laid.start_us for lane in lanes for laid in lane], dtype=np.float64)
    ends = np.array([laid.end_us for lane in lanes for laid in lane], dtype=np.float64)
    at = np.concatenate([starts, ends])
    change = np.concatenate([np.ones_like(starts), -np.ones_like(ends)])
    order = np.argsort(at, kind="stable")
    times, first = np.unique(at[order], return_index=True)
    return times / 1e6, np.cumsum(np.add.reduceat(change[order], first)) if len(at) else at


def envelope(times: Floats, values: Floats, edges: Floats) -> tuple[Floats, Floats, Floats]:
    """Lowest, mean over time and highest value per bin of a curve that holds until it changes.

    Before its first point a curve has the value of that point.
    """
    here = np.maximum(np.searchsorted(times, edges, side="right") - 1, 0)
    start, end = here[:-1], here[1:]
    low = np.minimum(np.minimum.reduceat(values, start), values[end])
    high = np.maximum(np.maximum.reduceat(values, start), values[end])
    # The integral is linear between two changes, so that it can be looked up at the edges.
    at = np.concatenate([[min(edges[0], times[0])], times, [max(edges[-1], times[-1])]])
    held = np.concatenate([values[:1], values])
    integral = np.concatenate([[0.0], np.cumsum(np.diff(at) * held)])
    mean = np.diff(np.interp(edges, at, integral)) / np.diff(edges)
    return low, mean, high
