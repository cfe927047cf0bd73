"""CONTRIBUTING's map and its tree show what is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has none")
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_idempotent"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
ROOMS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


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
    assert list(places("`step/a.py`, `b.py` → `hf/c.py` → `d.py`, `megatron/`")) == [
        PACKAGE / name for name in ("step/a.py", "step/b.py", "hf/c.py", "hf/d.py", "megatron")
    ]


def test_the_map_has_the_layers_that_import_linter_holds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (
        each for each in project["tool"]["importlinter"]["contracts"] if each["type"] == "layers"
    )
    held = [
        {name.strip().removeprefix("megatron_idempotent.") for name in layer.split("|")}
        for layer in reversed(contract["layers"])
    ]
    (drawn,) = re.findall(r"^    patching ←(?:.|\n)*?\n\n", CONTRIBUTING, re.MULTILINE)
    assert [set(layer.split(" | ")) for layer in " ".join(drawn.split()).split(" ← ")] == held
    # The runtime of the tests is no layer: a contract of its own keeps the library from it.
    assert set().union(*held) | {"cpu"} == ROOMS


def test_the_tree_has_all_rooms():
    drawn = CONTRIBUTING.split("    megatron_idempotent/\n")[1].split("    patches/")[0]
    assert {line.split("/")[0].strip() for line in drawn.splitlines()} == ROOMS
