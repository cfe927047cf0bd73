"""Brings weights to a server, which loads them from complete folders of safetensors."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from megatron_idempotent.rl.engines.protocol import (
    EngineError,
    EngineTimeout,
    EngineUnsupported,
    refuse_kv_scales,
)
from megatron_idempotent.rl.weights import Bucket, Staging, TensorInfo, UpdateRefused, WeightUpdate
from megatron_idempotent.rl.weights.safetensors_io import INDEX, flush, write_index, write_tensors

from .api import NEWEST_READ, Api, is_done
from .facts import Facts


def read_vocabulary(checkpoint: Path) -> int:
    """Reads the vocabulary's size. Errors: `ValueError` if config.json does not say it."""
    config = json.loads((checkpoint / "config.json").read_text())
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise ValueError(
            f"{checkpoint / 'config.json'} names no vocab_size; give the folder that the server "
            "was started with"
        )
    return size


class UpdateFolder:
    """Writes one update to a folder, and checks it as it comes; nothing of it stays in memory.

    Example:
        folder = UpdateFolder(directory, update, expected=infos, checkpoint=checkpoint)
        for bucket in buckets:
            folder.add(bucket)
        path = folder.complete()
    """

    def __init__(
        self,
        directory: Path,
        update: WeightUpdate,
        *,
        expected: tuple[TensorInfo, ...],
        checkpoint: Path,
    ) -> None:
        self.update = update
        tag = hashlib.sha256(update.id.encode()).hexdigest()[:12]
        self.path = directory / f"v{update.version}-{tag}"
        # A dot: no glob of checkpoints finds what is not complete.
        self._partial = directory / f".{self.path.name}.partial"
        self._checks = Staging(update, expected=expected, keep=False)
        self._checkpoint = checkpoint
        self._files: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self.discard()
        self._partial.mkdir(parents=True)

    def add(self, bucket: Bucket) -> None:
        """Check a bucket and write it. Errors: as `Staging.add`; `OSError`."""
        self._checks.add(bucket)
        if not bucket.tensors:
            return
        file = f"model-{bucket.index:05d}.safetensors"
        self._sizes[file] = write_tensors(self._partial / file, bucket.tensors, durable=True)
        self._files.update(dict.fromkeys(bucket.tensors, file))

    def complete(self) -> Path:
        """Make the folder visible, whole, and return it. Errors: as `Staging.complete`."""
        self._checks.complete()
        for name in ("config.json", "generation_config.json"):
            if (self._checkpoint / name).is_file():
                shutil.copyfile(self._checkpoint / name, self._partial / name)
        write_index(self._partial, self._files, {"file_sizes": self._sizes})
        os.replace(self._partial, self.path)
        flush(self.path.parent)
        return self.path

    def discard(self) -> None:
        """Remove the folder, complete or not. Twice: no-op."""
        shutil.rmtree(self._partial, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)


def check_whole(path: Path, engine: str) -> None:
    """Refuse a folder that lost something since it was written.

    SGLang does not check: it loads the tensors that it finds and leaves the others as they were.
    Errors: `EngineError`.
    """
    try:
        index: Mapping[str, Any] = json.loads((path / INDEX).read_text())
        sizes = {file: (path / file).stat().st_size for file in index["metadata"]["file_sizes"]}
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(
            f"engine {engine}: the staged folder {path} is not whole any more: {error}; stage the "
            "update again"
        ) from error
    if sizes != index["metadata"]["file_sizes"]:
        raise EngineError(
            f"engine {engine}: files in {path} have sizes {sizes}, they were written with "
            f"{index['metadata']['file_sizes']}; stage the update again"
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Describes a state of the weights: these folders, loaded in order, give this version.

    Example: `Weights(update_id="run/3", version=3, folders=("/shared/v3-1f…",))`.
    """

    update_id: str
    """The id of the update; empty for the weights that the server was started with."""
    version: int
    folders: tuple[str, ...]
    """The folders as the server sees them: a complete one, then updates that build on it."""


class DiskUpdates:
    """Stages, commits and takes back updates. The caller sees to it that the server is paused.

    `dirty` says why the weights may be of more than one version; it is empty if they are of one.
    """

    def __init__(
        self,
        api: Api,
        facts: Facts,
        *,
        version: int,
        directory: Path,
        server_directory: str,
        checkpoint: Path,
        expected: tuple[TensorInfo, ...],
        load_timeout_s: float,
    ) -> None:
        self.dirty = ""
        self.served = Weights(update_id="", version=version, folders=(facts.model_path,))
        self._api = api
        self._facts = facts
        self._directory = directory
        self._server_directory = server_directory
        self._checkpoint = checkpoint
        self._expected = expected
        self._load_timeout_s = load_timeout_s
        self._staged: Weights | None = None
        self._staging = False
        self._half: Weights | None = None  # what a load that has not ended well was to give
        self._in_flight = False  # its request may still be at work in the server

    async def begin(self, update: WeightUpdate) -> UpdateFolder | None:
        """Begin to stage an update, and return its folder; None if the update is served already.

        No other update is staged from here on. Errors: those of `RolloutEngine.stage`.
        """
        await self.settle(self._load_timeout_s)
        if update.id == self.served.update_id:
            return None
        refuse_kv_scales(self._api.name, update, "SGLang reads them from a file when it starts")
        self._check_turn(update)
        self._forget_staged()
        folder = UpdateFolder(
            self._directory, update, expected=self._expected, checkpoint=self._checkpoint
        )
        self._staging = True
        return folder

    async def fill(self, folder: UpdateFolder, buckets: AsyncIterator[Bucket]) -> None:
        """Write an update's buckets to the folder of `begin`; after that the update is staged."""
        update = folder.update
        try:
            async for bucket in buckets:
                await asyncio.to_thread(folder.add, bucket)
            path = await asyncio.to_thread(folder.complete)
            base = self.served.folders if update.base_version is not None else ()
            self._staged = Weights(
                update_id=update.id,
                version=update.version,
                folders=(*base, f"{self._server_directory}/{path.name}"),
            )
        except BaseException:
            folder.discard()
            raise
        finally:
            self._staging = False

    def has(self, update_id: str) -> bool:
        """Returns whether that update is served in full."""
        return update_id == self.served.update_id and not self.dirty

    async def commit(self, update_id: str) -> int:
        """See `RolloutEngine.commit`. The id of the served update loads lost weights again."""
        await self.settle(self._load_timeout_s)
        if self.has(update_id):
            return self.served.version
        target = self._staged if self._staged and self._staged.update_id == update_id else None
        if target is None and update_id == self.served.update_id:
            target = self.served
        if target is None:
            staged = self._staged.update_id if self._staged else "nothing"
            raise EngineError(
                f"engine {self._api.name}: {update_id} is not staged ({staged} is), and was not "
                f"the last that was committed ({self.served.update_id or 'none'}); stage it"
            )
        await self._load(target)
        return target.version

    async def rollback(self, update_id: str) -> None:
        """See `RolloutEngine.rollback`: the folders of the version before are loaded again."""
        await self.settle(self._load_timeout_s)
        if self._staged is None or self._staged.update_id != update_id:
            return
        if self._half is not None:
            await self._load(self.served)
        self._forget_staged()

    async def settle(self, timeout_s: float) -> None:
        """Finds out how a load ended whose answer did not come.

        The server takes one call after the other, so it answers another call after the load. Two
        loads at once are never sent: SGLang dies of the second one's answer.
        Errors: `EngineTimeout` while the load is still at work; `EngineDead`.
        """
        if not self._in_flight:
            return
        await self._api.done("GET", "/server_info", timeout_s=timeout_s)
        self._in_flight = False
        target = self._half
        if target is not None and await self._has(target):
            self._now_serves(target)

    def lost(self, reason: str) -> None:
        """Note that the server has lost its weights, which have to be loaded again."""
        self.dirty = reason
        self._half = self._half or self.served

    def close(self) -> None:
        """Remove what is staged; folders that the server has loaded stay."""
        self._forget_staged()

    async def _load(self, target: Weights) -> None:
        """Load the folders that the server does not serve yet; if loading fails, it is dirty."""
        folders = target.folders
        if not self.dirty and folders[:-1] == self.served.folders:
            folders = folders[-1:]  # an update upon what is served
        for folder in folders:
            if local := self._local(folder):
                await asyncio.to_thread(check_whole, local, self._api.name)
        # By itself, and not as part of the load: up to 0.5.21 a load that cannot flush takes the
        # server with it, and from then on it reports a failure after the weights have changed.
        flushed = await self._api.call("POST", "/flush_cache")
        if not is_done(flushed):
            raise EngineError(
                f"engine {self._api.name}: its cache cannot be flushed: {flushed.message}; before "
                f'0.5.21 (this is {self._facts.release}) that takes a pause with mode="abort" or '
                '"wait", which leaves no request waiting'
            )
        self._half = target
        self.dirty = f"version {target.version} was not loaded to its end, as far as is known"
        self._in_flight = True
        for folder in folders:
            await self._load_one(folder, target, last=folder == folders[-1])
        self._in_flight = False
        if not await self._has(target):
            self.dirty = f"the server does not say that it has version {target.version}"
            raise EngineError(f"engine {self._api.name}: {self.dirty}; commit again, or roll back")
        self._now_serves(target)

    async def _load_one(self, folder: str, target: Weights, *, last: bool) -> None:
        body = {
            "model_path": folder,
            "load_format": "auto",
            "flush_cache": False,
            "abort_all_requests": False,
            # Only with the last one: a name would be given to weights of two versions.
            "weight_version": str(target.version) if last else None,
        }
        path = "/update_weights_from_disk"
        try:
            answer = await self._api.call("POST", path, body, timeout_s=self._load_timeout_s)
        except EngineTimeout as error:
            self.dirty = str(error)
            raise
        if not is_done(answer):
            self._in_flight = False
            # It says that it rolled back. It loads the new folder again, so it may have not.
            self.dirty = f"{path} failed with status {answer.status}: {answer.message}"
            raise EngineError(f"engine {self._api.name}: {self.dirty}; commit again, or roll back")

    async def _has(self, target: Weights) -> bool:
        served = await self._api.done("GET", "/model_info")
        return (served.get("weight_version"), served.get("model_path")) == (
            str(target.version),
            target.folders[-1],
        )

    def _now_serves(self, target: Weights) -> None:
        dropped = set(self.served.folders) - set(target.folders)
        self.served, self.dirty, self._half = target, "", None
        if self._staged == target:
            self._staged = None
        for folder in dropped:
            self._remove(folder)

    def _check_turn(self, update: WeightUpdate) -> None:
        name = self._api.name
        if self._staging:
            raise UpdateRefused(
                f"engine {name}: {update.id} came while another update is being staged; wait for it"
            )
        if update.version <= self.served.version:
            raise UpdateRefused(
                f"engine {name}: {update.id} brings version {update.version}, the engine has "
                f"{self.served.version}; versions only go up"
            )
        if update.base_version not in (None, self.served.version):
            raise UpdateRefused(
                f"engine {name}: {update.id} builds on version {update.base_version}, the engine "
                f"has {self.served.version}; send all tensors"
            )
        if update.base_version is not None and self._facts.quantization:
            raise EngineUnsupported(
                f"engine {name}: {update.id} brings some tensors only, and the server packs its "
                f"weights ({self._facts.quantization}), for which SGLang {NEWEST_READ} needs all; "
                "send all tensors"
            )

    def _forget_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            self._remove(staged.folders[-1])

    def _local(self, folder: str) -> Path | None:
        """Returns a server's folder as this process sees it; None if it was not written here."""
        parent, _, name = folder.rpartition("/")
        return self._directory / name if parent == self._server_directory else None

    def _remove(self, folder: str) -> None:
        if local := self._local(folder):
            shutil.rmtree(local, ignore_errors=True)
