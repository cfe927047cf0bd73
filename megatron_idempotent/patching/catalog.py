"""Finds the case files: every module of `megatron_idempotent.patches` declares one hazard.

The declaration is `PATCH`, `HELPER` or `LIMIT`. Case files about a framework's own code are in
`patches/frameworks/`. `apply()` reads only the index; a case file is imported when a module that it
patches is.
"""

from __future__ import annotations

import os

from .base import (
    DEBUG,
    FRAMEWORKS,
    INDEX,
    MEGATRON,
    NO_FACT,
    NO_PATCH,
    OFF,
    ON,
    PACKAGE,
    IndexEntry,
    folders,
    generated,
    read_index,
    untried,
)

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Iterable

    from .record import Hazard, Patch


def index_of(hazards: Iterable[Hazard], first_untried: str | None = None) -> list[str]:
    """Return the lines of the index file `index.txt`: one about releases, and one for each hazard.

    The first line names the first release that is not tested yet, by default that of the present
    index. Then comes a line per hazard: for one without a patch its id and a dash.
    """
    lines = [f"untried {first_untried or untried()}"]
    for hazard in hazards:
        targets = getattr(hazard, "targets", None)
        fields = [hazard.id, NO_PATCH]
        if targets is not None:
            switch = DEBUG if hazard.debug else ON if hazard.default else OFF  # type: ignore[attr-defined]
            provides = ",".join(hazard.provides) or NO_FACT  # type: ignore[attr-defined]
            fields[1:] = [switch, hazard.distribution, hazard.since, hazard.before, provides]
            fields += [target.address for target in targets]
        lines.append(" ".join(fields))
    return lines


_KINDS = ("PATCH", "HELPER", "LIMIT")

_entries: dict[str, IndexEntry] = {}
_lost: dict[str, IndexEntry] = {}
_loaded: dict[str, Patch] = {}
_hazards: dict[str, Hazard] = {}
_patches: dict[str, Patch] = {}


def index_entries() -> dict[str, IndexEntry]:
    """Return the `IndexEntry` of each known patch, by patch id, in order of id.

    They come from the index. If a case file was added or deleted since the index was written, all
    case files are imported instead.
    """
    if not _entries:
        ids, by_id = read_index(generated(INDEX))
        files = _files()
        if files is not None and sorted(files) != sorted(name.replace("-", "_") for name in ids):
            indexed = by_id
            _, by_id = read_index(index_of(hazards().values()))
            _lost.update((name, entry) for name, entry in indexed.items() if name not in by_id)
        _entries.update(by_id)
    return _entries


def lost() -> dict[str, IndexEntry]:
    """Return id → entry of each patch that the index lists, but whose case file is missing."""
    index_entries()
    return _lost


def case_file_of(patch_id: str) -> str:
    """Return the path of a hazard's case file in the repository, whether it exists or not."""
    entry = index_entries().get(patch_id) or _lost.get(patch_id)
    of_framework = entry is not None and entry.distribution != MEGATRON
    folder = f"patches/{FRAMEWORKS}" if of_framework else "patches"
    return f"{folder}/{patch_id.replace('-', '_')}.py"


def without_case_file(patch_id: str) -> str:
    """Return a message: this patch's case file is missing, so the package must be reinstalled."""
    return f"{case_file_of(patch_id)} is missing, and the index lists it: install the package again"


def load(patch_id: str) -> Patch:
    """Import the case file of `patch_id`, and return the `Patch` that it declares.

    Raises:
        RuntimeError: the case file and the index disagree.
    """
    patch_known = _patches.get(patch_id) or _loaded.get(patch_id)
    if patch_known is not None:
        return patch_known
    entry = index_entries()[patch_id]
    package = PACKAGE if entry.distribution == MEGATRON else f"{PACKAGE}.{FRAMEWORKS}"
    hazard = _declared(patch_id.replace("-", "_"), package)
    _, declared = read_index(index_of([hazard]))
    if declared.get(patch_id) != entry:
        raise RuntimeError(
            f"the index does not say what the case file of {patch_id} says: run "
            "`python tools/casebook.py` in the repository"
        )
    _loaded[patch_id] = patch = hazard  # type: ignore[assignment]  # as its line says
    return patch  # type: ignore[return-value]


def hazards() -> dict[str, Hazard]:
    """Import every case file; return all known hazards by id, in order of id.

    Raises:
        TypeError: a case file declares no hazard, or more than one, or does not show it.
        ValueError: a hazard's id is not its file's name, or the file is in the other folder.
    """
    if not _hazards:
        files = _files()
        if files is None:
            import pkgutil

            files = {
                entry.name: package
                for package, folder in folders().items()
                for entry in pkgutil.iter_modules([folder])
                if not entry.ispkg and not entry.name.startswith("_")
            }
        declared = [_declared(name, package) for name, package in files.items()]
        _hazards.update((hazard.id, hazard) for hazard in sorted(declared, key=lambda h: h.id))
    return _hazards


def patches() -> dict[str, Patch]:
    """Import every case file; return the hazards that are a `Patch`, by id, in order of id. Raises
    as `hazards()`.
    """
    if not _patches:
        from .record import Patch

        _patches.update(
            {name: hazard for name, hazard in hazards().items() if isinstance(hazard, Patch)}
        )
    return _patches


def _declared(name: str, package: str) -> Hazard:
    from .record import Hazard

    module = __import__(f"{package}.{name}", fromlist=["PATCH"])
    declared = [value for kind in _KINDS if (value := getattr(module, kind, None)) is not None]
    if len(declared) != 1 or not isinstance(declared[0], Hazard):
        raise TypeError(
            f"{package}.{name} declares {len(declared)} of {', '.join(_KINDS)}: declare one hazard"
        )
    hazard: Hazard = declared[0]
    if not hasattr(module, "reproduce"):
        raise TypeError(f"{package}.{name} does not show its hazard: define reproduce()")
    if hazard.id.replace("-", "_") != name:
        raise ValueError(f"patch {hazard.id!r} is declared in {name}.py: names must agree")
    if (hazard.distribution == MEGATRON) != (package == PACKAGE):
        raise ValueError(
            f"patch {hazard.id} is about {hazard.distribution}, and {package} has its case file: "
            f"those of frameworks belong into patches/{FRAMEWORKS}/, the others into patches/"
        )
    return hazard


def _files() -> dict[str, str] | None:
    """Return a dictionary from the name of each case file, without `.py`, to its package; None if
    the package is in a zip file.

    pkgutil finds them too, but imports inspect, which takes longer than all of `apply()`.
    """
    by_package = folders()
    if not os.path.isdir(by_package[PACKAGE]):
        return None
    return {
        name[:-3]: package
        for package, folder in by_package.items()
        if os.path.isdir(folder)
        for name in os.listdir(folder)
        if name[-3:] == ".py" and name[0] != "_"
    }
