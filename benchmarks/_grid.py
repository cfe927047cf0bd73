"""Makes the grids that docs/assets/grid.js draws on the site below a link to their file.

A grid is a list of sections, each with a title and blocks: a text, a list, a picture or a table.
What stands between backticks is code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path("docs", "assets", "grids")

Block = Mapping[str, Any]
Section = Mapping[str, Any]


def section(title: str, *blocks: Block) -> Section:
    """Return one section of a grid, the JSON file that the docs site draws below a link to it. The
    section has a title and blocks (texts, lists, pictures, tables); a click on the title shows or
    hides the blocks.
    """
    return {"title": title, "blocks": blocks}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Block:
    """Return a table as a block of a grid, which the docs site displays: a dict of the column
    titles and the rows.
    """
    return {"head": head, "rows": [*rows]}


def text(sections: Iterable[Section]) -> str:
    """Return a grid, a list of sections for the docs site, as JSON text with one section on each
    line.
    """
    lines = ",\n".join(json.dumps(section, ensure_ascii=False) for section in sections)
    return f"[\n{lines}\n]\n"


def write(root: Path, name: str, sections: Iterable[Section]) -> None:
    """Write a grid, sections for the docs site, to `docs/assets/grids/NAME.json`."""
    path = root / FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(sections), encoding="utf-8")
