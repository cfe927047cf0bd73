"""Makes scored groups with engines: sends requests, gathers samples, and publishes new weights."""

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

It is called while the policy has that version's weights, and returns None to keep the scales that
engines have."""


#: Attempts at a sample before it is left out of its group, and the fewest samples of a group: one
#: with fewer is tried again as a whole.
_SAMPLE_ATTEMPTS, _FEWEST_SAMPLES = 2, 2


class Fleet:
    """Implements `Generator` with engines: draws and scores groups, and publishes weights.

    Engines count versions of their own, which only rise; `Fleet` translates the versions of samples
    into the trainer's.
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
        """
        Args:
            engines: the engines that sample; all of them get the same weights.
            source: reads the policy's weights.
            requests: makes a group's requests; its result may depend on its arguments alone.
            score: gives each sample its reward; if it raises, the group is tried again.
            settings: limits of a publish, such as its timeouts.
            deltas: True to send only the elements that changed since the last publish.
            kv_scales: makes a version's scales, for engines whose cache is in FP8.
            timer: is told of each phase of a publish; NeMo-RL's `Timer` is one.
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
        # Engines that get no requests, by name, and why; a new mapping whenever it changes.
        self.quarantined: Mapping[str, str] = {}
        self._pool = EnginePool(engines, sync=self)
        self._engine_version = -1
        # What the engines' versions are to the trainer. Two publishes may carry the same number.
        self._versions: dict[int, int] = {}

    async def generate(self, group_id: int, prompt: Any, *, attempt: int) -> RolloutGroup:
        """Draw all samples of a prompt side by side, and score them; see `Generator.generate`."""
        requests = self._requests(group_id, prompt)
        # Not gather() by itself: what is left running when one of them raises would go on.
        tasks = [asyncio.ensure_future(self._sample(request)) for request in requests]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        samples = [each for each in found if isinstance(each, Sample)]
        failures = [each for each in found if not isinstance(each, Sample)]
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
        """Draw one response that is part of no group, such as for an evaluation.

        Its versions are the trainer's. Errors: those of `EnginePool.generate`; `EnginesLost` if no
        engine is left; `EngineError` if an engine answers with weights that this run never sent.
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
                f"request {request.id!r} came back with version {error} of an engine, which this "
                "run has not published: it was started again, and gets weights with the next sync"
            ) from error
        return dataclasses.replace(sample, versions=versions)

    async def _leave_out_restarted(self) -> None:
        """Send nothing to engines that serve weights of before this run, until they get ours.

        Groups of which one takes a part would all be lost, and a sampler that waits for all groups
        of a version would wait for ever.
        """
        healths = await asyncio.gather(
            *(ask(each, self._settings) for each in self._engines.values())
        )
        restarted = {
            name: f"it serves version {health.version}, which this run has not published"
            for name, health in zip(self._engines, healths, strict=True)
            if health.version is not None and health.version not in self._versions
        }
        self.quarantined = {**self.quarantined, **restarted}

    async def publish(self, version: int) -> Mapping[str, float]:
        """Bring the policy's weights to all engines; see `Generator.publish`.

        An engine that does not take them gets no requests until it takes a later version.
        """
        if self._engine_version < 0:
            # Engines may have served another run before.
            healths = await self._sync.recover()
            self._engine_version = max((each.version or 0) for each in healths.values())
        kv_scales = await self._kv_scales(version) if self._kv_scales is not None else None
        self._engine_version += 1
        # Before the update: tokens may be drawn with it before it returns.
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
        # Those that serve older weights too, as one that does not is there: a sampler that wants
        # the newest would wait for ever.
        self.quarantined = {
            name: found.detail
            for name, found in report.engines.items()
            if found.outcome != "committed"
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
        """Raise our count of versions to the highest that an engine reports.

        An engine that was not there at first may have served another run, with higher versions.
        """
        served = [found.version or 0 for found in report.engines.values()]
        self._engine_version = max(self._engine_version, *served)

    async def recover(self) -> bool:
        """Return whether an engine answers again after all were lost; see `Generator.recover`."""
        if self._pool.usable:
            return False
        # Asked, and not resumed: a publish may be under way that has paused them.
        settings = self._settings
        healths = await asyncio.gather(*(ask(each, settings) for each in self._engines.values()))
        return any(health.status != "DEAD" for health in healths)

    async def close(self) -> None:
        """Close all engines."""
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    async def _sample(self, request: Request) -> Sample | Exception:
        """Draw a sample in up to `_SAMPLE_ATTEMPTS`; return it, or the last attempt's error.

        Errors: `EnginesLost` and `PoisonedPrompt`, which concern the whole group.
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
