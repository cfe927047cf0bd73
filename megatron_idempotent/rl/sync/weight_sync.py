"""Sends new weights to all engines, such that no engine is left in an unknown state.

The order is: stage on all, pause, commit, verify, stamp, resume. An engine that fails is rolled
back to its previous weights, or quarantined and reported; the others continue.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megatron_idempotent.rl.engines import (
    ColocatedEngine,
    EngineDead,
    EngineHealth,
    EngineTimeout,
    RolloutEngine,
)
from megatron_idempotent.rl.weights import Bucket, WeightSource, WeightUpdate
from megatron_idempotent.rl.weights.records import ChangesSource

from .fan_out import FanOut, Outgoing, Reader
from .records import (
    EngineOutcome,
    Outcome,
    Phase,
    Phases,
    PhaseTimer,
    SyncError,
    SyncFailed,
    SyncReport,
    SyncSettings,
)

if TYPE_CHECKING:
    from megatron_idempotent.rl.weights.last_sent import LastSent

_Answer = TypeVar("_Answer")

Stamp = Callable[[int, tuple[str, ...]], None]
"""Called with a version and the names of the engines that have it, before they resume."""


class WeightSync:
    """Sends weight updates from the trainer's rank 0 to all engines; the trainer's other ranks call
    `follow` meanwhile.

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
        """Check the engines and the settings; no engine is called yet.

        Args:
            engines: all engines that must serve the same weights, with unique names.
            settings: the limits; None for the defaults of `SyncSettings`.
            stamp: called with a version once it is verified. If it raises, the engines are still
                resumed, and `update` then raises the error.
        """
        names = [engine.name for engine in engines]
        if not names:
            raise ValueError("WeightSync() got no engines; give at least one")
        if len(set(names)) < len(names):
            raise ValueError(f"WeightSync() got engines named {names}; give each its own name")
        awake = [engine.name for engine in engines if not hasattr(engine, "wake")]
        if settings is not None and settings.colocated and awake:
            raise ValueError(
                f"WeightSync() got colocated=True and engines that cannot sleep: {awake}; leave "
                "them out, or give their memory to them alone with colocated=False"
            )
        self._engines = tuple(engines)
        self._settings = settings or SyncSettings()
        self._stamp = stamp
        # The version that deltas build on; None during an update.
        self._sent: int | None = None
        self._last: LastSent | None = None
        # Elements and bytes of the model.
        self._size = (0, 0)
        # After an engine failed to take deltas, this many further updates are sent in full.
        self._whole_updates = self._refused = 0
        # The scales of the last update that engines took, because a restarted engine lacks them.
        self._kv_scales: Mapping[str, float] | None = None
        self._run = uuid.uuid4().hex[:8]
        self._running: int | None = None
        self._quarantined: Mapping[str, str] = {}

    @property
    def quarantined(self) -> Mapping[str, str]:
        """The engines that must not serve: a map from each engine's name to the reason. The next
        update tries to repair these engines.

        A change makes a new mapping, because a pool reads it for every request.
        """
        return self._quarantined

    async def update(
        self,
        source: WeightSource,
        version: int,
        *,
        deltas: bool = False,
        kv_scales: Mapping[str, float] | None = None,
        timer: PhaseTimer | None = None,
    ) -> SyncReport:
        """Send the source's weights to all engines as `version`, and make the engines serve them.

        A collective through `source`: the trainer's other ranks call `follow` at the same time. The
        export always runs to its end, even if engines fail.

        Args:
            source: the weights; they must not change before this returns.
            version: the weights' version, above that of every engine.
            deltas: True to send only the elements whose bits changed since the last update, if all
                engines took that one; otherwise everything is sent. Unless the source finds the
                changes, rank 0 keeps a copy of the weights in host memory.
            kv_scales: scales of a key-value cache in FP8, which take effect with the weights; see
                `WeightUpdate.kv_scales`. None for those of the last update that had any.
            timer: measures each phase; a timer that raises is not used again in this update.

        Returns:
            A report with each engine's outcome.

        Raises:
            SyncError: another update is running.
            ValueError: `kv_scales` are invalid; the update has not begun.
            SyncFailed: no engine serves the version.
            Exception: the export's error, as `source` raised it; no engine has changed. Or the
                error of `stamp`; the engines are resumed.
        """
        if self._running is not None:
            raise SyncError(
                f"update to version {version} while that to version {self._running} is running: "
                "wait for it, since engines take one update at a time"
            )
        self._running = version
        try:
            kv_scales = self._kv_scales if kv_scales is None else dict(kv_scales)
            update = WeightUpdate(id=f"{self._run}/{version}", version=version, kv_scales=kv_scales)
            report = await self._bring(update, source, deltas, Phases(timer))
        finally:
            self._running = None
        if not report.named("committed"):
            raise SyncFailed(report)
        self._kv_scales = kv_scales
        return report

    async def recover(self) -> Mapping[str, EngineHealth]:
        """Resume every paused engine that reports the version of its weights, such as one that an
        earlier trainer left paused. Return the health of all engines afterwards, by name.

        Call it at the start of a run. It does not touch DIRTY and DEAD engines: the next update,
        which sends everything, repairs DIRTY ones.
        """
        healths = await self._ask_all()
        for engine in self._engines:
            health = healths[engine.name]
            if health.status == "PAUSED" and health.version is not None:
                await resume(engine, health.version, "", self._settings)
        return await self._ask_all()

    async def _bring(
        self, update: WeightUpdate, source: WeightSource, deltas: bool, phases: Phases
    ) -> SyncReport:
        clock = asyncio.get_running_loop().time
        started = clock()
        healths = await self._ask_all()
        alive = [engine for engine in self._engines if healths[engine.name].status != "DEAD"]
        base, self._sent = self._sent, None
        self._whole_updates -= 1
        differ = any(health.version != base or health.wants_all for health in healths.values())
        if not deltas or differ or self._whole_updates >= 0:
            base = None
        update = dataclasses.replace(update, base_version=base)
        outgoing = self._outgoing(source, deltas=deltas, whole=base is None)
        attempt = UpdateAttempt(alive, update, self._settings, phases)
        try:
            await attempt.run(outgoing.buckets(), self._stamp)
        finally:
            outcomes = {
                name: attempt.outcomes.get(name) or given_up(healths[name], "it does not answer")
                for name in healths
            }
            self._quarantined = {
                name: outcome.detail
                for name, outcome in outcomes.items()
                if outcome.outcome == "quarantined"
            }
        if outgoing.size[0] or base is None:  # a source that finds changes omits tensors
            self._size = outgoing.size
        report = SyncReport(
            version=update.version,
            engines=outcomes,
            bytes_sent=outgoing.bytes_sent,
            tensors_sent=outgoing.tensors_sent,
            elements_changed=outgoing.elements_changed,
            elements=self._size[0],
            bytes_whole=self._size[1],
            encode_s=outgoing.encode_s,
            decode_s=attempt.decode_s if base is not None else 0.0,
            stage_s=attempt.staged_at - started,
            pause_s=attempt.pause_s,
            total_s=clock() - started,
        )
        if deltas:
            self._sent = update.version
        if base is not None and len(report.named("committed")) == len(outcomes):
            self._refused = 0
        elif base is not None:
            # Exponential back-off: an engine may never accept deltas.
            self._refused += 1
            self._whole_updates = 2**self._refused
        if attempt.stamp_error is not None:
            raise attempt.stamp_error
        return report

    def _outgoing(self, source: WeightSource, *, deltas: bool, whole: bool) -> Outgoing:
        """Start an export of the source's weights, and return the buckets to send for an update:
        all tensors, or the changes since the last update if `whole` is False.
        """
        bucket_bytes = self._settings.bucket_bytes
        if deltas and getattr(source, "finds_changes", False):
            buckets = cast("ChangesSource", source).buckets(bucket_bytes=bucket_bytes, whole=whole)
            return Outgoing(buckets, None, whole=whole)
        if deltas and self._last is None:
            from megatron_idempotent.rl.weights.last_sent import LastSent

            self._last = LastSent()
        last = self._last if deltas else None
        return Outgoing(source.buckets(bucket_bytes=bucket_bytes), last, whole=whole)

    async def _ask_all(self) -> dict[str, EngineHealth]:
        healths = await asyncio.gather(*(ask(engine, self._settings) for engine in self._engines))
        return {engine.name: health for engine, health in zip(self._engines, healths, strict=True)}


def follow(source: WeightSource, *, settings: SyncSettings | None = None) -> None:
    """Take part in the export of an update's weights; the trainer's other ranks call this while
    rank 0 is in `update`.

    A collective through `source`; `settings` must be equal to rank 0's.
    """
    for _ in source.buckets(bucket_bytes=(settings or SyncSettings()).bucket_bytes):
        pass


class UpdateAttempt:
    """Sends one update to several engines, and determines the outcome of each engine.

    Example: `await attempt.run(buckets, stamp); attempt.outcomes`.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        update: WeightUpdate,
        settings: SyncSettings,
        phases: Phases,
    ) -> None:
        self.outcomes: dict[str, EngineOutcome] = {}
        self.pause_s = self.decode_s = self.staged_at = 0.0
        self.stamp_error: Exception | None = None
        self._engines = list(engines)
        self._failed: list[tuple[RolloutEngine, str, bool]] = []
        self._staged = False
        self._update = update
        self._settings = settings
        self._phases = phases

    async def run(self, buckets: Iterator[Bucket], stamp: Stamp | None) -> None:
        """Stage the update on all engines, and make the engines that staged it serve it.

        After an error or a cancellation, every engine is resumed, or quarantined and reported.

        Raises:
            Exception: the export's error.
        """
        try:
            await self._stage(buckets)
            self.staged_at = asyncio.get_running_loop().time()
            await self._switch(stamp)
        except BaseException as error:
            await asyncio.shield(self._give_up(f"the update was interrupted: {error!r}"))
            raise

    async def _stage(self, buckets: Iterator[Bucket]) -> None:
        """Send the update's buckets to all engines, which stage them and keep serving their current
        weights.

        The export runs to its end even without engines, because other ranks take part in it.

        Raises:
            Exception: the export's error; errors of engines are not raised.
        """
        await self._wake("weights")
        with self._phases.time("stage"):
            fan_out = FanOut(buckets, bucket_timeout_s=self._settings.bucket_timeout_s)
            staging = asyncio.gather(
                *[self._stage_on(engine, fan_out.reader()) for engine in self._engines]
            )
            try:
                await fan_out.run()
            except BaseException:
                staging.cancel()
                await asyncio.gather(staging, return_exceptions=True)
                raise
            self._keep_good(await staging)
        self._staged = True

    async def _switch(self, stamp: Stamp | None) -> None:
        """Pause the engines, commit the update on all, check by `health` that each has the new
        version, call `stamp` with the version and the engines' names, and resume the engines.
        Requests wait from the pause to the resume.

        Failed engines are repaired afterwards, so that they do not delay the others.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        version = self._update.version
        await self._in_phase(
            "pause", "pausing", lambda engine: engine.pause(self._settings.pause_mode)
        )
        with self._phases.time("commit"):
            self._keep_good(await self._on_all(self._commit))
        await self._wake("kv_cache")
        if stamp is not None and self._engines:
            with self._phases.time("stamp"):
                try:
                    stamp(version, tuple(engine.name for engine in self._engines))
                except Exception as error:  # noqa: BLE001 (the engines must be resumed first)
                    self.stamp_error = error
        with self._phases.time("resume"):
            resumed = await self._on_all(lambda engine: resume(engine, version, "", self._settings))
        for engine, outcome in zip(self._engines, resumed, strict=True):
            self.outcomes[engine.name] = outcome
        if self._engines:
            self.pause_s = clock() - started
        self._engines = []
        await self._settle_failed()

    async def _give_up(self, reason: str) -> None:
        """Record that the update failed with `reason` on all engines that have not finished the
        update. Resume those that have committed it; roll back and resume the others. An engine on
        which this fails is quarantined.
        """
        self._keep_good([reason] * len(self._engines))
        await self._settle_failed()

    async def _in_phase(
        self, phase: Phase, doing: str, call: Callable[[RolloutEngine], Awaitable[None]]
    ) -> None:
        """Make a call on all engines, timed as `phase`, and continue the update with the engines on
        which the call succeeded.
        """

        async def error_of(engine: RolloutEngine) -> str:
            try:
                await bounded(engine, phase, call(engine), self._settings)
            except Exception as error:  # noqa: BLE001 (one engine's error is not the others')
                return f"{doing} failed: {error}"
            return ""

        with self._phases.time(phase):
            self._keep_good(await self._on_all(error_of))

    async def _wake(self, tag: str) -> None:
        """Wake the weights or the cache (`tag`) of colocated engines; do nothing for others, which
        never sleep.
        """
        if self._settings.colocated:
            await self._in_phase(
                "wake",
                f"waking its {tag}",
                lambda engine: cast("ColocatedEngine", engine).wake((tag,)),
            )

    def _keep_good(self, errors: Sequence[str]) -> None:
        """Continue the update with the engines whose text in `errors` is empty, and record the
        others as failed.
        """
        judged = list(zip(self._engines, errors, strict=True))
        self._failed += [(engine, error, self._staged) for engine, error in judged if error]
        self._engines = [engine for engine, error in judged if not error]

    async def _settle_failed(self) -> None:
        if not self._failed:
            return
        with self._phases.time("settle"):
            settled = await asyncio.gather(
                *(
                    settle(engine, self._update, error, self._settings, had_staged=had_staged)
                    for engine, error, had_staged in self._failed
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
            # Its clean-up may take as long as a commit.
            await asyncio.wait({staging}, timeout=settings.commit_timeout_s)
        if reader.dropped.is_set():
            return f"staging failed: a bucket not taken in {settings.bucket_timeout_s:g} s"
        return f"staging failed: not done in {settings.stage_timeout_s:g} s"

    async def _commit(self, engine: RolloutEngine) -> str:
        """Commit the update on one engine, and check by `health` that the engine has the new
        version; return the error, or "".
        """

        def is_committed(health: EngineHealth) -> bool:
            self.decode_s = max(self.decode_s, health.decode_s)
            return (health.status, health.version) == ("PAUSED", self._update.version)

        settings = self._settings
        return await attempts(
            engine, "commit", lambda: engine.commit(self._update.id), is_committed, settings
        )


def _look_at_error(staging: asyncio.Future[None]) -> None:
    """Retrieve the error of an engine's `stage`, so that asyncio does not log the error after the
    engine was dropped.
    """
    if not staging.cancelled():
        staging.exception()


#: Calls that share another call's time limit.
_LIMITED_AS = {"rollback": "commit", "wake": "resume", "health": "resume"}


async def bounded(
    engine: RolloutEngine, action: str, call: Awaitable[_Answer], settings: SyncSettings
) -> _Answer:
    """Await a call of an engine, within the time limit that `settings` has for `action`, and return
    the call's result.

    Raises:
        EngineTimeout: the limit was exceeded; the message has the engine, the call and the limit.
        Exception: the call's error.
    """
    limit = f"{_LIMITED_AS.get(action, action)}_timeout_s"
    limit_s: float = getattr(settings, limit)
    try:
        return await asyncio.wait_for(call, limit_s)
    except asyncio.TimeoutError as error:
        raise EngineTimeout(
            f"engine {engine.name} has not finished {action} in {limit_s:g} s; its health says "
            f"what it did, and {limit} is the limit"
        ) from error


async def ask(engine: RolloutEngine, settings: SyncSettings) -> EngineHealth:
    """Return an engine's health; DEAD if its `health` times out or raises."""
    try:
        return await bounded(engine, "health", engine.health(), settings)
    except Exception as error:  # noqa: BLE001 (a third party's engine may break the contract)
        return EngineHealth(status="DEAD", version=None, detail=repr(error))


async def attempts(
    engine: RolloutEngine,
    action: str,
    call: Callable[[], Awaitable[Any]],
    is_done: Callable[[EngineHealth], bool],
    settings: SyncSettings,
) -> str:
    """Repeat a call of an engine until `is_done` accepts the engine's health, at most
    `settings.attempts` times; stop if the engine is DEAD. Return "" after a success, else the last
    error.

    The health is checked after every attempt, even a failed one: a call that timed out may have
    taken effect, and a call that returned may not have.
    """
    error = ""
    for attempt in range(settings.attempts):
        if attempt:
            await asyncio.sleep(settings.retry_wait_s)
        try:
            await bounded(engine, action, call(), settings)
        except Exception as failure:  # noqa: BLE001 (the engine's health decides)
            error = f"{action} failed: {failure}"
            dead = isinstance(failure, EngineDead)
        else:
            error, dead = f"{action} came back, and health does not show it", False
        health = await ask(engine, settings)
        if is_done(health):
            return ""
        if dead or health.status == "DEAD":
            return f"{error}; {health.detail or 'it does not answer'}"
        error += f" (it is {health.status} at version {health.version})"
    return error


async def settle(
    engine: RolloutEngine,
    update: WeightUpdate,
    reason: str,
    settings: SyncSettings,
    *,
    had_staged: bool,
) -> EngineOutcome:
    """Roll back an update on an engine where the update failed. If the engine then reports a
    version of its weights, resume it, otherwise quarantine it. Return the engine's outcome.

    The rollback is a no-op if the commit was complete. A DIRTY engine is never resumed.
    `had_staged` is False for an engine that had not staged the update: it does not have the update,
    even if its version has the same number.
    """
    await attempts(
        engine,
        "rollback",
        lambda: engine.rollback(update.id),
        lambda health: health.status in ("SERVING", "PAUSED"),
        settings,
    )
    health = await ask(engine, settings)
    if health.status not in ("SERVING", "PAUSED") or health.version is None:
        return given_up(health, reason)
    # Even if it is SERVING: a pause that timed out may still take effect.
    has_it = had_staged and health.version == update.version
    outcome = await resume(engine, health.version, "" if has_it else reason, settings)
    if has_it and outcome.outcome == "quarantined":
        return dataclasses.replace(outcome, detail=f"{reason}; {outcome.detail}")
    return outcome


async def resume(
    engine: RolloutEngine, version: int, reason: str, settings: SyncSettings
) -> EngineOutcome:
    """Resume an engine whose weights have the version `version`. Return the outcome: `committed` if
    `reason` is "", `behind` otherwise, or `quarantined` if the engine does not resume.

    `reason` is why the version is not the newest; "" if it is the newest.
    """
    error = await attempts(
        engine,
        "resume",
        engine.resume,
        lambda health: (health.status, health.version) == ("SERVING", version),
        settings,
    )
    if error:
        detail = f"{reason}; {error}" if reason else error
        return EngineOutcome(outcome="quarantined", version=None, detail=detail)
    outcome: Outcome = "behind" if reason else "committed"
    return EngineOutcome(outcome=outcome, version=version, detail=reason)


def given_up(health: EngineHealth, reason: str) -> EngineOutcome:
    """Return the outcome of an engine that must not serve: `quarantined`, with `reason` and the
    engine's health as the detail.
    """
    detail = f"{reason}; it is {health.status}" + (f": {health.detail}" if health.detail else "")
    return EngineOutcome(outcome="quarantined", version=None, detail=detail)
