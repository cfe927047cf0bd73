"""Sends buckets as safetensors files, in a directory that the trainer and the engines share."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import uuid
from collections.abc import Mapping
from typing import Any

from megatron_idempotent.rl.weights.records import Bucket, TensorInfo, UpdateDamaged, WeightUpdate
from megatron_idempotent.rl.weights.safetensors_io import copy_settings, write_index, write_tensors

from .base import Announcement, Receiver, Sender, Session, TransportError
from .layout import BucketLayout, read_tensor

KIND = "disk"


class DiskSender(Sender):
    """Writes each bucket to a file under a hidden name, and renames the file when it is complete.

    Each update has a folder of its own, which `close()` removes. For an engine that loads a whole
    checkpoint from disk, `like` and `finish()` make that folder one:

        sender = DiskSender("/shared/weights", like="/models/Qwen3-0.6B", keep=True)
        await sender.open(update)
        for bucket in buckets:
            await sender.announce(bucket)
        folder = await sender.finish()        # config.json, tokenizer, weights, index
        await sender.close()
    """

    kind = KIND

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        like: str | os.PathLike[str] | None = None,
        keep: bool = False,
    ) -> None:
        """
        Args:
            directory: a directory that both ends see under this name; it is made if absent.
            like: a Hugging Face checkpoint, whose files other than weights `finish()` copies.
                Files then stay until `close()`, also those of buckets that were released.
            keep: True has `close()` leave a folder that was finished.

        Errors: `ValueError` for a `like` without config.json, or `keep` without `like`.
        """
        super().__init__()
        self._directory = pathlib.Path(directory).absolute()
        self._like = None if like is None else pathlib.Path(like)
        self._keep = keep
        if self._like is not None and not (self._like / "config.json").is_file():
            raise ValueError(
                f"DiskSender() got like={str(like)!r}, which has no config.json; give the folder "
                "of a Hugging Face checkpoint"
            )
        if keep and like is None:
            raise ValueError(
                "DiskSender() got keep=True and like=None; only finished folders stay, which need "
                "like=a checkpoint's folder"
            )

    def _begin(self, update: WeightUpdate) -> tuple[_Folder, Mapping[str, Any]]:
        # Random, because an update may be sent again, and to several engines at once.
        name = f"version-{update.version:08d}-{uuid.uuid4().hex[:8]}"
        path = self._directory / name
        try:
            path.mkdir(parents=True)
        except OSError as error:
            raise TransportError(f"cannot make {path} for update {update.id!r}: {error}") from error
        return _Folder(path, like=self._like, keep=self._keep), {"folder": str(path)}

    async def finish(self) -> pathlib.Path:
        """Make the open update's folder a complete Hugging Face checkpoint; return its path.

        Call it after all buckets have been announced. The index is written last: a folder with one
        is complete. Errors: `TransportError` without `like`, or if the folder cannot be written.
        """
        session = self._opened("finish")
        assert isinstance(session, _Folder)
        return await self._call(session.finish)


class _Folder(Session):
    def __init__(self, path: pathlib.Path, *, like: pathlib.Path | None, keep: bool) -> None:
        self._path, self._like, self._keep = path, like, keep
        self._files: dict[str, BucketLayout] = {}
        self._finished = False

    def announce(self, layout: BucketLayout, bucket: Bucket) -> Mapping[str, Any]:
        name = f"model-{layout.index:05d}.safetensors"
        size = self._write(name, layout, bucket)
        self._files[name] = layout
        return {"file": name, "file_bytes": size}

    def _write(self, name: str, layout: BucketLayout, bucket: Bucket) -> int:
        # They say what the file is without us.
        metadata = {
            "update": layout.update_id,
            "bucket": str(layout.index),
            "checksums": json.dumps(layout.as_json()["tensors"]),
        }
        partial = self._path / f".{name}.partial"
        try:
            size = write_tensors(partial, bucket.tensors, metadata, durable=self._keep)
            os.replace(partial, self._path / name)
        except Exception as error:
            partial.unlink(missing_ok=True)
            raise TransportError(
                f"update {layout.update_id}: bucket {layout.index} ({bucket.nbytes / 1e6:.1f} MB) "
                f"cannot be written to {self._path}: {error}"
            ) from error
        return size

    def release(self, index: int) -> None:
        if self._like is None:
            (self._path / f"model-{index:05d}.safetensors").unlink(missing_ok=True)

    def finish(self) -> pathlib.Path:
        if self._like is None:
            raise TransportError("finish() needs DiskSender(..., like=a checkpoint's folder)")
        try:
            copy_settings(self._like, self._path)
            infos = {info: file for file, each in self._files.items() for info in each.tensors}
            total = sum(info.nbytes for info in infos)
            files = {info.name: file for info, file in infos.items()}
            write_index(self._path, files, {"total_size": total})
        except OSError as error:
            raise TransportError(f"cannot finish {self._path}: {error}") from error
        self._finished = True
        return self._path

    def close(self) -> None:
        if self._finished and self._keep:
            return
        shutil.rmtree(self._path)


class DiskReceiver(Receiver):
    """Reads what a `DiskSender` writes; needs no safetensors library."""

    def __init__(self, opened: Announcement) -> None:
        super().__init__(opened)
        self._folder = pathlib.Path(opened["folder"])

    def _receive(self, layout: BucketLayout, announced: Announcement) -> Bucket:
        path = self._folder / pathlib.Path(str(announced.get("file"))).name
        try:
            with open(path, "rb") as file:
                size, announced_size = os.fstat(file.fileno()).st_size, announced.get("file_bytes")
                if size != announced_size:
                    raise EOFError(f"it has {size} bytes, {announced_size} were announced")
                offsets = _offsets(file.fileno(), layout.tensors)
                tensors = {
                    info.name: read_tensor(file.fileno(), info, offsets[info.name])
                    for info in layout.tensors
                }
        except FileNotFoundError as error:
            raise UpdateDamaged(
                f"update {self._update_id}: {path} is absent; does the trainer share that "
                "directory with this worker, and is the update still open?"
            ) from error
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise UpdateDamaged(
                f"update {self._update_id}: {path} cannot be read: {error}; send the update again"
            ) from error
        return layout.bucket(tensors)


def _offsets(descriptor: int, tensors: tuple[TensorInfo, ...]) -> dict[str, int]:
    """Return the offset of each tensor in a safetensors file. Errors: `ValueError`, `EOFError`."""
    length = int.from_bytes(_exactly(descriptor, 8, 0), "little")
    header = json.loads(_exactly(descriptor, length, 8))
    offsets = {}
    for info in tensors:
        begin, end = header[info.name]["data_offsets"]
        if header[info.name]["shape"] != list(info.shape) or end - begin != info.nbytes:
            raise ValueError(f"{info.name} is {header[info.name]}, announced as {info.describe()}")
        offsets[info.name] = 8 + length + begin
    return offsets


def _exactly(descriptor: int, count: int, offset: int) -> bytes:
    if count > os.fstat(descriptor).st_size:
        raise EOFError(f"its header claims {count} bytes")
    found = os.pread(descriptor, count, offset)
    if len(found) < count:
        raise EOFError(f"it ends within its header, at byte {offset + len(found)}")
    return found
