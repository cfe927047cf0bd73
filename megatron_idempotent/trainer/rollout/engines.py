"""The engines of a run, on the ranks of the trainer: who samples, and who brings them weights.

Each rank has an engine of its own, or rank 0 speaks with servers for all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_idempotent.rollout import EnginePool, Request, RolloutEngine, Sample
from megatron_idempotent.sync import SyncReport, SyncSettings, WeightSync, follow
from megatron_idempotent.weights import WeightSource

Result = TypeVar("Result")


class Engines:
    """Samples of this rank's requests, and new weights for what samples them.

    Example: `engines.publish(version=0); samples = engines.generate(requests)`.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        source: WeightSource,
        *,
        shared: bool,
        settings: SyncSettings,
        changed_only: bool,
        request_timeout_s: float,
    ) -> None:
        """
        Args:
            engines: those that this rank speaks with; where they are shared, rank 0's alone.
            source: the trainer's weights, for them.
            shared: whether rank 0 samples for all ranks.
            settings: limits of an update.
            changed_only: whether an update leaves out what has not changed.
            request_timeout_s: for one response.
        """
        # One loop for the whole run: connections and locks of engines belong to theirs.
        self._runner = asyncio.Runner()
        self._engines = tuple(engines)
        self._source = source
        self._shared = shared
        self._settings = settings
        self._changed_only = changed_only
        self._request_timeout_s = request_timeout_s
        self._sync = WeightSync(engines, settings=settings) if engines else None
        self._pool = EnginePool(engines, sync=self._sync) if engines else None
        self._first_version: int | None = None

    def publish(self, version: int) -> SyncReport | None:
        """Bring the current weights to all engines. Collective where they are shared.

        Returns the report on ranks that have engines. Errors: those of `WeightSync.update`; the
        engines that it could not update or quarantined are left out of sampling.
        """
        if self._sync is None:
            follow(self._source, settings=self._settings)
            return None
        if self._first_version is None:
            self._first_version = self._run(self._above_all()) - version
        return self._run(self._bring(self._first_version + version))

    def generate(self, requests: Sequence[Request]) -> Sequence[Sample]:
        """Samples in the order of the requests. Collective where engines are shared."""
        if not self._shared:
            return self._generate(requests)
        # Small objects of our own; the ranks are processes of one program.
        asked: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(tuple(requests), asked if dist.get_rank() == 0 else None)
        answers: list[Any] = []
        if dist.get_rank() == 0:
            samples = iter(self._generate([request for part in asked for request in part]))
            answers = [[next(samples) for _ in part] for part in asked]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, answers or None)
        found: Sequence[Sample] = mine[0]
        return found

    def close(self) -> None:
        """Close all engines and the loop that they run in."""
        try:
            for engine in self._engines:
                self._run(engine.close())
        finally:
            self._runner.close()

    def _generate(self, requests: Sequence[Request]) -> list[Sample]:
        pool, first = self._pool, self._first_version
        assert pool is not None
        assert first is not None, "publish() comes before generate()"

        async def one(request: Request) -> Sample:
            async with asyncio.timeout(self._request_timeout_s):
                sample = await pool.generate(request)
            versions = tuple(version - first for version in sample.versions)
            return dataclasses.replace(sample, versions=versions)

        async def all_of_them() -> list[Sample]:
            return await asyncio.gather(*map(one, requests))

        return self._run(all_of_them())

    async def _bring(self, version: int) -> SyncReport:
        assert self._sync is not None
        assert self._pool is not None
        report = await self._sync.update(self._source, version, changed_only=self._changed_only)
        await self._pool.look_again()
        return report

    async def _above_all(self) -> int:
        """The version of the first update: an engine may have served another run before."""
        assert self._sync is not None
        healths = await self._sync.recover()
        return 1 + max((health.version or 0) for health in healths.values())

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(work)
