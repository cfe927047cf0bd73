"""Opens the sources that `drift` compares: installed packages, wheels, checkouts and clones."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from pathlib import Path

from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.releases import Installed, is_plain
from megatron_idempotent.patching.source import locate
from megatron_idempotent.patching.trees import INFO, Listed, SourceTree

#: The folder of a clone that patches read.
PACKAGE = "megatron"
#: Characters of a commit's complete id.
_SHA = 40


class Clone:
    """Reads Megatron at a commit from a git clone, bare or with a work tree.

    Args:
        path: the clone.

    Raises:
        ValueError: git finds no clone at the path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.git("rev-parse", "--git-dir")
        self._content = lru_cache(maxsize=4096)(partial(self.git, "cat-file", "blob"))

    def git(self, *arguments: str) -> str:
        """Return the output of a git command.

        Raises:
            ValueError: the command failed.
        """
        command = ["git", "-C", str(self._path), *arguments]
        try:
            return subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout
        except (OSError, subprocess.CalledProcessError) as error:
            reason = str(getattr(error, "stderr", "") or error).strip()
            raise ValueError(f"{' '.join(command)} failed: {reason}") from None

    def tree(self, commit: str) -> SourceTree:
        """Return the source tree of Megatron at a commit.

        Raises:
            ValueError: the clone lacks the commit, or the commit has no Megatron.
        """
        return self.tree_of(commit, self.blobs(commit))

    def blobs(self, commit: str) -> dict[str, str]:
        """Return the blob ids of a commit's files below `megatron/`, by path."""
        lines = self.git("ls-tree", "-r", f"{commit}^{{commit}}", "--", PACKAGE).splitlines()
        return {
            path: words.split()[-1] for words, _, path in (line.partition("\t") for line in lines)
        }

    def tree_of(self, commit: str, blobs: Mapping[str, str]) -> SourceTree:
        """Return a Megatron source tree whose files are git blobs; `blobs` maps paths to blob ids.
        The tree's name contains `commit`.
        """
        files = Listed(blobs, lambda path: self._content(blobs[path]))
        name = commit[:12] if len(commit) == _SHA else commit
        return SourceTree(Path(f"{self._path}@{name}"), patches(), files)


def open_trees(paths: Iterable[Path]) -> list[SourceTree]:
    """Open the source trees at these paths; return them with the oldest release first.

    A folder of wheels gives a tree per wheel; `CLONE@COMMIT` gives the tree of a commit.

    Raises:
        ValueError: a path has no distribution that a patch is for.
    """
    trees = []
    for path in paths:
        clone, _, commit = str(path).rpartition("@")
        if clone and not path.exists():
            trees.append(Clone(Path(clone)).tree(commit))
            continue
        wheels = sorted(path.glob("*.whl")) if path.is_dir() else []
        trees += [SourceTree(wheel, patches()) for wheel in wheels or [path]]
    return sorted(trees, key=lambda t: [(name, v.release) for name, v in t.versions.items()])


def installed_trees() -> list[SourceTree]:
    """Return [the source tree of the Megatron on the import path], or [] without a Megatron."""
    info = locate(INFO)
    return [] if info is None else [SourceTree(info.parents[INFO.count(".")], patches())]


def release_of(tree: SourceTree, distribution: str = MEGATRON) -> Installed | None:
    """Return which release a source tree is, by the tree's path or its files; None for a commit.

    The path of a wheel names its release, and so does the tag of a clone at a release.
    """
    version = tree.versions[distribution]
    if distribution != MEGATRON:
        return tree.release(distribution)
    has_name = tree.path.suffix == ".whl" or tree.path.name.endswith(f"@core_v{version.text}")
    return version if has_name and is_plain(version) else tree.release(MEGATRON)
