"""Draws pictures as SVG, in colours that are legible on light and dark pages.

Importing the module does not import torch.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Sequence

#: The colours of text and axes, of this library's bars, of other bars, and of limits.
INK, OURS, THEIRS, BOUND = "#75818a", "#009688", "#8a96a0", "#d9534f"
_WIDTH, _ROW, _LEFT, _RIGHT = 720, 19, 270, 570


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A ratio that is drawn as a bar, with the bar's labels and a limit for the ratio.

    Example:
        Bar(group="bfloat16", side="ours", value=0.5, ours=True, limit=("at most", 1.0))
    """

    group: str
    """The heading above the bars of a group."""
    side: str
    value: float
    ours: bool = True
    limit: tuple[str, float] | None = None


def picture(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """Return the text of an SVG file with this size and title; `parts` are the SVG elements in it,
    as text.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="{INK}">\n<title>{html.escape(title)}</title>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def words(x: float, y: float, text: str, more: str = "") -> str:
    """Return an SVG element that shows one line of text, whose baseline is at y; `more` are further
    attributes.
    """
    return f'<text x="{x:.6g}" y="{y:.6g}"{more}>{html.escape(text)}</text>'


def path(points: str, colour: str = INK, more: str = "") -> str:
    """Return an SVG element that draws lines without filling them; `points` is an SVG path, such as
    "M0 0H9".
    """
    return f'<path d="{points}" fill="none" stroke="{colour}"{more}/>'


def number(value: float) -> str:
    """Format a ratio with three decimals if it is between 0.9 and 1.1, else with three significant
    digits.
    """
    return format(value, ".3f" if 0.9 < value < 1.1 else ".3g")


def bars(title: str, one: str, rows: Sequence[Bar]) -> str:
    """Return an SVG picture with a bar for each ratio, a mark at its limit, and a vertical line at
    1.0.

    `one` is the label of that line: the program to which the others are compared.
    """
    most = max(1.0, *(max(row.value, row.limit[1] if row.limit else 0) for row in rows))
    scale = (_RIGHT - _LEFT) / most
    anchor = ' text-anchor="middle"' if most > 2 else ' text-anchor="end"'  # else it is cut off
    parts, y = [words(_LEFT + scale, 16, f"1.0 = {one}", anchor)], 22
    for group, members in itertools.groupby(rows, lambda row: row.group):
        if group:
            y += _ROW + 4
            parts.append(words(8, y, group, ' font-weight="600"'))
            y += 6
        for row in members:
            y += _ROW
            end = _LEFT + max(row.value * scale, 1)
            told, reach = number(row.value), end
            parts += [
                words(_LEFT - 8, y, row.side, ' text-anchor="end"'),
                f'<rect x="{_LEFT}" y="{y - 11}" width="{end - _LEFT:.1f}" height="13" '
                f'fill="{OURS if row.ours else THEIRS}"/>',
            ]
            if row.limit:
                told += f" ({row.limit[0]} {row.limit[1]:g})"
                at = _LEFT + row.limit[1] * scale
                parts.append(path(f"M{at:.1f} {y - 14}V{y + 5}", BOUND, ' stroke-width="2"'))
                reach = max(end, at)
            if scale - 8 * len(told) < reach - _LEFT < scale:
                reach = _LEFT + scale  # not across the line
            parts.append(words(reach + 6, y, told))
    parts.append(path(f"M{_LEFT + scale:.1f} 22V{y + 8}", INK, ' stroke-dasharray="4 3"'))
    return picture(_WIDTH, y + 14, title, parts)
