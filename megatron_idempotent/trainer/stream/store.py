"""Checkpoints of an asynchronous run: the ranks' part and the controller's, sealed together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_idempotent.trainer import saved
from megatron_idempotent.trainer.errors import CheckpointError
from megatron_idempotent.trainer.job import Job
from megatron_idempotent.trainer.output import seal_checkpoint
from megatron_idempotent.workers import RankGroup

_MEGATRON, _CONTROLLER = "megatron", "controller.json"


class CheckpointStore:
    """A `controller.Store`: complete checkpoints or none, verified before they are read.

    Example: `state = await CheckpointStore(job, ranks).restore()`.
    """

    def __init__(self, job: Job, ranks: RankGroup) -> None:
        self._directory = job.out / "checkpoints"
        self._config = job.config
        self._ranks = ranks
        # A run that is resumed has started its ranks right before, and nothing has happened yet.
        self._fresh = job.resume_from is not None

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """See `controller.Store.save`. Files are written and hashed in a thread."""
        unfinished = saved.unfinished_path(self._directory, version)
        await asyncio.to_thread(saved.make_empty, unfinished)
        digests = await self._call("save", str(unfinished / _MEGATRON), version)
        await asyncio.to_thread(self._seal, unfinished, version, state, digests[0])

    async def restore(self) -> Mapping[str, Any] | None:
        """See `controller.Store.restore`."""
        found = saved.complete(self._directory)
        state = await asyncio.to_thread(_read, found[-1]) if found else None
        if not self._fresh:
            await self._ranks.start()
        self._fresh = False
        if state is not None:
            await self._call("load", str(found[-1] / _MEGATRON))
        return state

    async def _call(self, method: str, *args: Any) -> list[Any]:
        # Limited: where one rank fails, the others wait for it in a collective.
        limit_s = self._config.controller.call_timeout_s
        return await self._ranks.call(method, *args, timeout_s=limit_s)

    def _seal(self, unfinished: Path, version: int, state: Mapping[str, Any], digest: str) -> None:
        (unfinished / _CONTROLLER).write_text(json.dumps(state), encoding="utf-8")
        seal_checkpoint(self._directory, version, self._config, digest=digest)


def _read(checkpoint: Path) -> Mapping[str, Any]:
    saved.verify(checkpoint)
    path = checkpoint / _CONTROLLER
    if not path.is_file():
        raise CheckpointError(
            f"{path}: missing, so a run with run.mode = sync has written this checkpoint; resume "
            "it with the same mode"
        )
    state: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state
