"""Writes the grid of docs/certify.md: what each check demands, and what each word of a layout says.

`python -m benchmarks._checks` writes it from the checks and the words themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_idempotent.proof.certify import CHECKS, STATE_CHECKS
from megatron_idempotent.proof.certify.layouts import WORDS

from . import _grid

PATH = _grid.FOLDER / "certify.json"


def grid() -> Iterator[_grid.Section]:
    """Yield the three sections for the grid of docs/certify.md. Each is a table with a sentence for
    every check of a step, for every check of state, and for every word in layouts' names, such as
    "tp".
    """
    for title, checks in (("Checks of a step", CHECKS), ("Checks of state", STATE_CHECKS)):
        rows = [(f"`{check.name}`", check.summary) for check in checks.values()]
        yield _grid.section(title, _grid.table(("check", "demands that"), rows))
    words = [(f"`{word}`", said) for word, said in WORDS.items()]
    yield _grid.section("Words of a layout", _grid.table(("word", "says"), words))


if __name__ == "__main__":
    _grid.write(Path.cwd(), PATH.stem, grid())
