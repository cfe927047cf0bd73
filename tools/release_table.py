"""Updates `releases.txt`: digests of the files that patches read, and the patches that land.

The releases come from wheels, and from a clone at a release's tag (`CLONE@core_v0.16.1`), which has
the `megatron.training` that wheels before 0.17 lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import _checkout  # noqa: F401  # before what it finds

from megatron_idempotent.cli.trees import release_of
from megatron_idempotent.patching.base import MEGATRON, Place
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.decide import judge
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.releases import (
    FIXED,
    LANDS,
    OUTSIDE,
    UNKNOWN_STANDING,
    Release,
    Table,
    lines_of,
    place,
)
from megatron_idempotent.patching.surroundings import Needs
from megatron_idempotent.patching.trees import SourceTree

_MARKS = {None: LANDS, "unsupported_version": OUTSIDE, "fixed_upstream": FIXED}
_HOW = "`python tools/casebook.py .nox/wheels` reads the wheels that `make drift` fetches"


def renewed_table(
    lines: Sequence[str], trees: Iterable[SourceTree], needs: dict[str, Needs]
) -> list[str]:
    """Return the new lines of `releases.txt`: the present ones, updated by source trees.

    Args:
        lines: the present lines. Releases that are not among the trees are kept.
        trees: sources of Megatron; commits are ignored.
        needs: the names that wrappers use, by patch.

    Raises:
        ValueError: patches read a module that the table lacks for a release, and no tree has that
            release.
    """
    wrapping = [patch for patch in patches().values() if patch.distribution == MEGATRON]
    trees_of: dict[str, list[SourceTree]] = {}
    for tree in trees:
        release = release_of(tree) if MEGATRON in tree.versions else None
        if release is not None:
            trees_of.setdefault(release.text, []).append(tree)
    table = Table(lines)
    names = sorted({*table.names, *trees_of}, key=place)
    present = {name: table.release(name) for name in names}
    all_trees = [tree for same_release in trees_of.values() for tree in same_release]
    folders = sorted({t.module for patch in wrapping for t in patch.targets if "." in t.qualname})
    entries = [entry for entry in present.values() if entry is not None]
    modules = _modules(wrapping, needs, folders, all_trees, entries)
    renewed = (
        _release(name, present[name], trees_of.get(name, []), modules, folders, wrapping)
        for name in names
    )
    return [*lines_of(renewed)]


def _modules(
    wrapping: Sequence[Patch],
    needs: dict[str, Needs],
    folders: Sequence[str],
    trees: Sequence[SourceTree],
    entries: Sequence[Release],
) -> list[str]:
    """Return the modules whose files `apply()` reads for patches, in any release."""
    modules: set[str] = set()
    for patch in wrapping:
        modules |= {target.module for target in patch.targets}
        modules |= {Place(address=address).module for address, _ in patch.fixed_by}
        if patch.came_with is not None:
            modules.add(Place(address=patch.came_with[0]).module)
        for need in needs.get(patch.id, Needs()).names:
            modules |= set(need.modules)
    for tree in trees:
        for folder in folders:
            modules |= set(tree.beside(folder))
    packages = {folder.rpartition(".")[0] for folder in folders}
    for release in entries:
        modules |= {m for m in release.digests if {m, m.rpartition(".")[0]} & packages}
    return sorted(name for name in modules if not name.endswith(".package_info"))


def _release(
    name: str,
    present: Release | None,
    trees: Sequence[SourceTree],
    modules: Sequence[str],
    folders: Sequence[str],
    wrapping: Sequence[Patch],
) -> Release:
    """Return a release's new table entry, from its source trees and its old entry `present`."""
    digests: dict[str, str | None] = {}
    for module in modules:
        digests[module] = next(filter(None, (tree.digest(module) for tree in trees)), None)
        if digests[module] is None and present is not None and module in present.digests:
            # A wheel may lack a module that a clone at the tag has.
            digests[module] = present.digests[module]
        elif not trees and (present is None or module not in present.digests):
            raise ValueError(f"releases.txt lacks {module} of {name}, which patches read: {_HOW}")
    standings = {}
    for patch in wrapping:
        marks = [_mark(patch, tree) for tree in trees]
        if present is not None:
            marks.append(present.standings.get(patch.id, UNKNOWN_STANDING))
        decided = (mark for mark in marks if mark != UNKNOWN_STANDING)
        standings[patch.id] = next(decided, UNKNOWN_STANDING)
    return Release(version=name, digests=digests, folders=tuple(folders), standings=standings)


def _mark(patch: Patch, tree: SourceTree) -> str:
    bodies = {t.address: tree.body(t.module, t.qualname) for t in patch.targets}
    verdict = judge(patch, bodies, tree, tree.versions[MEGATRON], named=False)
    return _MARKS.get(verdict.status, UNKNOWN_STANDING)
