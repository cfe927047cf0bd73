"""Renews what wrappers need of upstream by trees that a person has read, for `drift --accept`.

`reads.txt` has these needs by patch. `tools/reads.py` derives them from the code of the wrappers;
here a need that stands in the file is only adapted to what trees have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.decide import judge
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.surroundings import Need, Needs, bound_of, key_of, returned
from megatron_idempotent.patching.trees import SourceTree

from .trees import installed_trees, release_of

Version = tuple[tuple[int, ...], bool]
"""A version as `surroundings.key_of` returns it, by which versions are compared."""


def accepted_needs(
    needs: Mapping[str, Needs], trees: Iterable[SourceTree], ids: Collection[str]
) -> dict[str, Needs]:
    """Return the needs of all patches, those of some patches renewed by trees.

    Args:
        needs: what `reads.txt` says, by patch.
        trees: sources that a person has read for these patches, and so accepts there what is done
            to a name, or that a commit lacks it.
        ids: the patches to renew.
    """
    renewed = {patch_id: entry for patch_id, entry in needs.items() if patch_id in patches()}
    megatrons = by_version(trees)
    for patch_id in renewed.keys() & ids:
        patch = patches()[patch_id]
        fitting = [tree for tree in megatrons if fits(patch, tree, read=True)]
        names = {need for old in needs[patch_id].names for need in merged(old, fitting)}
        renewed[patch_id] = needs_of_names(names, keeps=needs[patch_id].keeps)
    return renewed


def by_version(trees: Iterable[SourceTree]) -> list[SourceTree]:
    """Return the trees that have Megatron, the oldest version first."""
    megatrons = [tree for tree in trees if MEGATRON in tree.versions]
    return sorted(megatrons, key=lambda tree: key_of(tree.versions[MEGATRON]))


def fits(patch: Patch, tree: SourceTree, *, read: bool) -> bool:
    """Return whether a patch lands on a tree; with `read` also where its bodies are new."""
    bodies = {t.address: tree.body(t.module, t.qualname) for t in patch.targets}
    return judge(patch, bodies, None, release_of(tree), named=read).status is None


def needs_of_names(names: Iterable[Need], *, keeps: bool) -> Needs:
    """Return needs in order, without modules of which another need asks for a name."""
    ordered = sorted(names, key=str)
    bound = {need.modules for need in ordered if need.name}
    # A module is there if what it binds is.
    needed = [need for need in ordered if need.name or need.modules not in bound]
    return Needs(names=tuple(needed), keeps=keeps)


def versions_with(need: Need, trees: Iterable[SourceTree]) -> tuple[set[Version], set[Version]]:
    """Return the versions of the source trees that meet a need, and of those that do not."""
    meeting: set[Version] = set()
    lacking: set[Version] = set()
    for tree in trees:
        versions = meeting if need.is_met(tree) else lacking
        versions.add(key_of(tree.versions[MEGATRON]))
    return meeting, lacking


def merged(need: Need, trees: Sequence[SourceTree]) -> set[Need]:
    """Return a need of `reads.txt`, no longer asked of releases and commits that lack the name.

    There are two where releases in between lack the name: one for those before, and one for those
    after, if the installed Megatron has the name again.
    """
    if need.use.startswith("["):
        results = (returned(t.text(need.modules[0]) or "", need.owner, need.name) for t in trees)
        hashes = sorted({*need.use[1:-1].split("|"), *filter(None, results)})
        return {Need(**{**vars(need), "use": f"[{'|'.join(hashes)}]"})}
    if any(release_of(tree) is None and not need.is_met(tree) for tree in trees):
        need = Need(**{**vars(need), "excused": True})
    meeting, lacking = versions_with(need, [tree for tree in trees if release_of(tree) is not None])
    lacking = {version for version in lacking if need.covers(version)}
    if not lacking:
        return {need}
    first, (release, released) = bound_of(min(lacking)), max(lacking)
    later = {version for version in meeting if version > max(lacking)}
    if later:
        spans = {(bound_of(min(later)), need.before)}
    else:
        spans = {(need.since, first)} if need.since != first else set()
        installed, _ = versions_with(need, installed_trees())
        if any(version > max(lacking) and need.covers(version) for version in installed):
            following = (*release[:-1], release[-1] + released), not released
            spans.add((bound_of(following), need.before))
    return {Need(**{**vars(need), "since": since, "before": end}) for since, end in spans}
