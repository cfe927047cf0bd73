"""Brings new weights to all engines, in an order that cannot strand one of them.

The order is: stage on all, pause, commit, verify, stamp, resume. An engine that fails on the way
goes back to the weights that it had, or is quarantined and named; the others go on.
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
"""A function of a version and the names of the engines that have it, called before they resume."""


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
            engines: all engines that are to serve the same weights, each with a name of its own.
            settings: the limits; None for the defaults of `SyncSettings`.
            stamp: called with a version once it is verified. If it raises, the engines are resumed
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
        # The version that deltas build on; None while an update is under way.
        self._sent: int | None = None
        self._last: LastSent | None = None
        # Elements and bytes of the model.
        self._size = (0, 0)
        # After deltas that some engine did not take, so many updates are sent whole.
        self._whole_updates = self._refused = 0
        # Those of the last update that engines took: one that was started again has others.
        self._kv_scales: Mapping[str, float] | None = None
        self._run = uuid.uuid4().hex[:8]
        self._running: int | None = None
        self._quarantined: Mapping[str, str] = {}

    @property
    def quarantined(self) -> Mapping[str, str]:
        """The reason for each engine that must not serve; the next update tries to bring it back.

        It is a new mapping whenever it changes, because a pool reads it for every request.
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
        """Bring the source's weights to all engines as `version`.

        Collective through `source`: the trainer's other ranks call `follow` at the same time. The
        export always runs to its end, also when engines fail.

        Args:
            source: the weights; they must not change before this returns.
            version: the weights' version, above that of every engine.
            deltas: True sends only the elements whose bits differ from those of the last update,
                if all engines took it; else everything. Unless the source finds them, rank 0 keeps
                a copy of the weights in host memory.
            kv_scales: scales of a key-value cache in FP8, which take effect with the weights; see
                `WeightUpdate.kv_scales`. None for those of the last update that had any.
            timer: measures each phase; one that raises is not used again in this update.

        Returns:
            A report with each engine's outcome.

        Raises:
            SyncError: another update is running.
            ValueError: `kv_scales` that are no scales; nothing has begun.
            SyncFailed: no engine serves the version.
            Exception: the export's own error, as `source` raised it; no engine has changed. Or the
                error of `stamp`, after the engines were resumed.
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
        """Resume engines that an earlier trainer left paused, with weights of one version.

        Call it at the start of a run. It leaves engines alone that are DIRTY or DEAD: the next
        update, which sends everything, repairs a DIRTY one. Returns the health of all engines after
        that.
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
        alive = [each for each in self._engines if healths[each.name].status != "DEAD"]
        base, self._sent = self._sent, None
        self._whole_updates -= 1
        differ = any(each.version != base or each.wants_all for each in healths.values())
        if not deltas or differ or self._whole_updates >= 0:
            base = None
        update = dataclasses.replace(update, base_version=base)
        passing = self._outgoing(source, deltas=deltas, whole=base is None)
        one = UpdateAttempt(alive, update, self._settings, phases)
        try:
            await one.run(passing.buckets(), self._stamp)
        finally:
            outcomes = {
                name: one.outcomes.get(name) or given_up(healths[name], "it does not answer")
                for name in healths
            }
            self._quarantined = {
                name: found.detail
                for name, found in outcomes.items()
                if found.outcome == "quarantined"
            }
        if passing.size[0] or base is None:  # a source that finds changes leaves tensors out
            self._size = passing.size
        report = SyncReport(
            version=update.version,
            engines=outcomes,
            bytes_sent=passing.bytes_sent,
            tensors_sent=passing.tensors_sent,
            elements_changed=passing.elements_changed,
            elements=self._size[0],
            bytes_whole=self._size[1],
            encode_s=passing.encode_s,
            decode_s=one.decode_s if base is not None else 0.0,
            stage_s=one.staged_at - started,
            pause_s=one.pause_s,
            total_s=clock() - started,
        )
        if deltas:
            self._sent = update.version
        if base is not None and len(report.named("committed")) == len(outcomes):
            self._refused = 0
        elif base is not None:
            # Not at once again: an engine may take no deltas at all.
            self._refused += 1
            self._whole_updates = 2**self._refused
        if one.stamp_error is not None:
            raise one.stamp_error
        return report

    def _outgoing(self, source: WeightSource, *, deltas: bool, whole: bool) -> Outgoing:
        """Begin the export: of changed elements, if the source finds them by itself."""
        bucket_bytes = self._settings.bucket_bytes
        if deltas and getattr(source, "finds_changes", False):
            found = cast("ChangesSource", source).buckets(bucket_bytes=bucket_bytes, whole=whole)
            return Outgoing(found, None, whole=whole)
        if deltas and self._last is None:
            from megatron_idempotent.rl.weights.last_sent import LastSent

            self._last = LastSent()
        last = self._last if deltas else None
        return Outgoing(source.buckets(bucket_bytes=bucket_bytes), last, whole=whole)

    async def _ask_all(self) -> dict[str, EngineHealth]:
        healths = await asyncio.gather(*(ask(each, self._settings) for each in self._engines))
        return {each.name: found for each, found in zip(self._engines, healths, strict=True)}


def follow(source: WeightSource, *, settings: SyncSettings | None = None) -> None:
    """Take part in the export; the trainer's other ranks call it while rank 0 is in `update`.

    It is collective through `source`; `settings` have to be rank 0's.
    """
    for _ in source.buckets(bucket_bytes=(settings or SyncSettings()).bucket_bytes):
        pass


class UpdateAttempt:
    """Brings one update to engines, and finds the outcome of each.

    Example: `await one.run(buckets, stamp); one.outcomes`.
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
        """Stage the update on all engines, and switch those that took it.

        Raise what the export does. If that fails, or it is interrupted, no engine is left paused,
        or torn and not named.
        """
        try:
            await self._stage(buckets)
            self.staged_at = asyncio.get_running_loop().time()
            await self._switch(stamp)
        except BaseException as error:
            await asyncio.shield(self._give_up(f"the update was interrupted: {error!r}"))
            raise

    async def _stage(self, buckets: Iterator[Bucket]) -> None:
        """Bring the buckets to all engines, which keep serving. Raises only what the export does.

        The export runs to its end even if no engine wants it: other ranks take part in it.
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
        """Pause, commit, verify, stamp and resume; requests wait from the pause to the resume.

        Engines that have failed are repaired after that, so that they delay no other.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        version = self._update.version
        await self._in_phase("pause", "pausing", lambda each: each.pause(self._settings.pause_mode))
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
            resumed = await self._on_all(lambda each: resume(each, version, "", self._settings))
        for engine, outcome in zip(self._engines, resumed, strict=True):
            self.outcomes[engine.name] = outcome
        if self._engines:
            self.pause_s = clock() - started
        self._engines = []
        await self._settle_failed()

    async def _give_up(self, reason: str) -> None:
        """Settle all engines without an outcome: roll them back, or resume them if they have it."""
        self._keep_good([reason] * len(self._engines))
        await self._settle_failed()

    async def _in_phase(
        self, phase: Phase, doing: str, call: Callable[[RolloutEngine], Awaitable[None]]
    ) -> None:
        """Call all engines, and go on with those whose call has come back."""

        async def error_of(engine: RolloutEngine) -> str:
            try:
                await bounded(engine, phase, call(engine), self._settings)
            except Exception as error:  # noqa: BLE001 (one engine's error is not the others')
                return f"{doing} failed: {error}"
            return ""

        with self._phases.time(phase):
            self._keep_good(await self._on_all(error_of))

    async def _wake(self, tag: str) -> None:
        """Wake engines that are asleep, which only colocated ones are."""
        if self._settings.colocated:
            await self._in_phase(
                "wake", f"waking its {tag}", lambda each: cast("ColocatedEngine", each).wake((tag,))
            )

    def _keep_good(self, errors: Sequence[str]) -> None:
        """Go on with the engines that have no error."""
        judged = list(zip(self._engines, errors, strict=True))
        self._failed += [(engine, error, self._staged) for engine, error in judged if error]
        self._engines = [engine for engine, error in judged if not error]

    async def _settle_failed(self) -> None:
        if not self._failed:
            return
        with self._phases.time("settle"):
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

    async def _commit(self, engine: RolloutEngine) -> str:
        """Commit, and verify that by the engine's own health; return the error, or ""."""

        def done(health: EngineHealth) -> bool:
            self.decode_s = max(self.decode_s, health.decode_s)
            return (health.status, health.version) == ("PAUSED", self._update.version)

        settings = self._settings
        return await attempts(
            engine, "commit", lambda: engine.commit(self._update.id), done, settings
        )


def _look_at_error(staging: asyncio.Future[None]) -> None:
    """Take the error, so that asyncio does not log it after the engine was dropped."""
    if not staging.cancelled():
        staging.exception()


#: Calls that have the limit of another.
_LIMITED_AS = {"rollback": "commit", "wake": "resume", "health": "resume"}


async def bounded(
    engine: RolloutEngine, what: str, call: Awaitable[_Answer], settings: SyncSettings
) -> _Answer:
    """Return the call's result.

    Errors: the call's own; `EngineTimeout` naming the engine, the call and its limit.
    """
    limit = f"{_LIMITED_AS.get(what, what)}_timeout_s"
    limit_s: float = getattr(settings, limit)
    try:
        return await asyncio.wait_for(call, limit_s)
    except asyncio.TimeoutError as error:
        raise EngineTimeout(
            f"engine {engine.name} has not finished {what} in {limit_s:g} s; its health says what "
            f"it did, and {limit} is the limit"
        ) from error


async def ask(engine: RolloutEngine, settings: SyncSettings) -> EngineHealth:
    """Return the engine's health; DEAD if it does not answer or, against its contract, raises."""
    try:
        return await bounded(engine, "health", engine.health(), settings)
    except Exception as error:  # noqa: BLE001 (a third party's engine; any error is its answer)
        return EngineHealth(status="DEAD", version=None, detail=repr(error))


async def attempts(
    engine: RolloutEngine,
    what: str,
    call: Callable[[], Awaitable[Any]],
    done: Callable[[EngineHealth], bool],
    settings: SyncSettings,
) -> str:
    """Call until `done` says so of the engine's health; return the last error, or "".

    Health is asked after every attempt, failed or not: a call that times out may have been carried
    out, and one that comes back may not.
    """
    error = ""
    for attempt in range(settings.attempts):
        if attempt:
            await asyncio.sleep(settings.retry_wait_s)
        try:
            await bounded(engine, what, call(), settings)
        except Exception as failure:  # noqa: BLE001 (whatever it is, the engine's health decides)
            error = f"{what} failed: {failure}"
            dead = isinstance(failure, EngineDead)
        else:
            error, dead = f"{what} came back, and health does not show it", False
        health = await ask(engine, settings)
        if done(health):
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
    """Bring an engine that was interrupted in an update to one known version, or give it up.

    It rolls the engine back, which changes nothing if the update is committed in full, and resumes
    it only if it then says that its weights are of one version. An engine that is DIRTY is never
    resumed. An engine that had not staged the update does not have it, even if its version has the
    same number.
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
    # One that says SERVING too: a pause that came too late may still be under way.
    has_it = had_staged and health.version == update.version
    found = await resume(engine, health.version, "" if has_it else reason, settings)
    if has_it and found.outcome == "quarantined":
        return dataclasses.replace(found, detail=f"{reason}; {found.detail}")
    return found


async def resume(
    engine: RolloutEngine, version: int, reason: str, settings: SyncSettings
) -> EngineOutcome:
    """Resume an engine of a known version, and return its outcome.

    `reason` says why the version is not the newest; "" if it is.
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
    """Return the outcome of an engine that must not serve, with its health as the detail."""
    detail = f"{reason}; it is {health.status}" + (f": {health.detail}" if health.detail else "")
    return EngineOutcome(outcome="quarantined", version=None, detail=detail)
