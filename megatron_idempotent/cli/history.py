"""Reads Megatron as it was at each commit of a branch, out of a clone, without a checkout.

`drift --history CLONE` says which patches land on each commit, and which bodies nobody has read:
frameworks pin commits between two releases. `drift CLONE@COMMIT` reads one of them as it would a
folder. A verdict holds until a file changes that was read for it, so that thousands of commits take
minutes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.decide import Verdict, judge
from megatron_idempotent.patching.record import Patch
from megatron_idempotent.patching.table import render
from megatron_idempotent.patching.trees import Listed, SourceTree

#: The folder of a clone that patches read.
_PACKAGE = "megatron"
#: Characters of a commit's whole id.
_SHA = 40
#: A commit counts as covered if this share of the patches that concern it lands.
COVERED = 0.99


class Clone:
    """Reads commits and their files from a clone, bare or with a work tree.

    Args:
        path: the clone.

    Raises:
        ValueError: git finds no clone there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.git("rev-parse", "--git-dir")
        self._content = lru_cache(maxsize=4096)(partial(self.git, "cat-file", "blob"))

    def git(self, *arguments: str) -> str:
        """Return what a git command prints.

        Raises:
            ValueError: it failed.
        """
        command = ["git", "-C", str(self._path), *arguments]
        try:
            return subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
        except (OSError, subprocess.CalledProcessError) as error:
            said = str(getattr(error, "stderr", "") or error).strip()
            raise ValueError(f"{' '.join(command)} failed: {said}") from None

    def commits(self, branch: str, since: str) -> list[tuple[str, str]]:
        """Return a branch's commits since a date, with the days they are from, oldest first."""
        options = ("--first-parent", "--reverse", f"--since={since}T00:00", "--format=%H %cs")
        lines = self.git("log", *options, branch, "--").splitlines()
        return [(commit, day) for commit, day in map(str.split, lines)]

    def tree(self, commit: str) -> SourceTree:
        """Return a commit's Megatron.

        Raises:
            ValueError: the clone lacks the commit, or there is no Megatron in it.
        """
        return self.tree_of(commit, next(self._file_lists([commit])))

    def trees(self, commits: Sequence[str]) -> Iterator[tuple[SourceTree, Mapping[str, str]]]:
        """Yield each commit's Megatron with the ids of its files' contents, by path."""
        for commit, files in zip(commits, self._file_lists(commits), strict=True):
            yield self.tree_of(commit, files), files

    def tree_of(self, commit: str, files: Mapping[str, str]) -> SourceTree:
        """Return the Megatron that has these contents, by path."""
        listed = Listed(files, lambda name: self._content(files[name]))
        name = commit[:12] if len(commit) == _SHA else commit
        return SourceTree(Path(f"{self._path}@{name}"), patches(), listed)

    def _file_lists(self, commits: Sequence[str]) -> Iterator[dict[str, str]]:
        files: dict[str, str] = {}
        for number, commit in enumerate(commits):
            told = ["ls-tree", "-r", f"{commit}^{{commit}}"]
            if number:
                told = ["diff-tree", "-r", "--no-renames", commits[number - 1], commit]
            for line in self.git(*told, "--", _PACKAGE).splitlines():
                words, _, name = line.partition("\t")
                *rest, last = words.split()
                blob, status = (rest[-1], last) if number else (last, "A")
                if status == "D":
                    files.pop(name, None)
                else:
                    files[name] = blob
            yield dict(files)


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


def walk(clone: Clone, branch: str, since: str) -> Iterator[Standing]:
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


def history(path: str, *, branches: Sequence[str], since: str, as_json: bool) -> int:
    """Print for each branch which patches land on its commits, and which bodies are new.

    Returns:
        The exit code: 1 if a branch has commits on which patches are refused, else 0.

    Args:
        path: the clone.
        branches: names of branches, or other revisions.
        since: the first day, such as `2025-09-01`.
        as_json: True to print what docs/history.json holds of each branch: its commits in runs on
            which the same patches land.

    Raises:
        ValueError: there is no clone, or it lacks a branch.
    """
    clone = Clone(Path(path))
    walks = {branch: list(walk(clone, branch, since)) for branch in branches}
    if as_json:
        print(json.dumps({branch: runs(found) for branch, found in walks.items()}, indent=1))
    else:
        print("\n\n".join(_told(branch, found) for branch, found in walks.items()))
    return 1 if any(each.refused for found in walks.values() for each in found) else 0


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
