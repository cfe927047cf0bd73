"""Completes, lists and verifies checkpoint directories, without importing torch or Megatron.

A checkpoint is written under another name, its files are listed in `COMPLETE.json`, and it is
renamed. A directory without that list, or that differs from it, is not a checkpoint. Folders of
Hugging Face checkpoints have their hashes in `SHA256SUMS`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .config import CheckpointError

MARKER = "COMPLETE.json"
SUMS = "SHA256SUMS"
_NAME = "rollout-{:06d}"
_UNFINISHED = ".unfinished"


def path_for(directory: Path, rollouts: int) -> Path:
    """Return the directory of the checkpoint after `rollouts` rollouts, whether it exists or not.

    An asynchronous run counts optimizer steps, here and below.
    """
    return directory / _NAME.format(rollouts)


def rollouts_of(checkpoint: Path) -> int:
    """Return the number of rollouts before a checkpoint, from its name."""
    return int(checkpoint.name.rpartition("-")[2])


def unfinished_path(directory: Path, rollouts: int) -> Path:
    """Return the folder in which a checkpoint is written; a run that died may have left files."""
    path = path_for(directory, rollouts)
    return path.with_name(path.name + _UNFINISHED)


def make_empty(unfinished: Path) -> None:
    """Make an empty directory, removing what a run that died has left there."""
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def seal(unfinished: Path, final: Path, state: dict[str, Any]) -> None:
    """Complete a checkpoint: list its files with sizes and hashes, and rename it to `final`.

    `verify` returns `state` later. The data is on disk before the list is, and the list before the
    rename, so that a power cut leaves a complete checkpoint or none under the final name.
    """
    files = {}
    for path in sorted(path for path in unfinished.rglob("*") if path.is_file()):
        _flush_to_disk(path)
        files[path.relative_to(unfinished).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
        }
    marker = unfinished / MARKER
    listed = {"sha256": _of_list(state, files), "state": state, "files": files}
    marker.write_text(json.dumps(listed, indent=1), encoding="utf-8")
    _flush_to_disk(marker)
    if final.exists():  # written by an interrupted run after the checkpoint this one resumed from
        shutil.rmtree(final)
    unfinished.rename(final)
    _flush_to_disk(final.parent)


def complete(directory: Path) -> list[Path]:
    """Return the complete checkpoints in a directory, the oldest first."""
    return sorted(path.parent for path in directory.glob(f"rollout-*[0-9]/{MARKER}"))


def keep_newest(directory: Path, count: int) -> None:
    """Remove all but the newest `count` complete checkpoints, the list of files in each first."""
    for path in complete(directory)[:-count]:
        (path / MARKER).unlink()
        shutil.rmtree(path)


def verify(checkpoint: Path) -> dict[str, Any]:
    """Compare every file of a checkpoint with its list; return the state given to `seal`.

    Errors: `CheckpointError`, which names the file that is missing, cut short or changed.
    """
    marker = checkpoint / MARKER
    remedy = _remedy(checkpoint)
    try:
        listed = json.loads(marker.read_text(encoding="utf-8"))
        files, state = dict(listed["files"]), dict(listed["state"])
        own = _of_list(state, files)
        if listed.get("sha256", own) != own:  # an older release wrote none
            raise ValueError("its content has changed")
    except OSError as error:
        raise CheckpointError(f"{marker}: {error.strerror}; {remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{marker}: damaged ({error}); {remedy}") from error
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {remedy}")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{path}: {size} bytes, {expected['bytes']} were written; {remedy}"
            )
        if _sha256(path) != expected["sha256"]:
            raise CheckpointError(f"{path}: its content has changed (sha256 differs); {remedy}")
    return state


def write_sums(folder: Path) -> None:
    """Write the hashes of a folder's files into it, as `sha256sum * > SHA256SUMS` does."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    text = "".join(f"{_sha256(path)}  {path.name}\n" for path in files)
    (folder / SUMS).write_text(text, encoding="utf-8")


def check_sums(folder: Path, remedy: str) -> None:
    """Compare a folder's files with its SHA256SUMS; do nothing if it has none.

    Errors: `CheckpointError`, which names the file that is missing or changed, and `remedy`.
    """
    sums = folder / SUMS
    if not sums.is_file():
        return
    for line in sums.read_text(encoding="utf-8", errors="replace").splitlines():
        expected, _, name = line.partition(" ")
        path = folder / name.lstrip(" *")
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, and {SUMS} lists it; {remedy}")
        if _sha256(path) != expected:
            raise CheckpointError(f"{path}: its content is not that of {SUMS}; {remedy}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_list(state: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([state, files], sort_keys=True).encode()).hexdigest()


def _remedy(checkpoint: Path) -> str:
    older = [path for path in complete(checkpoint.parent) if path.name < checkpoint.name]
    remove = f"remove the directory {checkpoint}"
    if older:
        return f"{remove} to resume from {older[-1].name}"
    return f"{remove} and start again without --resume: there is no older checkpoint"


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
