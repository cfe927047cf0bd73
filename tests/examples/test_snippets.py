"""Python blocks of the documentation import what they name of this package, torch or Megatron."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
#: Modules that a block may name.
MODULES = {"asyncio", "megatron_idempotent", "parallel_state", "torch", "TransformerConfig"}
#: Public names of some package, which blocks take for a reader's own.
OWN = {"layout", "step", "train"}


def public() -> set[str]:
    """The public names of all packages, as their stubs have them."""
    stubs = (ROOT / "megatron_idempotent").rglob("__init__.pyi")
    lines = (line.split() for stub in stubs for line in stub.read_text().splitlines())
    return {words[3] for words in lines if words[:1] == ["from"]}


def names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The names that a block reads, and those that it binds."""
    read, bound = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(each.asname or each.name).partition(".")[0] for each in node.names}
    return read, bound


def missing(page: Path) -> Iterator[str]:
    """Yield what blocks of a page name, and neither they nor those above them import."""
    known: set[str] = set()
    for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        read, bound = names(ast.parse(block))
        known |= bound
        yield from sorted((read & (public() | MODULES)) - known - OWN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_imports_what_it_names(page):
    assert [*missing(page)] == []


def test_a_block_without_an_import_is_seen(tmp_path):
    page = tmp_path / "page.md"
    block = "```python\nfrom x import Lora\nBucketPublisher(torch, Lora, mine)\n```\n"
    page.write_text(f"{block}text\n```python\nLora(SplitStep, TrainStep)\n```\n")
    assert [*missing(page)] == ["BucketPublisher", "torch", "TrainStep"]
