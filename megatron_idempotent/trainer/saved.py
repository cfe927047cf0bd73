"""Checkpoint directories: complete or not at all, and checked before they are read.

A checkpoint is written beside its final name, listed file by file in `COMPLETE.json`, and renamed.
Whatever lacks that list, or differs from it, is not a checkpoint. Free of torch and Megatron.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from megatron_idempotent.trainer.errors import CheckpointError

MARKER = "COMPLETE.json"
_NAME = "rollout-{:06d}"
_UNFINISHED = ".unfinished"


def path_for(directory: Path, rollouts: int) -> Path:
    """Where the checkpoint behind so many rollouts lies, or will lie."""
    return directory / _NAME.format(rollouts)


def rollouts_of(checkpoint: Path) -> int:
    """How many rollouts a checkpoint is behind, by its name; optimizer steps of an async run."""
    return int(checkpoint.name.rpartition("-")[2])


def unfinished_path(directory: Path, rollouts: int) -> Path:
    """Where it is written: emptied first, since a run may have died there."""
    path = path_for(directory, rollouts)
    return path.with_name(path.name + _UNFINISHED)


def make_empty(unfinished: Path) -> None:
    """Make the directory, without what a run that died has left in it."""
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def seal(unfinished: Path, final: Path, state: dict[str, Any]) -> None:
    """List all files with their sizes and hashes, then give the directory its final name.

    `state` is what `read_state` gives back. The data is on disk before the list is, and the list
    before the rename: a power cut leaves the old state or the new one.
    """
    files = {}
    for path in sorted(path for path in unfinished.rglob("*") if path.is_file()):
        _flush_to_disk(path)
        content = path.read_bytes()
        files[path.relative_to(unfinished).as_posix()] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    marker = unfinished / MARKER
    marker.write_text(json.dumps({"state": state, "files": files}, indent=1), encoding="utf-8")
    _flush_to_disk(marker)
    if final.exists():  # written by an interrupted run behind the checkpoint this one resumed from
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
    except OSError as error:
        raise CheckpointError(f"{marker}: {error.strerror}; {remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{marker}: damaged ({error}); {remedy}") from error
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; {remedy}")
        content = path.read_bytes()
        if len(content) != expected["bytes"]:
            raise CheckpointError(
                f"{path}: {len(content)} bytes, {expected['bytes']} were written; {remedy}"
            )
        if hashlib.sha256(content).hexdigest() != expected["sha256"]:
            raise CheckpointError(f"{path}: its content has changed (sha256 differs); {remedy}")
    return state


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
