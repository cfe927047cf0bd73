"""Plain-text tables for terminals; the last column wraps."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns as wide as their longest cell; the last one wraps at the terminal's width."""
    width = width or max(80, shutil.get_terminal_size((120, 24)).columns)
    cells = [tuple(header), *map(tuple, rows)]
    fixed = [max(len(row[column]) for row in cells) for column in range(len(header) - 1)]
    indent = sum(fixed) + 2 * len(fixed)
    room = max(30, width - indent)
    lines = []
    for row in cells:
        left = "".join(cell.ljust(size) + "  " for cell, size in zip(row, fixed, strict=False))
        first, *more = textwrap.wrap(row[-1], room) or [""]
        lines += [(left + first).rstrip(), *(" " * indent + line for line in more)]
    return "\n".join(lines)
