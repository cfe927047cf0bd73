"""Find the case files: every module of `megatron_idempotent.patches` declares one `PATCH`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from .record import Patch

PACKAGE = "megatron_idempotent.patches"


@cache
def patches() -> dict[str, Patch]:
    """All known patches by id, in order of id.

    Raises:
        TypeError: a module there declares no `PATCH`.
        ValueError: a patch whose id is not its file's name.
    """
    package = importlib.import_module(PACKAGE)
    found: dict[str, Patch] = {}
    for entry in pkgutil.iter_modules(package.__path__):
        if entry.name.startswith("_"):
            continue
        patch = getattr(importlib.import_module(f"{PACKAGE}.{entry.name}"), "PATCH", None)
        if not isinstance(patch, Patch):
            raise TypeError(f"{PACKAGE}.{entry.name} declares no PATCH")
        if patch.id.replace("-", "_") != entry.name:
            raise ValueError(f"patch {patch.id!r} is declared in {entry.name}.py: names must agree")
        found[patch.id] = patch
    return dict(sorted(found.items()))
