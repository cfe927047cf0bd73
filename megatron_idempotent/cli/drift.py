"""Implements `drift`, which compares patches with sources: installed ones, wheels or checkouts.

It covers Megatron, and frameworks with copies of Megatron's code. For each patch and source tree it
tells whether the bodies that the patch wraps are reviewed, repaired upstream or new, and shows the
new lines. It imports no source, so that all releases take seconds.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.decide import judge, review
from megatron_idempotent.patching.record import Patch, Target
from megatron_idempotent.patching.releases import UNKNOWN
from megatron_idempotent.patching.settings import check_ids
from megatron_idempotent.patching.source import Body
from megatron_idempotent.patching.table import render
from megatron_idempotent.patching.trees import SourceTree

from .statements import change
from .trees import installed_trees, open_trees, release_of
from .upstream import repair_folder

Standing = Literal["reviewed", "holds", "fixed_upstream", "missing", "drifted", "not_affected"]


_STANDINGS: Mapping[str | None, Standing] = {
    "missing_target": "missing",
    "fixed_upstream": "fixed_upstream",
    "unsupported_version": "not_affected",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Holds the result of comparing one patch with one source tree.
    It says, for example, whether a person has reviewed the tree's bodies of the functions that the
    patch wraps.

    Example:
        Drift(id="train-interval-timer", path="Megatron-LM", distribution="megatron-core",
              version="0.20.0rc0", standing="drifted",
              reason="train (body …) no longer …", diff="--- …")
    """

    id: str
    """The id of the patch."""
    path: str
    """The path of the tree: a wheel or a folder."""
    distribution: str
    """The distribution that the patch is for, such as `megatron-core`."""
    version: str
    """The distribution's version; `unknown` in a framework's checkout, whose bodies decide."""
    standing: Standing
    """`reviewed`: a person has reviewed every body for this patch. `holds`: unreviewed bodies
    have the fragments that the patch relies on. `fixed_upstream`: upstream has repaired the
    hazard. `missing`: a target is not in the tree (wheels before 0.17 lack `megatron.training`).
    `drifted`: a body is new and the patch would be refused. `not_affected`: the release is not in
    the hazard's range, or a body is older than the hazard, whatever the version says."""
    reason: str
    """The reason for the standing, as a sentence."""
    diff: str
    """Unified diff of the drifted bodies against the newest reviewed bodies in the trees; if no
    tree has a reviewed body, against the statements of the most similar one."""


def compare(trees: Iterable[SourceTree]) -> list[Drift]:
    """Compare each patch with each source tree of its distribution. Return a `Drift` for each pair
    of patch and tree.
    """
    trees = list(trees)
    rows = []
    for patch in patches().values():
        references: dict[str, _Reference] = {}
        bodies_of_trees = [
            (tree, {t.address: tree.body(t.module, t.qualname) for t in patch.targets})
            for tree in trees
            if patch.distribution in tree.versions
        ]
        for tree, bodies in bodies_of_trees:
            for target in patch.targets:
                body = bodies[target.address]
                if body is None or not review(target, body)[0]:
                    continue
                reviewed = body.hash in target.reviewed
                older = references.get(target.address)
                if reviewed or older is None or not older.reviewed:
                    references[target.address] = _Reference(_label(tree, patch), reviewed, body)
        for tree, bodies in bodies_of_trees:
            version = tree.versions[patch.distribution]
            standing, reason, diff = _stand(patch, tree, bodies, references)
            rows.append(
                Drift(
                    id=patch.id,
                    path=str(tree.path),
                    distribution=patch.distribution,
                    version=version.text,
                    standing=standing,
                    reason=reason,
                    diff=diff,
                )
            )
    return rows


class _Reference(NamedTuple):
    """Holds a function body from a tree, with which a changed body of this function is compared."""

    label: str
    reviewed: bool
    body: Body


def _label(tree: SourceTree, patch: Patch) -> str:
    version = tree.versions[patch.distribution]
    return str(tree.path) if version is UNKNOWN else version.text


def _stand(
    patch: Patch,
    tree: SourceTree,
    bodies: Mapping[str, Body | None],
    references: Mapping[str, _Reference],
) -> tuple[Standing, str, str]:
    verdict = judge(patch, bodies, tree, release_of(tree, patch.distribution), named=False)
    if verdict.status in _STANDINGS:
        return _STANDINGS[verdict.status], verdict.reason, ""
    if verdict.status is None:
        reviewed = all(verdict.bodies[t.address].hash in t.reviewed for t in patch.targets)
        return ("reviewed" if reviewed else "holds"), verdict.reason, ""
    drifted = [t for t in patch.targets if not review(t, verdict.bodies[t.address])[0]]
    diffs = [_diff(t, _label(tree, patch), verdict.bodies[t.address], references) for t in drifted]
    return "drifted", verdict.reason, "\n".join(diffs)


def _diff(target: Target, label: str, body: Body, references: Mapping[str, _Reference]) -> str:
    reference = references.get(target.address)
    if reference is None:  # no tree has a reviewed body, but the hashes of its statements are known
        changed = change(body, target.reviewed)
        if changed is None:
            return (
                f"{target.address}: nobody has read a body of it for this patch, so there is "
                "nothing to compare with"
            )
        heads = (
            f"--- {target.address} in {changed.label}, reviewed, by its statements' hashes",
            f"+++ {target.address} in {label}",
        )
        return "\n".join((*heads, *changed.lines))
    accepted = "reviewed" if reference.reviewed else "which holds what the patch relies on"
    return "\n".join(
        difflib.unified_diff(
            reference.body.text.splitlines(),
            body.text.splitlines(),
            fromfile=f"{target.address} in {reference.label}, {accepted}",
            tofile=f"{target.address} in {label}",
            lineterm="",
        )
    )


CELLS: dict[Standing, str] = {
    "reviewed": "ok",
    "holds": "holds",
    "fixed_upstream": "fixed",
    "missing": "absent",
    "drifted": "DRIFT",
    "not_affected": "-",
}
LEGEND = """
ok: a person has read it for this     holds: new, but with all that the patch relies on
fixed: upstream repaired it           DRIFT: new, and the patch would be refused
absent: not in this tree              -: not in the range of the hazard"""


def drift(
    paths: Sequence[str],
    *,
    as_json: bool,
    with_diff: bool,
    accepted: Sequence[str] | None = None,
    label: str | None = None,
) -> int:
    """Print a table comparing patches (rows) with source trees (columns), or record a review.

    Returns:
        The exit code: 1 if a body drifted, else 0.

    Args:
        paths: wheels, folders of wheels and source trees; empty for the installed Megatron.
        as_json: True to print the rows as JSON, with diffs.
        with_diff: True to show how drifted bodies differ.
        accepted: ids of patches whose drifted bodies a person has reviewed, which is recorded and
            printed; None to compare only.
        label: the name of the commit that was reviewed; None for releases.

    Raises:
        ValueError: a path has no distribution that a patch is for; no path is given and no Megatron
            is installed; or `accept` raises it.
        UnknownPatchError: `accepted` names a patch that does not exist.
    """
    trees = open_trees([Path(path) for path in paths]) or _installed()
    if accepted is not None:
        from .accept import accept

        sentences = accept(trees, check_ids(accepted, "--accept", patches()), label=label)
        print("\n".join(sentences) or "nothing is new in these patches")
        return 0
    rows = compare(trees)
    drifted = [row for row in rows if row.standing == "drifted"]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(_grid(rows))
        print(LEGEND)
        for line in _repairs_that_can_go(rows):
            print(f"\n{line}")
        for row in drifted:
            print(f"\n{row.id} on {_name(row)}: {row.reason}")
            if with_diff:
                print(row.diff)
    return 1 if drifted else 0


def _repairs_that_can_go(rows: Sequence[Drift]) -> list[str]:
    """Return a sentence for each repair in upstream/ that is no longer needed.
    A released version has then repaired the hazard itself.

    Versions of commits (`0.20.0rc0`, `unknown`) do not count.
    """
    return [
        f"upstream/{row.id} can go: {_name(row)} has repaired the hazard"
        for row in rows
        if row.standing == "fixed_upstream"
        and row.version.replace(".", "").isdigit()
        and repair_folder(row.id) is not None
    ]


def _installed() -> list[SourceTree]:
    trees = installed_trees()
    if not trees:
        raise ValueError("no megatron-core is installed: install it, or name a wheel or a checkout")
    return trees


def _grid(rows: Sequence[Drift]) -> str:
    names: dict[str, dict[str, None]] = {}  # path → names of its distributions, in order
    for row in rows:
        names.setdefault(row.path, {})[_name(row)] = None
    cells = {(row.id, row.path): _cell(row) for row in rows}
    ids = list(dict.fromkeys(row.id for row in rows))
    grid = [[i, *(cells.get((i, path), "") for path in names)] for i in ids]
    return render(("patch", *(", ".join(inside) for inside in names.values())), grid)


def _name(row: Drift) -> str:
    if row.distribution == MEGATRON:
        return row.version
    version = Path(row.path).name if row.version == UNKNOWN.text else row.version
    return f"{row.distribution} {version}"


def _cell(row: Drift) -> str:
    return CELLS[row.standing]
