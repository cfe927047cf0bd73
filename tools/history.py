"""Lists the patches that land on each commit of Megatron's branches, and unreviewed bodies.

    python tools/history.py CLONE [--branch NAME] [--since DAY] [--json]

Frameworks pin commits between two releases. `megatron-idempotent drift CLONE@COMMIT` shows the new
code of one of them. A verdict is reused until one of the files that were read for it changes, so
that thousands of commits take minutes. The exit code is 1 if patches are refused on a commit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _checkout  # noqa: F401  # before what it finds

from megatron_idempotent.cli.trees import PACKAGE, Clone
from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.decide import Verdict, judge
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.source import parse_body
from megatron_idempotent.patching.table import render
from megatron_idempotent.patching.trees import SourceTree

#: A commit counts as covered if at least this fraction of the patches that it needs land.
COVERED = 0.99


class Branches(Clone):
    """Reads Megatron's sources at the commits of a git clone's branches, one after another."""

    def commits(self, branch: str, since: str) -> list[tuple[str, str]]:
        """Return (commit id, day) for each commit of a branch since a date, the oldest first."""
        options = ("--first-parent", "--reverse", f"--since={since}T00:00", "--format=%H %cs")
        lines = self.git("log", *options, branch, "--").splitlines()
        return [(commit, day) for commit, day in map(str.split, lines)]

    def trees(self, commits: Sequence[str]) -> Iterator[tuple[SourceTree, Mapping[str, str]]]:
        """Yield, for each commit, its source tree, and a map from file path to git blob id."""
        blobs: dict[str, str] = {}
        for number, commit in enumerate(commits):
            if number == 0:
                blobs = self.blobs(commit)
            else:
                blobs = self._changed(blobs, commits[number - 1], commit)
            yield self.tree_of(commit, blobs), blobs

    def _changed(self, blobs: Mapping[str, str], parent: str, commit: str) -> dict[str, str]:
        """Return a commit's map from path to blob id.
        It is the map of the parent commit, changed by git's difference of the two.
        """
        changed = dict(blobs)
        command = ("diff-tree", "-r", "--no-renames", parent, commit, "--", PACKAGE)
        for line in self.git(*command).splitlines():
            words, _, path = line.partition("\t")
            *_, blob, status = words.split()
            if status == "D":
                changed.pop(path, None)
            else:
                changed[path] = blob
        return changed


_Source = tuple[str, str]
"""A read of a tree: `text` (a module's source) or `beside` (a folder's list), and the module."""


class _Recorder:
    """Reads modules of a source tree, and records each read, so that a verdict can be cached."""

    def __init__(self, tree: SourceTree, blobs: Mapping[str, str]) -> None:
        self.tree, self._blobs = tree, blobs
        self.recorded: dict[_Source, Any] = {}

    def text(self, module: str) -> str | None:
        self._record("text", module)
        return self.tree.text(module)

    def beside(self, module: str) -> list[str]:
        self._record("beside", module)
        return self.tree.beside(module)

    def digest(self, module: str) -> str | None:
        self._record("text", module)
        return self.tree.digest(module)

    def is_package(self, module: str) -> bool:
        self._record("text", module)
        return self.tree.is_package(module)

    def _record(self, kind: str, module: str) -> None:
        self.recorded[kind, module] = self.state(kind, module)

    def state(self, kind: str, module: str) -> Any:
        """Return a value that changes when a source does: the blob id of a module's file, None
        without a file, or the names of the modules in a folder.
        """
        if kind == "beside":
            return self.tree.beside(module)
        path = self.tree.file_of(module)
        return None if path is None else self._blobs[path]


class _CachedVerdict(NamedTuple):
    """Holds a verdict on a patch, and the states of all sources that were read for the verdict."""

    version: str
    recorded: dict[_Source, Any]
    verdict: Verdict


class Standing(NamedTuple):
    """Holds the outcome of all patches on one commit.
    It has the number of patches that `apply()` would install, and those that it would refuse.
    """

    commit: str
    day: str
    """The commit's day, such as `2026-05-01`."""
    landed: int
    """The number of patches that `apply()` would install."""
    refused: Mapping[str, str]
    """The reasons for refusing patches with unreviewed code, by patch."""

    @property
    def share(self) -> float:
        """The fraction of the patches for this commit that `apply()` would install."""
        return self.landed / max(1, self.landed + len(self.refused))


def walk(clone: Branches, branch: str, since: str) -> Iterator[Standing]:
    """Yield the `Standing` of each commit of a branch since a date, the oldest first: how many
    patches `apply()` would install, and which it would refuse.
    """
    days = dict(clone.commits(branch, since))
    wrapping = [patch for patch in patches().values() if patch.distribution == MEGATRON]
    cache: dict[str, list[_CachedVerdict]] = {patch.id: [] for patch in wrapping}
    for (tree, blobs), (commit, day) in zip(clone.trees([*days]), days.items(), strict=True):
        verdicts = {patch.id: _verdict(patch, tree, blobs, cache[patch.id]) for patch in wrapping}
        yield Standing(
            commit=commit,
            day=day,
            landed=sum(verdict.status is None for verdict in verdicts.values()),
            refused={name: v.reason for name, v in verdicts.items() if v.status == "drifted"},
        )


def _verdict(
    patch: Patch, tree: SourceTree, blobs: Mapping[str, str], cache: list[_CachedVerdict]
) -> Verdict:
    """Return the cached verdict on a patch if the sources that it read are unchanged.
    Otherwise decide on the patch, and cache the verdict.

    The last commit's verdict is first in the cache, because it is mostly that of the next one.
    """
    recorder = _Recorder(tree, blobs)
    release = tree.release(MEGATRON)
    version = "" if release is None else release.text
    for position, (of_version, recorded, verdict) in enumerate(cache):
        if of_version == version and all(
            recorder.state(*source) == state for source, state in recorded.items()
        ):
            cache.insert(0, cache.pop(position))
            return verdict
    verdict = _judge(patch, recorder)
    cache.insert(0, _CachedVerdict(version, recorder.recorded, verdict))
    return verdict


def _judge(patch: Patch, recorder: _Recorder) -> Verdict:
    """Decide whether `apply()` would install a patch, from the recorder's source tree."""
    bodies = {}
    for target in patch.targets:
        text = recorder.text(target.module)
        bodies[target.address] = None if text is None else parse_body(text, target.qualname)
    return judge(patch, bodies, recorder, recorder.tree.release(MEGATRON), named=False)


def main(argv: Sequence[str]) -> int:
    """Print, for each branch, how many patches `apply()` would install on its commits, and why it
    would refuse others.

    Returns:
        The exit code: 1 if patches are refused on a commit, 2 if there is no clone or it lacks a
        branch, else 0.
    """
    parser = argparse.ArgumentParser(prog="python tools/history.py")
    parser.add_argument("clone", metavar="CLONE", help="a clone of Megatron-LM")
    parser.add_argument(
        "--branch", action="append", metavar="NAME", help="a branch; default: main and dev"
    )
    parser.add_argument("--since", default="2025-09-01", metavar="DAY", help="default: %(default)s")
    parser.add_argument(
        "--json", action="store_true", help="print what docs/history.json holds of each branch"
    )
    options = parser.parse_args(argv)
    try:
        clone = Branches(Path(options.clone))
        branches = options.branch or ["main", "dev"]
        walks = {branch: list(walk(clone, branch, options.since)) for branch in branches}
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({branch: runs(walked) for branch, walked in walks.items()}, indent=1))
    else:
        print("\n\n".join(_summary(branch, walked) for branch, walked in walks.items()))
    return int(any(standing.refused for walked in walks.values() for standing in walked))


def runs(walked: Iterable[Standing]) -> list[dict[str, Any]]:
    """Group successive commits on which the same patches would be installed, in the form of
    docs/history.json.
    """
    rows: list[dict[str, Any]] = []
    for standing in walked:
        same = {"landed": standing.landed, "refused": [*standing.refused]}
        if not rows or {key: rows[-1][key] for key in same} != same:
            days = {"since": standing.day, "until": standing.day}
            row = {"commit": standing.commit, **days, "commits": 0}
            rows.append({**row, **same})
        rows[-1]["until"] = standing.day
        rows[-1]["commits"] += 1
    return rows


def _summary(branch: str, walked: Sequence[Standing]) -> str:
    """Return a sentence about a branch, and a table of the patches that some commit refuses."""
    if not walked:
        return f"{branch}: no commits in that time"
    landed = sum(standing.landed for standing in walked)
    refused = sum(len(standing.refused) for standing in walked)
    covered = sum(standing.share >= COVERED for standing in walked)
    head = (
        f"{branch}: {len(walked)} commits from {walked[0].day} to {walked[-1].day}. "
        f"{landed / max(1, landed + refused):.2%} of the patches that concern a commit land; "
        f"{covered / len(walked):.2%} of the commits get {COVERED:.0%} of theirs or more."
    )
    refusals: dict[tuple[str, str], list[Standing]] = {}
    for standing in walked:
        for name, reason in standing.refused.items():
            refusal = (name, reason.partition(": name the patch")[0])
            refusals.setdefault(refusal, []).append(standing)
    rows = [
        (name, f"{len(commits)}", f"{first.day} to {last.day}", first.commit[:12], reason)
        for (name, reason), commits in sorted(refusals.items(), key=lambda item: -len(item[1]))
        for first, last in [(commits[0], commits[-1])]
    ]
    return (
        f"{head}\n\n{render(('patch', 'commits', 'days', 'first', 'why'), rows)}" if rows else head
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
