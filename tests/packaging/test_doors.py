"""Rooms are entered by their doors: what a room's `__all__` names, or a module that is listed here.

A module that is not listed is its room's own, to be renamed, split and merged at will.
`lint-imports` holds which room may see which.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_idempotent"
#: The doors of each room beside its `__all__`.
DOORS = {
    "certify": "",
    "cli": "main",
    "controller": "protocol samplers settings status_file data_plane",
    "cpu": "attention bench calls errors gpu program tiny",
    "engines": "protocol ray sglang transformers vllm",
    "fp8": "blockwise export packing",
    "hf": "buckets",
    "logprobs": "sources targets",
    "megatron": "ddp fsdp gather layer_specs moe optimizers process_groups replica_check schedules"
    " training",
    "metrics": "chart console loggers names timeline",
    # What the command line shows of patches, it reads where they are decided on.
    "patching": "api base catalog contract decide install needs per_process record"
    " report settings source statements surroundings table trees versions weak_keys",
    "ranks": "agreement",
    "simulator": "",
    "step": "",
    "sync": "recovery",
    "trainer": "",
    "weights": "records safetensors_io staging transports transports.base",
    "window": "abort accumulation guard guard_layers missed_collectives open_contexts params",
    "workers": "protocol ray ray_cluster",
}


class Import(NamedTuple):
    """A name that a file takes from another room; `module` is empty for the room itself."""

    where: str
    room: str
    module: str
    name: str


def room_of(path: Path) -> str:
    """The folder right below the package; empty for the package's own files and case files."""
    parts = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).parts
    return parts[0] if len(parts) > 1 and path.is_relative_to(PACKAGE) else ""


def imports(path: Path) -> Iterator[Import]:
    """Yields what a file imports from rooms that it is not in."""
    folder = ["megatron_idempotent"]
    folder += path.relative_to(PACKAGE).parts[:-1] if path.is_relative_to(PACKAGE) else ["patches"]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = folder[: len(folder) + 1 - node.level] if node.level else []
        module = [*base, *(node.module or "").split(".")] if node.module else base
        if module[:1] != ["megatron_idempotent"]:
            continue
        for alias in node.names:
            full = [*module[1:], alias.name]
            if full[0] not in DOORS or full[0] == room_of(path) or len(full) == 1:
                continue
            whole = is_module(PACKAGE / full[0] / alias.name)
            inner = module[2:] or ([alias.name] if whole else [])
            yield Import(str(path.relative_to(ROOT)), full[0], ".".join(inner), alias.name)


def is_module(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").exists()


def offered(room: str) -> set[str]:
    """The names in a room's `__all__`."""
    for node in ast.walk(ast.parse((PACKAGE / room / "__init__.py").read_text("utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {str(name) for name in ast.literal_eval(node.value)}
    return set()


def everything() -> list[Import]:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "patches").glob("*.py")]
    files.remove(PACKAGE / "__init__.py")  # what it takes is public by that
    return [found for path in sorted(files) for found in imports(path)]


def past(found: Import) -> bool:
    """Returns whether an import goes around the doors."""
    if found.name.startswith("_"):
        return True
    if not found.module:
        return found.name not in offered(found.room)
    return found.module not in DOORS[found.room].split()


def test_rooms_are_entered_by_their_doors():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {*DOORS}
    assert [found for found in everything() if past(found)] == []


def test_every_door_is_used():
    used = {(found.room, found.module) for found in everything()}
    listed = {(room, door) for room, doors in DOORS.items() for door in doors.split()}
    assert listed - used == set()


def test_the_rule_sees_what_it_is_to_see(tmp_path, monkeypatch):
    package = tmp_path / "megatron_idempotent"
    for room in ("hf", "step"):
        (package / room).mkdir(parents=True)
    (package / "hf" / "__init__.py").write_text("__all__ = ['load_hf']\n")
    (package / "hf" / "names.py").write_text("")
    file = package / "step" / "one.py"
    file.write_text(
        "from megatron_idempotent.hf import load_hf, names, other\nfrom . import two\n"
        "from ..hf.buckets import BucketStream, _Feed\nfrom .three import x\nimport torch\n"
    )
    this = sys.modules[__name__]
    monkeypatch.setattr(this, "ROOT", tmp_path)
    monkeypatch.setattr(this, "PACKAGE", package)
    assert [(found.module, found.name, past(found)) for found in imports(file)] == [
        ("", "load_hf", False),
        ("names", "names", True),
        ("", "other", True),
        ("buckets", "BucketStream", False),
        ("buckets", "_Feed", True),
    ]
