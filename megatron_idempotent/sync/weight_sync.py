"""New weights for all engines, in the order that cannot strand one of them.

Stage on all, pause, commit, verify, stamp, resume. An engine that fails on the way goes back to the
weights that it had, or is quarantined and named; the others go on.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence

from megatron_idempotent.rollout import EngineHealth, RolloutEngine
from megatron_idempotent.weights import WeightSource, WeightUpdate

from .one_update import OneUpdate, Stamp
from .records import EngineOutcome, SyncError, SyncFailed, SyncReport, SyncSettings
from .sent import Sent
from .settle import ask, given_up, resume


class WeightSync:
    """Brings updates to engines, on the trainer's rank 0; its other ranks `follow`.

    Example:
        sync = WeightSync(engines, stamp=lambda version, names: served.append(version))
        report = await sync.update(source, version=12)
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        settings: SyncSettings | None = None,
        stamp: Stamp | None = None,
    ) -> None:
        """
        Args:
            engines: all that are to serve the same weights, each with a name of its own.
            settings: limits; the defaults of `SyncSettings` where None.
            stamp: told of a version once it is verified. If it raises, the engines are resumed
                all the same, and `update` raises the error after that.
        """
        names = [engine.name for engine in engines]
        if not names:
            raise ValueError("WeightSync() got no engines; give at least one")
        if len(set(names)) < len(names):
            raise ValueError(f"WeightSync() got engines named {names}; give each its own name")
        awake = [each.name for each in engines if not hasattr(each, "wake")]
        if settings is not None and settings.colocated and awake:
            raise ValueError(
                f"WeightSync() got colocated=True and engines that cannot sleep: {awake}; leave "
                "them out, or give their memory to them alone with colocated=False"
            )
        self._engines = tuple(engines)
        self._settings = settings or SyncSettings()
        self._stamp = stamp
        self._sent = Sent()
        self._run = uuid.uuid4().hex[:8]
        self._running: int | None = None
        self._outcomes: dict[str, EngineOutcome] = {}
        self._quarantined: Mapping[str, str] = {}

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Engines that must not serve, and why. The next update tries to bring them back.

        A new mapping whenever it changes: a pool looks at it for every request.
        """
        return self._quarantined

    async def update(
        self, source: WeightSource, version: int, *, changed_only: bool = False
    ) -> SyncReport:
        """Bring the source's weights to all engines as `version`.

        Collective through `source`: the trainer's other ranks call `follow` at the same time. The
        export always runs to its end, also when engines fail.

        Args:
            source: the weights; they must not change before this returns.
            version: above that of every engine.
            changed_only: send only tensors whose bytes differ from those of the last update that
                all engines took; everything where there is no such update.

        Returns:
            What became of each engine.

        Raises:
            SyncError: another update is running.
            SyncFailed: no engine serves the version.
            Exception: the export's own error, as `source` raised it; no engine has changed. Or that
                of `stamp`, after the engines were resumed.
        """
        if self._running is not None:
            raise SyncError(
                f"update to version {version} while that to version {self._running} is running; "
                "wait for it: one export, and one update per engine, at a time"
            )
        self._running = version
        try:
            report = await self._update(source, version, changed_only)
        finally:
            self._running = None
        if not report.named("committed"):
            raise SyncFailed(report)
        return report

    async def recover(self) -> Mapping[str, EngineHealth]:
        """Resume engines that an earlier trainer left paused, with weights of one version.

        For the start of a run. Those that are DIRTY or DEAD are left alone: the next update, which
        sends everything, repairs a DIRTY one. Returns the health of all engines afterwards.
        """
        healths = await self._ask_all()
        for engine in self._engines:
            health = healths[engine.name]
            if health.status == "PAUSED" and health.version is not None:
                await resume(engine, health.version, "", self._settings)
        return await self._ask_all()

    async def _update(self, source: WeightSource, version: int, changed_only: bool) -> SyncReport:
        clock = asyncio.get_running_loop().time
        started = clock()
        healths = await self._ask_all()
        alive = [each for each in self._engines if healths[each.name].status != "DEAD"]
        base = self._sent.base(healths.values()) if changed_only else None
        update = WeightUpdate(id=f"{self._run}/{version}", version=version, base_version=base)
        buckets = source.buckets(bucket_bytes=self._settings.bucket_bytes)
        passing = self._sent.passing(version, buckets, base)
        one = OneUpdate(alive, update, self._settings)
        self._sent.forget()
        try:
            await one.stage(passing.buckets())
            staged_at = clock()
            await one.switch(self._stamp)
        except BaseException as error:
            # Interrupted, or the export failed: nobody may stay paused, or half-written unnamed.
            await asyncio.shield(one.give_up(f"the update was interrupted: {error!r}"))
            raise
        finally:
            self._outcomes = {
                name: one.outcomes.get(name) or given_up(healths[name], "it does not answer")
                for name in healths
            }
            self._quarantined = {
                name: found.detail
                for name, found in self._outcomes.items()
                if found.outcome == "quarantined"
            }
        report = SyncReport(
            version=version,
            engines=self._outcomes,
            bytes_sent=passing.bytes_sent,
            tensors_sent=passing.tensors_sent,
            tensors_unchanged=passing.tensors_unchanged,
            stage_s=staged_at - started,
            pause_s=one.pause_s,
            total_s=clock() - started,
        )
        self._sent.took(passing)
        if one.stamp_error is not None:
            raise one.stamp_error
        return report

    async def _ask_all(self) -> dict[str, EngineHealth]:
        healths = await asyncio.gather(*(ask(each, self._settings) for each in self._engines))
        return {each.name: found for each, found in zip(self._engines, healths, strict=True)}


def follow(source: WeightSource, *, settings: SyncSettings | None = None) -> None:
    """Takes part in the export; the trainer's other ranks call it while rank 0 is in `update`.

    Collective through `source`; `settings` are those of rank 0.
    """
    for _ in source.buckets(bucket_bytes=(settings or SyncSettings()).bucket_bytes):
        pass
