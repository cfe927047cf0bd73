"""Find the case files: every module of `megatron_idempotent.patches` declares one hazard.

As `PATCH`, `HELPER` or `LIMIT`, after what answers it.
"""

from __future__ import annotations

import os

from .outline import Outline, index_of, read_index

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from typing import Any

    from .record import Hazard, Patch

PACKAGE = "megatron_idempotent.patches"
INDEX = os.path.join(os.path.dirname(__file__), "index.txt")
_KINDS = ("PATCH", "HELPER", "LIMIT")

_outlines: dict[str, Outline] = {}
_loaded: dict[str, Patch] = {}
_hazards: dict[str, Hazard] = {}
_patches: dict[str, Patch] = {}


def outlines() -> dict[str, Outline]:
    """Return what `apply()` has to know of each patch, by id, in order of id.

    From the index; or from the case files where one was added or taken away since that was made.
    """
    if not _outlines:
        # Not open(): the package may be in a zip file.
        loader: Any = __spec__.loader
        ids, found = read_index(loader.get_data(INDEX).decode("utf-8"))
        files = _files(_folders())
        if files is not None and files != sorted(name.replace("-", "_") for name in ids):
            _, found = read_index(index_of(hazards().values()))
        _outlines.update(found)
    return _outlines


def load(patch_id: str) -> Patch:
    """One patch, from its case file.

    Raises:
        RuntimeError: the case file no longer says what the index says.
    """
    known = _patches.get(patch_id) or _loaded.get(patch_id)
    if known is not None:
        return known
    hazard = _declared(patch_id.replace("-", "_"))
    _, found = read_index(index_of([hazard]))
    if found.get(patch_id) != outlines()[patch_id]:
        raise RuntimeError(
            f"the index does not say what the case file of {patch_id} says: run "
            "`python -m megatron_idempotent.casebook` in the repository"
        )
    _loaded[patch_id] = patch = hazard  # type: ignore[assignment]  # as its line says
    return patch  # type: ignore[return-value]


def hazards() -> dict[str, Hazard]:
    """All known hazards by id, in order of id. Imports every case file.

    Raises:
        TypeError: a module there declares no hazard, or more than one.
        ValueError: a hazard whose id is not its file's name.
    """
    if not _hazards:
        folders = _folders()
        names = _files(folders)
        if names is None:
            import pkgutil

            names = [entry.name for entry in pkgutil.iter_modules(folders)]
        found = [_declared(name) for name in names if not name.startswith("_")]
        _hazards.update((hazard.id, hazard) for hazard in sorted(found, key=lambda h: h.id))
    return _hazards


def patches() -> dict[str, Patch]:
    """Returns the hazards that a patch repairs, by id, in order of id. Raises as `hazards()`."""
    if not _patches:
        from .record import Patch

        for name, hazard in hazards().items():
            if isinstance(hazard, Patch):
                _patches[name] = hazard
    return _patches


def _declared(name: str) -> Hazard:
    from .record import Hazard

    module = __import__(f"{PACKAGE}.{name}", fromlist=["PATCH"])
    declared = [value for kind in _KINDS if (value := getattr(module, kind, None)) is not None]
    if len(declared) != 1 or not isinstance(declared[0], Hazard):
        raise TypeError(f"{PACKAGE}.{name} declares {len(declared)} of {', '.join(_KINDS)}")
    hazard: Hazard = declared[0]
    if hazard.id.replace("-", "_") != name:
        raise ValueError(f"patch {hazard.id!r} is declared in {name}.py: names must agree")
    return hazard


def _folders() -> list[str]:
    return list(__import__(PACKAGE, fromlist=["__path__"]).__path__)


def _files(folders: list[str]) -> list[str] | None:
    """The names of the case files, in order; None where they are in no folder, but in a zip file.

    What pkgutil does, which imports inspect for it: more than all that `apply()` costs.
    """
    if not all(map(os.path.isdir, folders)):
        return None
    files = {name for folder in folders for name in os.listdir(folder)}
    names = (name[:-3] for name in files if name.endswith(".py"))
    return sorted(name for name in names if not name.startswith("_"))
