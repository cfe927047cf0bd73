"""Draws a timeline as a picture: a row per track, and curves of counts below them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .names import EXPOSED_GENERATION
from .timeline import Laid, lay_out

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .timeline import Span, Timeline


TIMELINE_CHART = "timeline.png"

_BINS = 600
# More spans on one lane are each drawn where they are longer than a bin: others could not be told
# apart.
_ALWAYS_DRAWN = 100
_MOST_LANES = 16
_MOST_LABELS = 20
_VERSION = re.compile(r"v(?:ersion )?(\d+)$")

# What the controller counts itself needs no curve made from its spans.
_COUNTED = {"rollouts": "generating groups"}

_COLOURS = {
    EXPOSED_GENERATION: "lightgray",
    "prepare_logprobs": "tab:olive",
    "advantage_pump": "tab:cyan",
    "policy_training": "tab:green",
    "clear_samples": "tab:pink",
    "sync_weights": "tab:red",
    "evaluation": "tab:purple",
    "checkpoint": "tab:brown",
}
_OTHER_COLOURS = ("tab:blue", "tab:orange", "gold", "navy", "teal")


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Draw a PNG of a timeline, of a run of any length. Needs matplotlib.

    200,000 events take a second or two: call it from a thread while an event loop runs. The file is
    written under another name and renamed, so that `path` is never half a picture.
    Errors: `OSError`; `ModuleNotFoundError` without matplotlib.
    """
    figure = timeline_figure(timeline)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        figure.savefig(partial, dpi=120, format="png")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def timeline_figure(timeline: Timeline) -> Figure:
    """Return the picture: rows, curves below them, and versions as vertical lines.

    Each track has a row, coloured by phase. If its spans are too many to tell apart, each bin is
    divided among the phases by the time that they took. A track with several spans at once has
    lanes and a curve of their number, or the curve alone if there are more than 16 lanes. The other
    curves are the timeline's counts, with their range if a bin has several values.
    """
    # The object interface: pyplot would look for a display and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    seen = _Seen(timeline)
    heights = [sum(_height(lanes) for _, lanes in seen.rows) or 0.5, *[1.3] * len(seen.curves)]
    figure = Figure(figsize=(12, min(1.6 + 0.6 * sum(heights), 40)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = {"height_ratios": heights}
    panels = list(
        figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw=grid).flat
    )
    _draw_rows(panels[0], seen)
    for panel, (name, (times, values)) in zip(panels[1:], seen.curves.items(), strict=True):
        _draw_curve(panel, name, times, values, seen)
    _draw_versions(panels, seen)
    panels[-1].set(xlabel=f"{seen.unit} since the first event", xlim=(0, seen.edges[-1]))
    dropped = f"; {timeline.dropped} older events were dropped" if timeline.dropped else ""
    figure.align_ylabels(panels[1:])
    panels[0].set_title(f"{seen.length:.3g} {seen.unit}{dropped}", loc="left", fontsize=9, pad=18)
    return figure


class _Seen:
    """Holds a timeline's rows, marks and curves, in s, min or h since its first event."""

    def __init__(self, timeline: Timeline) -> None:
        import numpy as np

        spans, marks = timeline.spans, timeline.marks
        counts = [each for each in timeline.counts if math.isfinite(each.value)]
        moments = [each.start_s for each in spans] + [each.end_s for each in spans]
        moments += [each.at_s for each in marks] + [each.at_s for each in counts]
        self.zero_s = min(moments, default=0.0)
        length_s = max(moments, default=0.0) - self.zero_s
        self.unit, self.per_unit = next(
            (unit, seconds)
            for unit, seconds in (("h", 3600.0), ("min", 60.0), ("s", 1.0))
            if length_s >= 3 * seconds or unit == "s"
        )
        self.length = length_s / self.per_unit
        self.edges = np.linspace(0.0, self.length or 1.0, _BINS + 1)
        of_track: dict[str, list[Laid[Span]]] = {track: [] for track in timeline.tracks()}
        for span in spans:
            start_us = round((span.start_s - self.zero_s) * 1e6)
            end_us = round((span.end_s - self.zero_s) * 1e6)
            of_track[span.track].append(Laid(what=span, start_us=start_us, end_us=end_us))
        tracks = [(track, lay_out(laid)) for track, laid in of_track.items()]
        self.rows = [(track, lanes) for track, lanes in tracks if len(lanes) <= _MOST_LANES]
        self.marks = [(m.track, m.name, (m.at_s - self.zero_s) / self.per_unit) for m in marks]
        self.curves: dict[str, tuple[Any, Any]] = {}
        names = sorted({each.name for each in counts})
        for track, lanes in tracks:
            if len(lanes) > 1 and _COUNTED.get(track) not in names:
                times, values = at_once(lanes)
                self.curves[f"{track} in flight"] = (times / self.per_unit, values)
        for name in names:
            points = sorted((e.at_s - self.zero_s, e.value) for e in counts if e.name == name)
            times, values = np.array(points, dtype=np.float64).T
            self.curves[name] = (times / self.per_unit, values)


def _height(lanes: Sequence[Sequence[Laid[Span]]]) -> float:
    return 1.0 if len(lanes) == 1 else max(1.5, 0.3 * len(lanes))


def _draw_rows(axes: Any, seen: _Seen) -> None:
    colours = _Colours()
    top = 0.0
    ticks = []
    for track, lanes in seen.rows:
        height = _height(lanes)
        share = (height - 0.2) / len(lanes)
        for number, lane in enumerate(lanes):
            gap = 0.15 * share if len(lanes) > 1 else 0.0
            _draw_lane(axes, lane, top + 0.1 + number * share, share - gap, seen, colours)
        other = [at for of, name, at in seen.marks if of == track and not _VERSION.match(name)]
        axes.plot(other, [top + height / 2] * len(other), "x", color="black", markersize=4)
        ticks.append((top + height / 2, track))
        top += height
    axes.set_yticks([at for at, _ in ticks], [track for _, track in ticks])
    axes.set_ylim(top or 1.0, 0.0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _draw_lane(
    axes: Any, lane: Sequence[Laid[Span]], top: float, height: float, seen: _Seen, colours: _Colours
) -> None:
    import numpy as np

    pieces = innermost(lane)
    bin_s = seen.edges[1] * seen.per_unit
    count = sum(len(starts) for starts, _ in pieces.values())
    total_s = sum(float((ends - starts).sum()) for starts, ends in pieces.values())
    if count <= _ALWAYS_DRAWN or total_s >= count * bin_s:
        for name, (starts, ends) in pieces.items():
            # No narrower than a pixel or so: a checkpoint of a second in ten hours is to be seen.
            widths = np.maximum(ends - starts, bin_s / 2)
            bars = np.stack([starts, widths], axis=1) / seen.per_unit
            axes.broken_barh(bars, (top, height), linewidth=0, **colours.of(name))
        return
    below = np.full(_BINS, top + height)
    for name, (starts, ends) in pieces.items():
        share = covered(starts / seen.per_unit, ends / seen.per_unit, seen.edges)
        above = below - share * height
        axes.stairs(above, seen.edges, baseline=below, fill=True, **colours.of(name))
        below = above


class _Colours:
    """Gives each kind of span one colour in all rows, and one entry in the legend."""

    def __init__(self) -> None:
        self._of = dict(_COLOURS)
        self._left = list(_OTHER_COLOURS)
        self._told: set[str] = set()

    def of(self, name: str) -> dict[str, Any]:
        if name not in self._of and self._left:
            self._of[name] = self._left.pop(0)
        label = name if name in self._of else "other"
        new = label not in self._told
        self._told.add(label)
        return {"color": self._of.get(name, "dimgray"), "label": label if new else None}


def _draw_curve(axes: Any, name: str, times: Any, values: Any, seen: _Seen) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel(name, rotation=0, ha="right", va="center")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(times) <= _BINS:
        axes.step([*times, seen.length], [*values, values[-1]], where="post", linewidth=1)
    else:
        low, mean, high = envelope(times, values, seen.edges)
        axes.stairs(high, seen.edges, baseline=low, fill=True, color="tab:blue", alpha=0.3)
        axes.stairs(mean, seen.edges, baseline=None, color="tab:blue", linewidth=1)
    if values.min() >= 0:
        axes.set_ylim(bottom=0)
    if (values == values.round()).all():
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))


def _draw_versions(panels: Sequence[Any], seen: _Seen) -> None:
    found = [(_VERSION.match(name), at) for _, name, at in seen.marks]
    last = -math.inf
    for version, at in ((int(match[1]), at) for match, at in found if match):
        if at - last < seen.length / (_MOST_LABELS - 1):
            continue  # its label would cover the one before
        last = at
        for panel in panels:
            panel.axvline(at, color="black", linewidth=0.6, linestyle=":", alpha=0.6)
        panels[0].annotate(
            f"v{version}",
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )


Floats = NDArray[np.float64]

_ID_AT_THE_END = re.compile(r"[\s#:/._-]*\d+$")


def kind(name: str) -> str:
    """Return a span's name without the number at its end: `group 17` is a `group`."""
    return _ID_AT_THE_END.sub("", name) or name


def innermost(lane: Sequence[Laid[Span]]) -> dict[str, tuple[Floats, Floats]]:
    """Return, for each kind of span, the times in which such a span is the innermost open one.

    Each kind has the starts and the ends of these times, [pieces] each, in seconds.
    `lane` is a lane of `lay_out`: its spans nest or are apart, outer ones first.
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
    """Return the share of each bin that lies inside pieces, [bins].

    `starts` and `ends` are those of the pieces, [pieces], which are sorted and do not overlap;
    `edges` are those of the bins, [bins + 1]; all are in one unit.
    """
    at = np.stack([starts, ends], axis=1).ravel()
    length = ends - starts
    until_end = np.cumsum(length)
    sums = np.stack([until_end - length, until_end], axis=1).ravel()
    return np.diff(np.interp(edges, at, sums, left=0.0)) / np.diff(edges)


def at_once(lanes: Sequence[Sequence[Laid[Span]]]) -> tuple[Floats, Floats]:
    """Return the times in seconds at which spans start or end, and how many are open from each on.

    Both are [times].
    """
    starts = np.array([laid.start_us for lane in lanes for laid in lane], dtype=np.float64)
    ends = np.array([laid.end_us for lane in lanes for laid in lane], dtype=np.float64)
    at = np.concatenate([starts, ends])
    change = np.concatenate([np.ones_like(starts), -np.ones_like(ends)])
    order = np.argsort(at, kind="stable")
    times, first = np.unique(at[order], return_index=True)
    return times / 1e6, np.cumsum(np.add.reduceat(change[order], first)) if len(at) else at


def envelope(times: Floats, values: Floats, edges: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the lowest value, the mean over time and the highest value in each bin, [bins] each.

    The curve has `values` at `times`, [points] each, and keeps a value until the next point. Before
    its first point it has the value of that point. `edges` are those of the bins, [bins + 1].
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
