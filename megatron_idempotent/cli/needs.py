"""Updates the names that wrappers need from upstream to reviewed trees, for `drift --accept`.

`reads.txt` has these needs by patch. `tools/reads.py` derives them from the wrappers' code; this
module only changes needs in the file, by the names that the trees have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.decide import judge
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.surroundings import KEEPS, PRE, Need, Needs, key_of, returned
from megatron_idempotent.patching.trees import SourceTree

from .trees import installed_trees, release_of

Version = tuple[tuple[int, ...], bool]
"""A version as `surroundings.key_of` returns it, by which versions are compared."""


def bound_of(version: Version) -> str:
    """Return a version key (`key_of`) as text, in the form of `Need.since`."""
    release, is_release = version
    return ".".join(map(str, release)) + ("" if is_release else PRE)


def lines_of(needs: Mapping[str, Needs]) -> Iterator[str]:
    """Yield the lines of `reads.txt` for these needs, as `surroundings.parsed` reads them."""
    for patch_id in sorted(needs):
        yield f"{patch_id} {KEEPS}" if needs[patch_id].keeps else patch_id
        by_place: dict[str, list[str]] = {}
        for need in needs[patch_id].names:
            place_text = "|".join(need.modules) + (f":{need.owner}" if need.owner else "")
            since = f">={need.since}" if need.since else ""
            before_text = f"<{need.before}" if need.before else ""
            excused = "?" if need.excused else ""
            by_place.setdefault(place_text, []).append(
                f"{need.name}{need.use}{since}{before_text}{excused}"
            )
        for place_text in sorted(by_place):
            yield " ".join([" ", place_text, *sorted(filter(None, by_place[place_text]))])[1:]


def accepted_needs(
    needs: Mapping[str, Needs], trees: Iterable[SourceTree], ids: Collection[str]
) -> dict[str, Needs]:
    """Return patch → the names that its wrappers need from upstream. For the patches in `ids`,
    update these needs to what the reviewed source trees have, such as a release that lacks a name.

    Args:
        needs: the contents of `reads.txt`, by patch.
        trees: sources that a person has reviewed for these patches: a definition in them, or a
            commit without the name, is accepted.
        ids: the patches to update.
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
    """Return only the source trees that contain Megatron, sorted by its version, oldest first."""
    megatrons = [tree for tree in trees if MEGATRON in tree.versions]
    return sorted(megatrons, key=lambda tree: key_of(tree.versions[MEGATRON]))


def fits(patch: Patch, tree: SourceTree, *, read: bool) -> bool:
    """Return True if `apply()` would install a patch on a source tree. If `read` is true, changed
    function bodies count as reviewed.
    """
    bodies = {t.address: tree.body(t.module, t.qualname) for t in patch.targets}
    return judge(patch, bodies, None, release_of(tree), named=read).status is None


def needs_of_names(names: Iterable[Need], *, keeps: bool) -> Needs:
    """Return `names`, sorted, as a `Needs`.
    A need for a module is dropped if another need is for a name in that module.
    """
    ordered = sorted(names, key=str)
    bound = {need.modules for need in ordered if need.name}
    # A module exists if a name in it does.
    needed = [need for need in ordered if need.name or need.modules not in bound]
    return Needs(names=tuple(needed), keeps=keeps)


def versions_with(need: Need, trees: Iterable[SourceTree]) -> tuple[set[Version], set[Version]]:
    """Return two sets of source trees' versions: those that meet a need, and those that do not."""
    meeting: set[Version] = set()
    lacking: set[Version] = set()
    for tree in trees:
        versions = meeting if need.is_met(tree) else lacking
        versions.add(key_of(tree.versions[MEGATRON]))
    return meeting, lacking


def merged(need: Need, trees: Sequence[SourceTree]) -> set[Need]:
    """Return the needs that replace `need`, a name that a wrapper reads from Megatron, in
    `reads.txt`. It is mostly one, limited to the range of releases that define the name in `trees`.

    If releases in between lack the name these are two needs: for releases before them, and for
    those after them if the installed Megatron has the name again.
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
