"""Checkpoint directories: complete or not at all, and checked before they are read.

A checkpoint is written beside its final name, listed file by file in `COMPLETE.json`, and renamed.
Whatever lacks that list, or differs from it, is not a checkpoint. Folders of Hugging Face
checkpoints have their hashes in `SHA256SUMS`. Files are hashed piece by piece. Free of torch and
Megatron.
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
    """The directory of the checkpoint after so many rollouts, there or not."""
    return directory / _NAME.format(rollouts)


def rollouts_of(checkpoint: Path) -> int:
    """Reads from a checkpoint's name the rollouts before it; optimizer steps of an async run."""
    return int(checkpoint.name.rpartition("-")[2])


def unfinished_path(directory: Path, rollouts: int) -> Path:
    """Returns a checkpoint's folder while it is written; a run may have died there: empty it."""
    path = path_for(directory, rollouts)
    return path.with_name(path.name + _UNFINISHED)


def make_empty(unfinished: Path) -> None:
    """Make the directory, without what a run that died has left in it."""
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def seal(unfinished: Path, final: Path, state: dict[str, Any]) -> None:
    """List all files with their sizes and hashes, then give the directory its final name.

    `state` is what `verify` gives back. The data is on disk before the list is, and the list
    before the rename: a power cut leaves the old state or the new one.
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
    """The complete checkpoints in a directory, oldest first."""
    return sorted(path.parent for path in directory.glob(f"rollout-*[0-9]/{MARKER}"))


def keep_newest(directory: Path, count: int) -> None:
    """Remove all but the newest `count` complete checkpoints, the marker first of all files."""
    for path in complete(directory)[:-count]:
        (path / MARKER).unlink()
        shutil.rmtree(path)


def verify(checkpoint: Path) -> dict[str, Any]:
    """Compare every file with the list; returns the state that was sealed with it.

    Errors: `CheckpointError` naming the file that is missing, cut short or changed.
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
    """Leave the hashes of a folder's files in it, as `sha256sum * > SHA256SUMS` does."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    text = "".join(f"{_sha256(path)}  {path.name}\n" for path in files)
    (folder / SUMS).write_text(text, encoding="utf-8")


def check_sums(folder: Path, remedy: str) -> None:
    """Compare a folder's files with its SHA256SUMS, if it has any.

    Errors: `CheckpointError` naming the file that is missing or changed, and the remedy.
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
