"""Sends buckets as safetensors files, in a directory that trainer and engines share."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Mapping
from typing import Any

from megatron_idempotent.json_text import parse_json
from megatron_idempotent.rl.weights.records import (
    Bucket,
    TensorInfo,
    WeightUpdate,
    field,
)
from megatron_idempotent.rl.weights.safetensors_io import write_tensors

from .base import Announcement, Receiver, Sender, Session, TransportError, opened_field
from .layout import REMEDY, BucketLayout, read_bucket

KIND = "disk"
#: The lock file in the folder of an update.
LOCK = ".megatron-idempotent.lock"


class DiskSender(Sender):
    """Sends each bucket as a safetensors file in a directory that trainer and workers share. A file
    gets its visible name once it is complete.

    Each update has its own folder, which `close()` removes. `open()` also removes the folders of
    dead trainers, whose locks are free.
    """

    kind = KIND

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Keep the path of the shared directory; `open()` makes a folder in it for each update.

        Args:
            directory: a directory with the same path for both ends; created if missing.
        """
        super().__init__()
        self._directory = pathlib.Path(directory).absolute()

    def _begin(self, update: WeightUpdate) -> tuple[_Folder, Mapping[str, Any]]:
        remove_stale_folders(self._directory)
        # Random, because an update may be sent again, and to several engines at once.
        name = f"version-{update.version:08d}-{uuid.uuid4().hex[:8]}"
        path, draft = self._directory / name, self._directory / f".{name}"
        try:
            draft.mkdir(parents=True)
            lock = _lock(draft / LOCK)
            draft.rename(path)  # so that every folder has its lock from the start
        except OSError as error:
            raise TransportError(f"cannot make {path} for update {update.id!r}: {error}") from error
        return _Folder(path, lock), {"folder": str(path)}


def remove_stale_folders(directory: pathlib.Path) -> None:
    """Remove the folders of updates whose sender has died, on this or another machine. A sender
    holds a lock on its folder's lock file, and has died if the lock is free.

    Folders of live senders, and folders without a lock file, are kept.
    """
    for lock in directory.glob(f"version-*/{LOCK}"):
        try:
            descriptor = os.open(lock, os.O_RDWR)
        except OSError:
            continue  # another user's, or removed meanwhile
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        finally:
            os.close(descriptor)  # before the removal: NFS keeps open files
        shutil.rmtree(lock.parent, ignore_errors=True)


def _lock(path: pathlib.Path) -> int:
    """Create a file and lock it; return the file descriptor, whose closing releases the lock. If
    the file system has no locks, remove the file, and return the descriptor nevertheless.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: leftovers stay
        path.unlink()
    return descriptor


class _Folder(Session):
    def __init__(self, path: pathlib.Path, lock: int) -> None:
        self._path, self._lock = path, lock

    def announce(self, layout: BucketLayout, bucket: Bucket) -> Mapping[str, Any]:
        name = _file_of(layout.index)
        # Metadata that describes the file on its own.
        metadata = {
            "update": layout.update_id,
            "bucket": str(layout.index),
            "checksums": json.dumps(layout.as_json()["tensors"]),
        }
        partial = self._path / f".{name}.partial"
        try:
            size = write_tensors(partial, bucket.tensors, metadata, durable=False)
            os.replace(partial, self._path / name)
        except Exception as error:
            partial.unlink(missing_ok=True)
            raise TransportError(
                f"update {layout.update_id}: bucket {layout.index} ({bucket.nbytes / 1e6:.1f} MB) "
                f"cannot be written to {self._path}: {error}"
            ) from error
        return {"file": name, "file_bytes": size}

    def release(self, index: int) -> None:
        (self._path / _file_of(index)).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._lock)
        with contextlib.suppress(FileNotFoundError):  # another sender may have removed it
            shutil.rmtree(self._path)


def _file_of(index: int) -> str:
    return f"model-{index:05d}.safetensors"


class DiskReceiver(Receiver):
    """Reads in a worker the safetensors files that a `DiskSender` wrote, without the safetensors
    library.
    """

    def __init__(self, opened: Announcement) -> None:
        super().__init__(opened)
        self._folder = pathlib.Path(opened_field(opened, "folder", str))

    def _receive(self, layout: BucketLayout, announced: Announcement) -> Bucket:
        subject = f"update {self._update_id}: bucket {layout.index}"
        name: str = field(announced, "file", str, subject, REMEDY)
        return read_bucket(
            self._folder / pathlib.Path(name).name,
            layout,
            file_bytes=field(announced, "file_bytes", int, subject, REMEDY),
            offsets_in=lambda descriptor: _offsets(descriptor, layout.tensors),
        )


def _offsets(descriptor: int, tensors: tuple[TensorInfo, ...]) -> list[int]:
    """Check the header of a safetensors file against the announced tensors, and return each
    tensor's offset in the file.

    Raises:
        ValueError: the header differs from the announcement.
        EOFError: the file is too short.
    """
    length = int.from_bytes(_exactly(descriptor, 8, 0), "little")
    header = parse_json(_exactly(descriptor, length, 8))
    offsets = []
    for info in tensors:
        begin, end = header[info.name]["data_offsets"]
        if header[info.name]["shape"] != list(info.shape) or end - begin != info.nbytes:
            raise ValueError(f"{info.name} is {header[info.name]}, announced as {info.describe()}")
        offsets.append(8 + length + begin)
    return offsets


def _exactly(descriptor: int, count: int, offset: int) -> bytes:
    if count > os.fstat(descriptor).st_size:
        raise EOFError(f"its header claims {count} bytes")
    content = os.pread(descriptor, count, offset)
    if len(content) < count:
        raise EOFError(f"it ends within its header, at byte {offset + len(content)}")
    return content
