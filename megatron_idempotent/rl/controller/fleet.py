"""Generates scored groups with engines: sends requests, scores samples, publishes weights."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.engines import EngineError, EnginePool, Request, RolloutEngine, Sample
from megatron_idempotent.rl.sync import PhaseTimer, SyncFailed, SyncReport, SyncSettings, WeightSync
from megatron_idempotent.rl.sync.weight_sync import ask
from megatron_idempotent.rl.weights import WeightSource

from .protocol import EnginesLost, PoisonedPrompt, RolloutGroup

MakeRequests = Callable[[int, Any], Sequence[Request]]
"""Makes a group's requests, one for each sample, from its id and prompt."""

Score = Callable[[int, Any, Sequence[Sample]], Awaitable[Sequence[float]]]
"""Scores a group: a reward for each sample, given its id, prompt and samples."""


KvScales = Callable[[int], Awaitable[Mapping[str, float] | None]]
"""Makes the scales of FP8 key-value caches, by name, for the version that is published next.

It is called while the policy has that version's weights. None keeps the engines' current scales."""


#: Attempts at a sample before its group goes without it, and the fewest samples of a group; a group
#: with fewer fails.
_SAMPLE_ATTEMPTS, _FEWEST_SAMPLES = 2, 2


class Fleet:
    """Implements `Generator` with engines: samples and scores groups, and publishes weights.

    Engines have version numbers of their own, which only rise; `Fleet` translates the versions of
    samples to the trainer's.

    Example: `fleet = Fleet(engines, source=weights, requests=make_requests, score=score)`.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        source: WeightSource,
        requests: MakeRequests,
        score: Score,
        settings: SyncSettings | None = None,
        deltas: bool = False,
        kv_scales: KvScales | None = None,
        timer: PhaseTimer | None = None,
    ) -> None:
        """Prepare to send requests and weights to the engines; no engine is called yet.

        Args:
            engines: the engines that sample; all of them get the same weights.
            source: reads the policy's weights.
            requests: makes a group's requests; must be a pure function of its arguments.
            score: returns a reward per sample; if it raises, the group is generated again.
            settings: limits of a publish, such as its timeouts.
            deltas: True to send only the elements that changed since the last publish.
            kv_scales: makes a version's scales, for engines whose cache is in FP8.
            timer: measures each phase of a publish; NeMo-RL's `Timer` works.
        """
        self._engines = {engine.name: engine for engine in engines}
        self._source = source
        self._requests = requests
        self._score = score
        self._deltas = deltas
        self._kv_scales = kv_scales
        self._timer = timer
        self._settings = settings or SyncSettings()
        self._sync = WeightSync(engines, settings=self._settings)
        # Why engines get no requests, by name; replaced, never mutated.
        self.quarantined: Mapping[str, str] = {}
        self._pool = EnginePool(engines, sync=self)
        self._engine_version = -1
        # The trainer's version for each engine version. Two publishes may have the same number.
        self._versions: dict[int, int] = {}

    async def generate(self, group_id: int, prompt: Any, *, attempt: int) -> RolloutGroup:
        """Sample all responses to a prompt concurrently, score them, and return them as a group;
        see `Generator.generate`.
        """
        requests = self._requests(group_id, prompt)
        # gather() alone would leave the other tasks running if one raises.
        tasks = [asyncio.ensure_future(self._sample(request)) for request in requests]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        samples = [result for result in results if isinstance(result, Sample)]
        failures = [result for result in results if not isinstance(result, Sample)]
        if len(samples) < min(_FEWEST_SAMPLES, len(requests)):
            raise failures[0]
        return RolloutGroup(
            id=group_id,
            prompt=prompt,
            samples=tuple(samples),
            rewards=tuple(await self._score(group_id, prompt, samples)),
            failed=len(failures),
        )

    async def sample(self, request: Request) -> Sample:
        """Sample one response outside of any group, such as for an evaluation. In the sample, the
        engine's weight versions are replaced by the trainer's numbers for the same weights.

        Raises:
            EnginesLost: no engine is left.
            EngineError: an engine used weights that this run never published.
            Exception: as `EnginePool.generate` raises.
        """
        try:
            sample = await self._pool.generate(request)
        except Exception as error:
            if not self._pool.usable:
                raise EnginesLost(str(error)) from error
            raise
        try:
            versions = tuple([self._versions[version] for version in sample.versions])
        except KeyError as error:
            await self._leave_out_restarted()
            raise EngineError(
                f"request {request.id!r} has tokens of version {error} of an engine, which this "
                "run has not published: the engine was restarted, and the next sync updates it"
            ) from error
        return dataclasses.replace(sample, versions=versions)

    async def _leave_out_restarted(self) -> None:
        """Quarantine the engines that serve a version which this run has not published, such as
        engines that were restarted, until they have taken this run's weights.

        Otherwise every group with a sample from such an engine would be lost, and a sampler that
        waits for all groups of a version would wait for ever.
        """
        healths = await asyncio.gather(
            *(ask(engine, self._settings) for engine in self._engines.values())
        )
        restarted = {
            name: f"it serves version {health.version}, which this run has not published"
            for name, health in zip(self._engines, healths, strict=True)
            if health.version is not None and health.version not in self._versions
        }
        self.quarantined = {**self.quarantined, **restarted}

    async def publish(self, version: int) -> Mapping[str, float]:
        """Send the policy's current weights to all engines as the trainer's `version`, and return
        metrics of the transfer; see `Generator.publish`.

        An engine that fails to take them gets no requests until it takes a later version.
        """
        if self._engine_version < 0:
            # Engines may have served another run before.
            healths = await self._sync.recover()
            self._engine_version = max((health.version or 0) for health in healths.values())
        kv_scales = await self._kv_scales(version) if self._kv_scales is not None else None
        self._engine_version += 1
        # Before the update: tokens may be sampled with it before `update` returns.
        self._versions[self._engine_version] = version
        try:
            report = await self._sync.update(
                self._source,
                self._engine_version,
                deltas=self._deltas,
                kv_scales=kv_scales,
                timer=self._timer,
            )
        except SyncFailed as error:
            self._count_from(error.report)
            raise EnginesLost(str(error)) from error
        finally:
            self.quarantined = self._sync.quarantined
        self._count_from(report)
        # Also engines with older weights, since another one has the newest: a sampler that needs
        # the newest would wait for ever.
        self.quarantined = {
            name: engine.detail
            for name, engine in report.engines.items()
            if engine.outcome != "committed"
        }
        await self._pool.reprobe()
        return {
            "pause_s": report.pause_s,
            "stage_s": report.stage_s,
            "encode_s": report.encode_s,
            "decode_s": report.decode_s,
            "bytes_sent": float(report.bytes_sent),
            "bytes_whole": float(report.bytes_whole),
            "changed": report.elements_changed / max(1, report.elements),
            "engines": float(len(report.named("committed"))),
            "engines_behind": float(len(report.named("behind"))),
            "engines_quarantined": float(len(report.named("quarantined"))),
        }

    def _count_from(self, report: SyncReport) -> None:
        """Set `_engine_version`, the version number of the last update, to the highest version that
        an engine reports, if that is higher.

        An engine that joined later may have served another run, with higher versions.
        """
        served = [engine.version or 0 for engine in report.engines.values()]
        self._engine_version = max(self._engine_version, *served)

    async def recover(self) -> bool:
        """Return True if all engines were lost, and one now responds; see `Generator.recover`."""
        if self._pool.usable:
            return False
        # Only asked, not resumed: a running publish may have paused them.
        settings = self._settings
        healths = await asyncio.gather(
            *(ask(engine, settings) for engine in self._engines.values())
        )
        return any(health.status != "DEAD" for health in healths)

    async def close(self) -> None:
        """Close all engines."""
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    async def _sample(self, request: Request) -> Sample | Exception:
        """Sample one response in up to `_SAMPLE_ATTEMPTS` attempts; return the sample, or the error
        of the last attempt.

        Raises:
            EnginesLost: no engine is left, which fails the whole group.
            PoisonedPrompt: the prompt cannot be served, which fails the whole group.
        """
        failure: Exception | None = None
        for _ in range(_SAMPLE_ATTEMPTS):
            try:
                return await self.sample(request)
            except EnginesLost:
                raise
            except ValueError as error:
                raise PoisonedPrompt(str(error)) from error
            except Exception as error:  # noqa: BLE001 (one sample's error is not the others')
                failure = error
        assert failure is not None
        return failure
