"""One update on some engines, phase by phase; every engine ends with an outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar, cast

from megatron_idempotent.rollout import ColocatedEngine, RolloutEngine
from megatron_idempotent.weights import Bucket, WeightUpdate

from .fan_out import FanOut, Reader
from .records import EngineOutcome, SyncSettings
from .settle import attempts, bounded, resume, settle

_Answer = TypeVar("_Answer")

Stamp = Callable[[int, tuple[str, ...]], None]
"""Called with a version and the names of the engines that have it, before they are resumed."""


class OneUpdate:
    """Example: `await one.stage(buckets); await one.switch(stamp); one.outcomes`."""

    def __init__(
        self, engines: Sequence[RolloutEngine], update: WeightUpdate, settings: SyncSettings
    ) -> None:
        self.outcomes: dict[str, EngineOutcome] = {}
        self.pause_s = 0.0
        self.stamp_error: Exception | None = None
        self._engines = list(engines)
        self._failed: list[tuple[RolloutEngine, str, bool]] = []
        self._staged = False
        self._update = update
        self._settings = settings

    async def stage(self, buckets: Iterator[Bucket]) -> None:
        """Bring the buckets to all engines, which keep serving. Raises only what the export does.

        The export runs to its end even where no engine wants it: other ranks take part in it.
        """
        self._keep_good(await self._wake("weights"))
        fan_out = FanOut(buckets, bucket_timeout_s=self._settings.bucket_timeout_s)
        readers = {engine.name: fan_out.reader() for engine in self._engines}
        staging = asyncio.gather(
            *(self._stage_on(engine, readers[engine.name]) for engine in self._engines)
        )
        try:
            await fan_out.run()
        except BaseException:
            staging.cancel()
            await asyncio.gather(staging, return_exceptions=True)
            raise
        self._keep_good(await staging)
        self._staged = True

    async def switch(self, stamp: Stamp | None) -> None:
        """Pause, commit, verify, stamp, resume: from here on requests wait.

        Engines that have failed are repaired after that, so that they delay no other.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        self._keep_good(await self._on_all(self._pause))
        self._keep_good(await self._on_all(self._commit))
        self._keep_good(await self._wake("kv_cache"))
        version = self._update.version
        if stamp is not None and self._engines:
            try:
                stamp(version, tuple(engine.name for engine in self._engines))
            except Exception as error:  # noqa: BLE001 (the engines must be resumed first)
                self.stamp_error = error
        resumed = await self._on_all(lambda each: resume(each, version, "", self._settings))
        for engine, outcome in zip(self._engines, resumed, strict=True):
            self.outcomes[engine.name] = outcome
        if self._engines:
            self.pause_s = clock() - started
        self._engines = []
        await self._settle_failed()

    async def give_up(self, reason: str) -> None:
        """Put all engines right that have no outcome yet: back, or resumed where they have it."""
        self._keep_good([reason] * len(self._engines))
        await self._settle_failed()

    def _keep_good(self, errors: Sequence[str]) -> None:
        """Go on with the engines that have no error."""
        judged = list(zip(self._engines, errors, strict=True))
        self._failed += [(engine, error, self._staged) for engine, error in judged if error]
        self._engines = [engine for engine, error in judged if not error]

    async def _settle_failed(self) -> None:
        settled = await asyncio.gather(
            *(
                settle(engine, self._update, why, self._settings, had_staged=had_staged)
                for engine, why, had_staged in self._failed
            )
        )
        for (engine, *_), outcome in zip(self._failed, settled, strict=True):
            self.outcomes[engine.name] = outcome
        self._failed = []

    async def _on_all(self, call: Callable[[RolloutEngine], Awaitable[_Answer]]) -> list[_Answer]:
        return await asyncio.gather(*(call(engine) for engine in self._engines))

    async def _stage_on(self, engine: RolloutEngine, reader: Reader) -> str:
        settings = self._settings
        staging = asyncio.ensure_future(engine.stage(self._update, reader))
        staging.add_done_callback(_look_at_error)
        dropped = asyncio.ensure_future(reader.dropped.wait())
        try:
            await asyncio.wait(
                {staging, dropped},
                timeout=settings.stage_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if staging.done():
                staging.result()
                return ""
        except Exception as error:  # noqa: BLE001 (one engine's error is not the others')
            return f"staging failed: {error}"
        finally:
            reader.leave()
            dropped.cancel()
            staging.cancel()
            # Its own clean-up may take as long as a switch, and not longer.
            await asyncio.wait({staging}, timeout=settings.commit_timeout_s)
        if reader.dropped.is_set():
            return f"staging failed: a bucket not taken in {settings.bucket_timeout_s:g} s"
        return f"staging failed: not done in {settings.stage_timeout_s:g} s"

    async def _wake(self, tag: str) -> list[str]:
        """Wakes colocated engines that are asleep; returns the error of each, or ""."""
        if not self._settings.colocated:
            return [""] * len(self._engines)

        async def wake(engine: RolloutEngine) -> str:
            waking = cast("ColocatedEngine", engine).wake((tag,))
            try:
                await bounded(engine, "wake", waking, self._settings)
            except Exception as error:  # noqa: BLE001 (one engine's error is not the others')
                return f"waking its {tag} failed: {error}"
            return ""

        return await self._on_all(wake)

    async def _pause(self, engine: RolloutEngine) -> str:
        pausing = engine.pause(self._settings.pause_mode)
        try:
            await bounded(engine, "pause", pausing, self._settings)
        except Exception as error:  # noqa: BLE001 (as above)
            return f"pausing failed: {error}"
        return ""

    async def _commit(self, engine: RolloutEngine) -> str:
        """Commit and verify: done is what the engine's own health says."""
        return await attempts(
            engine,
            "commit",
            lambda: engine.commit(self._update.id),
            lambda health: (health.status, health.version) == ("PAUSED", self._update.version),
            self._settings,
        )


def _look_at_error(staging: asyncio.Future[None]) -> None:
    """Takes the error, so that asyncio does not log it after the engine was dropped."""
    if not staging.cancelled():
        staging.exception()
