"""Implements `drift PATH --accept ID`, which records that a person has reviewed drifted bodies.

A new release of Megatron changes files in `patches/_generated/` only: `reviewed.txt`;
`accepted.txt`, which has hashes of the reviewed statements; and `reads.txt`, if the release lacks a
name that a wrapper needs. Case files change only if a wrapper does. The label of an unchanged body
is extended to the new release, and to other releases that have the same file according to
`releases.txt`; that needs no ID.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from megatron_idempotent.patching.base import MEGATRON, OPEN
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.contract import unmet
from megatron_idempotent.patching.decide import check_range, part_of, review
from megatron_idempotent.patching.record import FILE, Patch, Reviewed, Target
from megatron_idempotent.patching.releases import (
    TABLE,
    Installed,
    Release,
    Table,
    numbers,
    release_named,
    supported,
)
from megatron_idempotent.patching.source import Body
from megatron_idempotent.patching.surroundings import READS, parsed
from megatron_idempotent.patching.trees import SourceTree

from .generated import FOLDER, content, write
from .needs import accepted_needs, lines_of
from .statements import ACCEPTED, accepted_lines
from .trees import release_of

_CHECKOUT = Path(__file__).parents[2] / "pyproject.toml"


def accept(trees: Iterable[SourceTree], ids: Collection[str], *, label: str | None) -> list[str]:
    """Record in `reviewed.txt`, `accepted.txt` and `reads.txt` that a person has reviewed the
    function bodies that these patches wrap in these trees.

    Args:
        trees: the releases, or the one commit, that were reviewed.
        ids: the patches for which every body that they wrap was reviewed. Other patches of the
            same functions need reviews of their own.
        label: the name of a commit, such as "main, November 2026"; None for releases.

    Returns:
        A sentence for each new line in `reviewed.txt`.

    Raises:
        ValueError: this package is not a checkout but installed, or a commit has no label. No file
            is changed then.
    """
    if not _CHECKOUT.is_file():
        raise ValueError(
            f"{FOLDER} belongs to an installed package, which the next install would replace: "
            "accept in a checkout of this project"
        )
    trees = list(trees)
    reviews = Reviewed(content(FOLDER, FILE))
    _drop_unwrapped(reviews)
    statements = {line[:12]: line for line in content(FOLDER, ACCEPTED)}
    table = Table(content(FOLDER, TABLE))
    releases = [*filter(None, map(table.release, table.names))]
    sentences: list[str] = []
    for tree in trees:
        bodies = {
            target.address: tree.body(target.module, target.qualname)
            for patch in patches().values()
            for target in patch.targets
        }
        for patch in patches().values():
            if patch.distribution not in tree.versions:
                continue
            release = release_of(tree, patch.distribution)
            if patch.id in ids and check_range(patch, release).status is None:
                for target in patch.targets:
                    body = bodies[target.address]
                    sentences += _accept(reviews, patch, target, body, label, tree)
            if label is None and release is not None:
                for target in patch.targets:
                    same_file: list[Installed] = []
                    if patch.distribution == MEGATRON:
                        same_file = _with_the_same_file(releases, target, tree)
                    for labelled in (release, *same_file):
                        _extend(reviews, patch, target, bodies[target.address], labelled)
        hashes = _read(reviews)
        read = [body for body in bodies.values() if body is not None and body.hash in hashes]
        statements |= {line[:12]: line for line in accepted_lines(read)}
    hashes = _read(reviews)
    write(FOLDER, FILE, reviews.lines())
    needs = accepted_needs(parsed(content(FOLDER, READS)), trees, ids)
    write(FOLDER, READS, lines_of(needs))
    write(FOLDER, ACCEPTED, [line for name, line in sorted(statements.items()) if name in hashes])
    return sentences


def _accept(
    reviews: Reviewed,
    patch: Patch,
    target: Target,
    body: Body | None,
    label: str | None,
    tree: SourceTree,
) -> list[str]:
    if body is None:
        return []
    parts = reviews.parts.get((target.address, patch.id), {})
    # A framework's function changes with every commit, so its fragments decide.
    if patch.distribution != MEGATRON and not parts and review(target, body)[0]:
        return []
    part = _part(target, body)
    sentences = []
    if patch.id not in reviews.readers.get((target.address, body.hash), ()):
        name = _label(patch.distribution, label, tree)
        reviews.readers.setdefault((target.address, body.hash), []).append(patch.id)
        name = reviews.bodies.setdefault(target.address, {}).setdefault(body.hash, name)
        sentences.append(f"{patch.id}: body {body.hash} of {target.address}, {name}")
    if part is not None and part not in parts:
        name = _label(patch.distribution, label, tree)
        reviews.parts.setdefault((target.address, patch.id), {})[part] = name
        sentences.append(f"{patch.id}: part {part} of {target.address}, {name}")
    return sentences


def _part(target: Target, body: Body) -> str | None:
    """Return the hash of the statements of a function's body that the patch relies on.
    Return None if the body lacks some of them; then only a review of the whole body counts.
    """
    if not target.relies_on or not all(body.contains(text) for text in target.relies_on):
        return None
    return None if unmet(target.wrapper, body) is not None else part_of(target, body).hash


def _label(distribution: str, label: str | None, tree: SourceTree) -> str:
    release = release_of(tree, distribution)
    if label is None and release is None:
        raise ValueError(
            f"{tree.path} holds {distribution} {tree.versions[distribution].text}, and is no "
            'release: say which commit it is, such as --as "main, November 2026"'
        )
    return label or release.text  # type: ignore[union-attr]  # one of them is there


def _extend(
    reviews: Reviewed, patch: Patch, target: Target, body: Body | None, release: Installed
) -> None:
    """Add `release` to the label, a range of releases, that `reviews` has for this body of the
    target function, and to that of the body's reviewed part. A body or part without a label gets
    none.

    A body of a release before the hazard is recorded without a review: a commit with that body does
    not have the hazard yet.
    """
    if body is None:
        return
    labels = reviews.bodies.setdefault(target.address, {})
    if not supported(release, patch.since, OPEN):
        labels.setdefault(body.hash, release.text)
    if body.hash in labels:
        labels[body.hash] = _with(labels[body.hash], release)
    parts = reviews.parts.get((target.address, patch.id), {})
    part = _part(target, body) if parts else None
    if part in parts:
        parts[part] = _with(parts[part], release)


def _with_the_same_file(
    releases: Iterable[Release], target: Target, tree: SourceTree
) -> list[Installed]:
    """Return the known releases whose file with the patched function is equal to that of `tree`."""
    digest = tree.digest(target.module)
    return [
        release_named(release.version)
        for release in releases
        if digest is not None and release.digests.get(target.module) == digest
    ]


def _with(label: str, release: Installed) -> str:
    """Extend `label`, a range of releases like `0.12.0 to 0.15.3`, so that it includes `release`.
    The label names the releases that have a function body. Return the new label.
    """
    first, _, last = label.partition(" to ")
    if not numbers(first):
        return label  # the name of a commit
    ends = sorted({first, last or first, release.text}, key=numbers)
    return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def _drop_unwrapped(reviews: Reviewed) -> None:
    """Remove from `reviews` the bodies of functions that no patch wraps any more."""
    wrapped = {target.address for patch in patches().values() for target in patch.targets}
    for address in reviews.bodies.keys() - wrapped:
        for name in reviews.bodies.pop(address):
            reviews.readers.pop((address, name), None)
    for address, patch_id in [key for key in reviews.parts if key[0] not in wrapped]:
        del reviews.parts[address, patch_id]


def _read(reviews: Reviewed) -> set[str]:
    """Return the hashes of function bodies that a person has reviewed for at least one patch."""
    return {name for _, name in reviews.readers}
