"""Case files can be deleted: nothing is built on one, and they are built on little.

`lint-imports` holds the other layers; it does not see `patches/`, which has another name on disk.
`tests/patching/test_deleted.py` deletes each in turn.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
LIBRARY, PATCHES = ROOT / "megatron_idempotent", ROOT / "patches"
NAME = "megatron_idempotent.patches"
CASES = sorted(path for path in PATCHES.rglob("*.py") if not path.name.startswith("_"))
#: Rooms that a case file is built on; its reproduction may use any.
BELOW = ("megatron_idempotent.patching", "megatron_idempotent.megatron")


def imported(path: Path, *, at_import: bool = False) -> Iterator[str]:
    """The modules that a file imports, by their absolute names; with names from packages."""
    tree = ast.parse(path.read_text("utf-8"))
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = [*NAME.split("."), *parts[1:-1]] if parts[0] == "patches" else list(parts[:-1])
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if not (at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_case(module: str) -> bool:
    """Return whether it is in a case file, and not in what reproductions share."""
    inside = module.removeprefix(f"{NAME}.").removeprefix("frameworks.")
    return module.startswith(f"{NAME}.") and not inside.startswith("_")


def test_the_library_imports_no_case_file():
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in LIBRARY.rglob("*.py")
        for module in imported(path)
        if module.startswith(NAME)
    }
    assert not found


def test_no_case_file_and_nothing_that_they_share_stands_on_a_case_file():
    both = {path.stem: [*filter(is_case, imported(path))] for path in PATCHES.rglob("*.py")}
    assert len(both) > 100
    assert not {name: cases for name, cases in both.items() if cases}


def test_a_case_file_is_built_on_patching_and_megatrons_accessors():
    allowed = *BELOW, f"{NAME}._", f"{NAME}.frameworks._"
    others = {
        (path.stem, module)
        for path in CASES
        for module in imported(path, at_import=True)
        if "megatron_idempotent" in module and not module.startswith(allowed)
    }
    assert not others


def test_the_rule_sees_what_it_is_to_see(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    case = tmp_path / "patches" / "one.py"
    case.parent.mkdir()
    case.write_text(
        "from . import _shared, two\nfrom .three import x\nimport torch\n"
        f"def f():\n    from {NAME}.four import y\n"
    )
    assert [each for each in imported(case) if is_case(each)] == [
        f"{NAME}.two",
        f"{NAME}.three.x",
        f"{NAME}.four.y",
    ]
    assert f"{NAME}.four.y" not in imported(case, at_import=True)
