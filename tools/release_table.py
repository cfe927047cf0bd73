"""Writes `releases.txt`: the files of each release that patches read, and which patches land on it.

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
    known: Sequence[str], trees: Iterable[SourceTree], needs: dict[str, Needs]
) -> list[str]:
    """Return the lines of `releases.txt`, renewed by these trees.

    Args:
        known: its lines as they are. Releases that are none of the trees stay.
        trees: sources of Megatron; those that are no release are left out.
        needs: what wrappers read, by patch.

    Raises:
        ValueError: patches read a module that the table lacks, of a release that is none of the
            trees.
    """
    ours = [patch for patch in patches().values() if patch.distribution == MEGATRON]
    given: dict[str, list[SourceTree]] = {}
    for tree in trees:
        release = release_of(tree) if MEGATRON in tree.versions else None
        if release is not None:
            given.setdefault(release.text, []).append(tree)
    table = Table(known)
    names = sorted({*table.names, *given}, key=place)
    before = {name: table.release(name) for name in names}
    all_trees = [tree for found in given.values() for tree in found]
    folders = sorted({t.module for patch in ours for t in patch.targets if "." in t.qualname})
    modules = _modules(ours, needs, folders, all_trees, [each for each in before.values() if each])
    return [
        *lines_of(_release(n, before[n], given.get(n, []), modules, folders, ours) for n in names)
    ]


def _modules(
    ours: Sequence[Patch],
    needs: dict[str, Needs],
    folders: Sequence[str],
    trees: Sequence[SourceTree],
    before: Sequence[Release],
) -> list[str]:
    """Return the modules that patches read of any release."""
    named: set[str] = set()
    for patch in ours:
        named |= {target.module for target in patch.targets}
        named |= {Place(address=address).module for address, _ in patch.fixed_by}
        if patch.came_with is not None:
            named.add(Place(address=patch.came_with[0]).module)
        for need in needs.get(patch.id, Needs()).names:
            named |= set(need.modules)
    for tree in trees:
        for folder in folders:
            named |= set(tree.beside(folder))
    packages = {folder.rpartition(".")[0] for folder in folders}
    for release in before:
        named |= {m for m in release.digests if {m, m.rpartition(".")[0]} & packages}
    return sorted(name for name in named if not name.endswith(".package_info"))


def _release(
    name: str,
    before: Release | None,
    trees: Sequence[SourceTree],
    modules: Sequence[str],
    folders: Sequence[str],
    ours: Sequence[Patch],
) -> Release:
    digests: dict[str, str | None] = {}
    for module in modules:
        digests[module] = next(filter(None, (tree.digest(module) for tree in trees)), None)
        if digests[module] is None and before is not None and module in before.digests:
            # A wheel may lack what a clone at the tag had.
            digests[module] = before.digests[module]
        elif not trees and (before is None or module not in before.digests):
            raise ValueError(f"releases.txt lacks {module} of {name}, which patches read: {_HOW}")
    standings = {}
    for patch in ours:
        marks = [_mark(patch, tree) for tree in trees]
        marks += [before.standings.get(patch.id, UNKNOWN_STANDING)] if before is not None else []
        known = [mark for mark in marks if mark != UNKNOWN_STANDING]
        standings[patch.id] = known[0] if known else UNKNOWN_STANDING
    return Release(version=name, digests=digests, folders=tuple(folders), standings=standings)


def _mark(patch: Patch, tree: SourceTree) -> str:
    bodies = {t.address: tree.body(t.module, t.qualname) for t in patch.targets}
    verdict = judge(patch, bodies, tree, tree.versions[MEGATRON], named=False)
    return _MARKS.get(verdict.status, UNKNOWN_STANDING)
