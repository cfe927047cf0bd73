"""Publishes updates in a bucket of objects, which engines elsewhere take by themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.engines import (
    EngineError,
    EngineHealth,
    EngineUnsupported,
    PauseMode,
    Request,
    RolloutEngine,
    Sample,
)
from megatron_idempotent.rl.engines.protocol import refuse_out_of_turn
from megatron_idempotent.rl.weights import (
    Bucket,
    UpdateDamaged,
    UpdateRefused,
    WeightUpdate,
)
from megatron_idempotent.rl.weights.chains import (
    LATEST,
    Chain,
    Index,
    Listed,
    Manifest,
    write_manifest,
)
from megatron_idempotent.rl.weights.transports.bucket import Objects, put_bucket
from megatron_idempotent.rl.weights.transports.layout import BucketLayout

from .records import EngineOutcome, Phases, SyncError, SyncSettings
from .weight_sync import UpdateAttempt, WeightSync, given_up

_log = logging.getLogger(__name__)
_WRITER = "writer"


class BucketPublisher:
    """Publishes updates in a bucket, and takes part in a `WeightSync` as an engine does.

    Staging writes an update's objects, and the commit lists it, so that engines elsewhere see what
    the others serve. It draws no samples: keep it out of an `EnginePool`. A bucket has one writer.

    Example:
        publisher = BucketPublisher("s3://weights/grpo-7", run="grpo-7")
        report = await WeightSync([*engines, publisher]).update(source, version=12)
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        options: Mapping[str, Any] | None = None,
        anchor_every: int = 50,
        anchors: int = 2,
    ) -> None:
        """
        Args:
            url: the bucket, as `BucketSender` takes it.
            run: the name of the run, which followers see; a bucket has updates of one.
            options: arguments of fsspec's file system; None for those of the environment.
            anchor_every: the most updates from one anchor, which has everything, to the next.
            anchors: the number of anchors that are kept, with the updates after each.

        Errors: those of `Objects`; `ValueError` for a number below 1 or an empty run.
        """
        if not run or min(anchor_every, anchors) < 1:
            raise ValueError(
                f"BucketPublisher() got run={run!r}, anchor_every={anchor_every} and "
                f"anchors={anchors}; allowed: a name, and numbers of 1 or more"
            )
        self._objects = Objects(url, options)
        self._run, self._anchor_every, self._anchors = run, anchor_every, anchors
        self._paused = self._anchor_asked = False
        self._litter = True  # of a writer that died
        self._staging = ""
        self._token = secrets.token_bytes(16)
        self._claimed = False
        self._staged: tuple[Index | None, Index] | None = None
        # What may be listed: what was found last, and what was to be listed after that.
        self._known: tuple[Index | None, ...] = ()

    @property
    def name(self) -> str:
        """The bucket's URL, less what is secret in it."""
        return self._objects.address

    def ask_for_anchor(self) -> None:
        """Have the next update bring every tensor."""
        self._anchor_asked = True

    async def generate(self, request: Request) -> Sample:
        """Raise `EngineUnsupported`: a bucket has no model."""
        raise EngineUnsupported(f"{self.name} draws no samples; send requests to engines")

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`."""
        self._paused = True

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._paused = False

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """See `RolloutEngine.stage`. Followers see nothing of it before the commit.

        Errors: `UpdateRefused` for another run's bucket, too; `TransportError`.
        """
        before = await self._index()
        if not self._claimed:
            await asyncio.to_thread(self._objects.write, _WRITER, self._token)
            # Read again: one that published here before lists nothing from now on.
            self._claimed = True
            before = await self._index()
        newest = before.newest if before else None
        if newest and newest.id == update.id:
            return
        served = newest.version if newest else None
        least = 0 if served is None else served + 1
        refuse_out_of_turn(self.name, update, least=least, serving=served, staging=self._staging)
        self._staging, self._staged = update.id, None
        try:
            if self._litter:
                await asyncio.to_thread(self._clean, before)
            self._litter = True  # until it is committed
            written = [
                await asyncio.to_thread(self._write, update, bucket)
                async for bucket in buckets
                if bucket.tensors
            ]
            place = self._objects, self._run
            listed = await asyncio.to_thread(write_manifest, *place, update, written)
            after = Index(run=self._run, updates=(*(before.updates if before else ()), listed))
            first = after.anchors[-self._anchors :][0]
            after = dataclasses.replace(after, updates=after.updates[first:])
            self._staged = before, after
        finally:
            self._staging = ""

    async def commit(self, update_id: str) -> int:
        """See `RolloutEngine.commit`. Errors: `UpdateRefused` if another trainer publishes."""
        found = await self._index()
        if found and found.newest.id == update_id:  # the answer to an earlier try was lost
            self._committed(found)
            return found.newest.version
        if self._staged is None or self._staged[1].newest.id != update_id or not self._paused:
            raise EngineError(
                f"{self.name} has not staged update {update_id}, or is not paused; do both before "
                "the commit"
            )
        after = self._staged[1]
        self._known = found, after
        await asyncio.to_thread(after.write, self._objects)
        self._committed(after)
        return after.newest.version

    async def rollback(self, update_id: str) -> None:
        """See `RolloutEngine.rollback`. The objects are removed with the next update."""
        if self._staged is not None and self._staged[1].newest.id == update_id:
            self._staged = None

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`. The version is the one that the store gives back."""
        try:
            index = await self._index()
        except Exception as error:  # noqa: BLE001 (whatever it is, health is an answer to it)
            return EngineHealth(status="DEAD", version=None, detail=str(error))
        return EngineHealth(
            status="PAUSED" if self._paused else "SERVING",
            version=index.newest.version if index else None,
            wants_all=self._anchor_asked
            or index is None
            or len(index.updates) - index.anchors[-1] >= self._anchor_every,
        )

    async def close(self) -> None:
        """See `RolloutEngine.close`. What was published stays."""

    async def _index(self) -> Index | None:
        index, writer = await asyncio.gather(
            asyncio.to_thread(Index.read, self._objects),
            asyncio.to_thread(self._objects.read, _WRITER),
        )
        if index and index.run != self._run:
            raise UpdateRefused(
                f"{self.name} has updates of run {index.run!r}, and this is run {self._run!r}; "
                "give it a URL of its own"
            )
        if not self._claimed:
            return index
        # A commit whose answer was lost is our own, too.
        if self._known and index not in self._known:
            raise UpdateRefused(
                f"{self.name} has version {index and index.newest.version}, which this trainer "
                "did not publish: another one does so there; give each a bucket of its own"
            )
        if writer not in (self._token, None):
            # It may have removed what is staged here.
            raise UpdateRefused(
                f"another trainer has begun to publish in {self.name}; give each one a bucket of "
                "its own"
            )
        self._known = self._known or (index,)
        return index

    def _write(self, update: WeightUpdate, bucket: Bucket) -> Mapping[str, Any]:
        layout = BucketLayout.of(update.id, bucket)
        return {**layout.as_json(), **put_bucket(self._objects, "objects/", layout, bucket)}

    def _committed(self, index: Index) -> None:
        before = self._staged[0] if self._staged else None
        # Those that left the list go with the next update, not in the pause.
        self._litter = before is not None and index.updates[0] != before.updates[0]
        self._anchor_asked &= index.newest.base_version is not None
        self._staged = None

    def _clean(self, index: Index | None) -> None:
        """Remove all that no listed update needs; a list of the store's may lack the newest."""
        self._objects.remove_partials()
        listed = index.updates if index else ()
        try:
            needed = [Manifest(self._objects, self._run, each).keys for each in listed]
        except UpdateDamaged as error:
            # What it needs is not known. It leaves the list in its turn.
            _log.warning("%s is not cleaned: %s", self.name, error)
            return
        there = self._objects.keys("objects") | self._objects.keys("manifests")
        self._objects.remove(there.difference(*needed))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CatchUp:
    """Reports how engines came to the newest update.

    Example: `(await follower.catch_up()).describe()`.
    """

    version: int
    engines: Mapping[str, EngineOutcome]
    updates: int
    """The number of updates that were read, joined into one."""
    whole: bool
    """True if the first of them was an anchor."""
    bytes_read: int
    """The number of bytes of the objects that were fetched."""
    pause_s: float
    """Seconds in which requests waited."""
    total_s: float
    """Seconds for all of it."""

    def describe(self) -> str:
        """Return it as one line."""
        began = "the anchor and what came after it" if self.whole else "what was missed"
        updates = "1 update" if self.updates == 1 else f"{self.updates} updates"
        return (
            f"version {self.version} from {updates} ({began}), "
            f"{self.bytes_read / 1e6:.3f} MB in {self.total_s:.2f} s, paused {self.pause_s:.3f} s"
        )


def _has_it(outcome: EngineOutcome) -> bool:
    return outcome.outcome == "committed"


class BucketFollower:
    """Brings engines to what a bucket has, from wherever they are.

    Example:
        follower = BucketFollower("s3://weights/grpo-7", [engine])
        while True:
            await follower.catch_up()
            await asyncio.sleep(1)
    """

    def __init__(
        self,
        url: str,
        engines: Sequence[RolloutEngine],
        *,
        run: str | None = None,
        options: Mapping[str, Any] | None = None,
        settings: SyncSettings | None = None,
    ) -> None:
        """
        Args:
            url: the bucket, as the publisher was given it.
            engines: the engines; what is fetched is fetched once for all of them.
            run: the only run that is followed; None for the one that is found first.
            options: arguments of fsspec's file system; None for those of the environment.
            settings: the limits; None for the defaults of `SyncSettings`.

        Errors: those of `Objects`, and of `WeightSync` for the engines.
        """
        self._objects = Objects(url, options)
        self._settings = settings or SyncSettings()
        self._sync = WeightSync(engines, settings=self._settings)
        self._engines = tuple(engines)
        self._run, self._newest, self._warned = run, -1, False

    async def catch_up(self) -> CatchUp | None:
        """Bring all engines to the newest update; return None if they have it, or there is none.

        An engine takes the updates that it missed, joined into one, or the last anchor and those
        after it if that is nearer; if its bits are not those of its version, the anchor too. The
        first time that nothing was published there, that is logged as a warning.

        Raises:
            UpdateDamaged: an object is missing, or is not what was written; no engine has changed.
            UpdateRefused: the bucket has another run, or went back to an older version.
            TransportError: the store does not answer.
            SyncError: no engine took the update; the message says why.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        index = await asyncio.to_thread(Index.read, self._objects)
        self._check(index)
        if index is None:
            return None
        newest = index.newest
        healths = await self._sync.recover()
        outcomes, behind = {}, []
        for engine in self._engines:
            found = healths[engine.name]
            if found.status == "SERVING" and found.version == newest.version:
                done = EngineOutcome(outcome="committed", version=newest.version)
                outcomes[engine.name] = done
            elif found.status == "DEAD":
                outcomes[engine.name] = given_up(found, "it does not answer")
            elif (found.version or 0) > newest.version:
                raise UpdateRefused(
                    f"engine {engine.name} serves version {found.version}, and "
                    f"{self._objects.address} has {newest.version}: it took another run's updates; "
                    "start it again"
                )
            else:
                behind.append(engine)
        if not behind and all(map(_has_it, outcomes.values())):
            return None
        versions = {healths[engine.name].version for engine in behind}
        chain: Sequence[Listed] = ()
        updates = bytes_read = 0
        pause_s = 0.0
        # The second time from an anchor: an engine's bits may not be those of its version.
        for base in (versions.pop() if len(versions) == 1 else None, None):
            if not behind or index.chain(base) == chain:
                break
            chain = index.chain(base)
            reading = await asyncio.to_thread(Chain, self._objects, index.run, chain)
            one = UpdateAttempt(behind, reading.update, self._settings, Phases(None))
            await one.run(reading.buckets(self._settings.bucket_bytes), None)
            updates, bytes_read = updates + len(chain), bytes_read + reading.bytes_read
            pause_s += one.pause_s
            outcomes |= one.outcomes
            behind = [engine for engine in behind if not _has_it(outcomes[engine.name])]
        report = CatchUp(
            version=newest.version,
            engines=outcomes,
            updates=updates,
            whole=bool(chain) and chain[0].base_version is None,
            bytes_read=bytes_read,
            pause_s=pause_s,
            total_s=clock() - started,
        )
        if not any(map(_has_it, outcomes.values())):
            told = "; ".join(f"{name}: {each.detail}" for name, each in outcomes.items())
            raise SyncError(f"no engine took version {newest.version} of {index.run}: {told}")
        _log.info("%s: %s", self._objects.address, report.describe())
        return report

    def _check(self, index: Index | None) -> None:
        address = self._objects.address
        if index is None and self._newest >= 0:
            raise UpdateRefused(
                f"{address} has no {LATEST}, and had version {self._newest} before: it was "
                "emptied, or the store lost it; publish again"
            )
        if index is None:
            if not self._warned:
                self._warned = True
                _log.warning(
                    "%s has no %s, which a publisher writes with its first update: none was "
                    "published yet, or the trainer has another URL",
                    *(address, LATEST),
                )
            return
        if self._run not in (None, index.run):
            raise UpdateRefused(
                f"{address} has updates of run {index.run!r}, and run {self._run!r} "
                "is followed; make a new follower, and start its engines again"
            )
        if index.newest.version < self._newest:
            raise UpdateRefused(
                f"{address} has version {index.newest.version}, and had "
                f"{self._newest} before: the store gave back an old list, or was set back"
            )
        self._run, self._newest = index.run, index.newest.version
