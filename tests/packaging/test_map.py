"""CONTRIBUTING's map and its tree show what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_idempotent"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
WINGS = ("proof", "rl")
ROOMS = {
    path.parent.name for inner in ("", *WINGS) for path in (PACKAGE / inner).glob("*/__init__.py")
}


def questions() -> dict[str, str]:
    """The table of the map: where to look for the answer to a question."""
    table = CONTRIBUTING.split("## The map")[1].split("| question | file |\n|---|---|\n")[1]
    rows = table.split("\n\n")[0].splitlines()
    return dict(tuple(map(str.strip, row.strip("|").split("|"))) for row in rows)  # type: ignore[misc]


def places(answer: str) -> Iterator[Path]:
    """The files that an answer names; one without a folder is beside the one before it."""
    folder = PACKAGE
    for name in re.findall(r"`([^`]+)`", answer):
        path = PACKAGE / name if "/" in name else folder / name
        folder = path.parent
        yield path


@pytest.mark.parametrize("question", questions())
def test_the_map_leads_to_files_that_are_there(question):
    named = list(places(questions()[question]))
    assert named
    assert [path for path in named if not path.exists()] == []


def test_a_file_that_is_named_without_its_folder_is_beside_the_one_before():
    assert list(places("`step/a.py`, `b.py` → `rl/hf/c.py` → `d.py`, `megatron/`")) == [
        PACKAGE / name
        for name in ("step/a.py", "step/b.py", "rl/hf/c.py", "rl/hf/d.py", "megatron")
    ]


def test_the_picture_of_the_wings_has_all_rooms_and_no_other():
    picture = CONTRIBUTING.split("The package has three wings:")[1].split("Imports point to")[0]
    assert {room for room in ROOMS if re.search(rf"\b{room}\b", picture)} == ROOMS


def test_the_tree_has_all_rooms():
    drawn = CONTRIBUTING.split("    megatron_idempotent/\n")[1].split("    patches/")[0]
    assert set(re.findall(r"^ +([a-z0-9]+)/", drawn, re.MULTILINE)) == ROOMS
