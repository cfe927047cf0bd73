"""The package as tests of pages read it: its files are parsed once."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_idempotent"


@functools.cache
def trees() -> dict[Path, ast.Module]:
    """Return what each file of the package parses to."""
    return {path: ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
