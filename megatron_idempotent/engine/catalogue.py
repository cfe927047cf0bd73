"""Find the case files: every module of `megatron_idempotent.patches` declares one `PATCH`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
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
    for name in _modules(package.__path__):
        if name.startswith("_"):
            continue
        patch = getattr(importlib.import_module(f"{PACKAGE}.{name}"), "PATCH", None)
        if not isinstance(patch, Patch):
            raise TypeError(f"{PACKAGE}.{name} declares no PATCH")
        if patch.id.replace("-", "_") != name:
            raise ValueError(f"patch {patch.id!r} is declared in {name}.py: names must agree")
        found[patch.id] = patch
    return dict(sorted(found.items()))


def _modules(path: Iterable[str]) -> list[str]:
    folders = list(path)
    if all(map(os.path.isdir, folders)):
        # What pkgutil does, which imports inspect for it: half of what apply() costs.
        names = (name for folder in folders for name in os.listdir(folder))
        return sorted({name[:-3] for name in names if name.endswith(".py")})
    import pkgutil  # in a zip file, say

    return [entry.name for entry in pkgutil.iter_modules(folders)]
