"""Find the case files: every module of `megatron_idempotent.patches` declares one hazard.

As `PATCH`, `HELPER` or `LIMIT`, after what answers it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from functools import cache

from .record import Hazard, Patch

PACKAGE = "megatron_idempotent.patches"
_KINDS = ("PATCH", "HELPER", "LIMIT")


@cache
def hazards() -> dict[str, Hazard]:
    """All known hazards by id, in order of id.

    Raises:
        TypeError: a module there declares no hazard, or more than one.
        ValueError: a hazard whose id is not its file's name.
    """
    package = importlib.import_module(PACKAGE)
    found: dict[str, Hazard] = {}
    for name in _modules(package.__path__):
        if name.startswith("_"):
            continue
        module = importlib.import_module(f"{PACKAGE}.{name}")
        declared = [value for kind in _KINDS if (value := getattr(module, kind, None)) is not None]
        if len(declared) != 1 or not isinstance(declared[0], Hazard):
            raise TypeError(f"{PACKAGE}.{name} declares {len(declared)} of {', '.join(_KINDS)}")
        (hazard,) = declared
        if hazard.id.replace("-", "_") != name:
            raise ValueError(f"patch {hazard.id!r} is declared in {name}.py: names must agree")
        found[hazard.id] = hazard
    return dict(sorted(found.items()))


@cache
def patches() -> dict[str, Patch]:
    """Those of the hazards that a patch repairs, by id, in order of id. Raises as `hazards()`."""
    return {name: hazard for name, hazard in hazards().items() if isinstance(hazard, Patch)}


def _modules(path: Iterable[str]) -> list[str]:
    folders = list(path)
    if all(map(os.path.isdir, folders)):
        # What pkgutil does, which imports inspect for it: half of what apply() costs.
        names = (name for folder in folders for name in os.listdir(folder))
        return sorted({name[:-3] for name in names if name.endswith(".py")})
    import pkgutil  # in a zip file, say

    return [entry.name for entry in pkgutil.iter_modules(folders)]
