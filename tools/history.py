"""Says which patches land on each commit of Megatron's branches, and which bodies nobody has read.

    python tools/history.py CLONE [--branch NAME] [--since DAY] [--json]

Frameworks pin commits between two releases. `megatron-idempotent drift CLONE@COMMIT` shows what is
new on one of them. A verdict holds until a file changes that was read for it, so that thousands of
commits take minutes. Exit code 1 if a branch has commits on which patches are refused.
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
from megatron_idempotent.patching.table import render
from megatron_idempotent.patching.trees import SourceTree

#: A commit counts as covered if this share of the patches that concern it lands.
COVERED = 0.99


class Branches(Clone):
    """Reads the commits of a clone's branches, one after another."""

    def commits(self, branch: str, since: str) -> list[tuple[str, str]]:
        """Return a branch's commits since a date, with their days, the oldest first."""
        options = ("--first-parent", "--reverse", f"--since={since}T00:00", "--format=%H %cs")
        lines = self.git("log", *options, branch, "--").splitlines()
        return [(commit, day) for commit, day in map(str.split, lines)]

    def trees(self, commits: Sequence[str]) -> Iterator[tuple[SourceTree, Mapping[str, str]]]:
        """Yield each commit's Megatron with the ids of its files' contents, by path."""
        blobs: dict[str, str] = {}
        for number, commit in enumerate(commits):
            if number == 0:
                blobs = self.blobs(commit)
            else:
                blobs = self._changed(blobs, commits[number - 1], commit)
            yield self.tree_of(commit, blobs), blobs

    def _changed(self, blobs: Mapping[str, str], parent: str, commit: str) -> dict[str, str]:
        """Return the blobs of a commit by those of another one."""
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


class _Noted:
    """Reads a tree's modules, and notes by which files' contents an answer was found."""

    def __init__(self, tree: SourceTree, files: Mapping[str, str]) -> None:
        self.tree, self._files = tree, files
        self.seen: dict[tuple[str, str], Any] = {}

    def text(self, module: str) -> str | None:
        self.seen["text", module] = self.now("text", module)
        return self.tree.text(module)

    def beside(self, module: str) -> list[str]:
        found = self.seen["beside", module] = self.now("beside", module)
        return list(found)

    def digest(self, module: str) -> str | None:
        self.seen["text", module] = self.now("text", module)
        return self.tree.digest(module)

    def is_package(self, module: str) -> bool:
        self.seen["text", module] = self.now("text", module)
        return self.tree.is_package(module)

    def now(self, what: str, module: str) -> Any:
        """Return what decides an answer: a file's content, or the names in a folder."""
        if what == "beside":
            return self.tree.beside(module)
        name = self.tree.file_of(module)
        return None if name is None else self._files[name]


class Standing(NamedTuple):
    """Says how patches stand with one commit."""

    commit: str
    day: str
    """The day that the commit is from, such as `2026-05-01`."""
    landed: int
    """The number of patches that `apply()` installs."""
    refused: Mapping[str, str]
    """The reasons, by patch, of those whose code is new there."""

    @property
    def share(self) -> float:
        """The share of the patches that concern the commit which lands."""
        return self.landed / max(1, self.landed + len(self.refused))


def walk(clone: Branches, branch: str, since: str) -> Iterator[Standing]:
    """Yield how patches of Megatron stand with each commit of a branch, oldest first."""
    days = dict(clone.commits(branch, since))
    ours = [patch for patch in patches().values() if patch.distribution == MEGATRON]
    known: dict[str, list[tuple[str, dict[tuple[str, str], Any], Verdict]]] = {}
    for (tree, files), (commit, day) in zip(clone.trees([*days]), days.items(), strict=True):
        noted = _Noted(tree, files)
        release = tree.release(MEGATRON)
        version = "" if release is None else release.text
        found: dict[str, Verdict] = {}
        for patch in ours:
            before = known.setdefault(patch.id, [])
            for at, (then, seen, _) in enumerate(before):
                if then == version and all(noted.now(*each) == seen[each] for each in seen):
                    before.insert(0, before.pop(at))  # the next commit has it, too
                    break
            else:
                reads = _Noted(tree, files)
                verdict = _judge(patch, reads)
                before.insert(0, (version, reads.seen, verdict))
            verdict = before[0][2]
            found[patch.id] = verdict
        yield Standing(
            commit=commit,
            day=day,
            landed=sum(each.status is None for each in found.values()),
            refused={name: v.reason for name, v in found.items() if v.status == "drifted"},
        )


def _judge(patch: Patch, reads: _Noted) -> Verdict:
    """Judge a patch as `apply()` does."""
    from megatron_idempotent.patching.source import parse_body

    bodies = {}
    for target in patch.targets:
        text = reads.text(target.module)
        bodies[target.address] = None if text is None else parse_body(text, target.qualname)
    return judge(patch, bodies, reads, reads.tree.release(MEGATRON), named=False)


def main(argv: Sequence[str]) -> int:
    """Print for each branch which patches land on its commits, and which bodies are new.

    Returns:
        The exit code: 1 if a branch has commits on which patches are refused, 2 if there is no
        clone or it lacks a branch, else 0.
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
        print("\n\n".join(_told(branch, walked) for branch, walked in walks.items()))
    return int(any(standing.refused for walked in walks.values() for standing in walked))


def runs(found: Iterable[Standing]) -> list[dict[str, Any]]:
    """Return commits in runs on which the same patches land, as docs/history.json has them."""
    rows: list[dict[str, Any]] = []
    for each in found:
        if not rows or (rows[-1]["landed"], rows[-1]["refused"]) != (each.landed, [*each.refused]):
            row = {"commit": each.commit, "since": each.day, "until": each.day, "commits": 0}
            rows.append({**row, "landed": each.landed, "refused": [*each.refused]})
        rows[-1]["until"] = each.day
        rows[-1]["commits"] += 1
    return rows


def _told(branch: str, found: Sequence[Standing]) -> str:
    if not found:
        return f"{branch}: no commits in that time"
    landed = sum(each.landed for each in found)
    refused = sum(len(each.refused) for each in found)
    covered = sum(each.share >= COVERED for each in found)
    head = (
        f"{branch}: {len(found)} commits from {found[0].day} to {found[-1].day}. "
        f"{landed / max(1, landed + refused):.2%} of the patches that concern a commit land; "
        f"{covered / len(found):.2%} of the commits get {COVERED:.0%} of theirs or more."
    )
    new: dict[tuple[str, str], list[Standing]] = {}
    for each in found:
        for name, reason in each.refused.items():
            new.setdefault((name, reason.partition(": name the patch")[0]), []).append(each)
    rows = [
        (name, f"{len(at)}", f"{at[0].day} to {at[-1].day}", at[0].commit[:12], reason)
        for (name, reason), at in sorted(new.items(), key=lambda item: -len(item[1]))
    ]
    return (
        f"{head}\n\n{render(('patch', 'commits', 'days', 'first', 'why'), rows)}" if rows else head
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
