"""Lays out plain-text tables, for terminals and for pipes."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence


def terminal_width() -> int | None:
    """Return the columns of standard output's terminal; None if it is no terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int | None) -> list[str]:
    """Break a text into lines at spaces, so that names stay whole; one line if width is None."""
    text = " ".join(text.split())
    if width is None:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def render(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Lay rows out in columns as wide as their longest cell.

    Args:
        header: the first row; empty for none.
        rows: rows of as many cells as the header has.
        width: columns at which the last cell wraps. None asks the terminal; if standard output goes
            into a file or a pipe nothing wraps, and a row is a line.
    """
    width = width or terminal_width()
    cells = [tuple(row) for row in (header, *rows) if row]
    fixed = [max(map(len, column)) for column in list(zip(*cells, strict=True))[:-1]]
    indent = sum(fixed) + 2 * len(fixed)
    lines = []
    for row in cells:
        left = "".join(cell.ljust(size) + "  " for cell, size in zip(row, fixed, strict=False))
        first, *more = wrapped(row[-1], None if width is None else max(30, width - indent))
        lines += [(left + first).rstrip(), *(" " * indent + line for line in more)]
    return "\n".join(lines)
