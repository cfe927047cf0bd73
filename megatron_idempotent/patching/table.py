"""Formats plain-text tables, for terminals and for pipes."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

# A notebook breaks longer lines at its edge, within words; most notebooks are wider.
_NOTEBOOK = 80


def terminal_width() -> int | None:
    """Return the columns of standard output's terminal or notebook; None for a file or a pipe."""
    if type(sys.stdout).__module__.startswith("ipykernel"):
        return _NOTEBOOK
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int | None) -> list[str]:
    """Break a text into lines at spaces, so that names stay whole; one line if width is None.

    The name of a function that is longer than a line is broken after its module's.
    """
    words = text.split()
    if width is None:
        return [" ".join(words)]
    text = " ".join(word if len(word) <= width else word.replace(":", ": ") for word in words)
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False) or [""]


def render(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Format rows in columns as wide as their longest cell.

    Args:
        header: the first row; empty for none.
        rows: rows of as many cells as the header has.
        width: the line width at which the last cell wraps, or moves to lines of its own if one of
            its words would not fit. These are indented by 4, or by less if a name needs the room.
            None takes the terminal's; if standard output is a file or a pipe nothing wraps, and a
            row is a line.
    """
    width = width or terminal_width()
    cells = [tuple(row) for row in (header, *rows) if row]
    fixed = [max(map(len, column)) for column in list(zip(*cells, strict=True))[:-1]]
    indent = sum(fixed) + 2 * len(fixed)
    lines = []
    for row in cells:
        fixed_part = "".join(
            cell.ljust(size) + "  " for cell, size in zip(row, fixed, strict=False)
        )
        room, shift = None if width is None else max(30, width - indent), indent
        if width and room and max(map(len, row[-1].split()), default=0) > room:
            lines.append(fixed_part.rstrip())
            longest = max(map(len, row[-1].replace(":", ": ").split()))
            shift = max(0, min(4, width - longest))
            room, fixed_part = width - shift, " " * shift
        first, *more = wrapped(row[-1], room)
        lines += [(fixed_part + first).rstrip(), *(" " * shift + line for line in more)]
    return "\n".join(lines)
