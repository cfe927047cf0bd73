"""Publishes updates in an object store's bucket, for engines elsewhere to follow."""

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
    """Publishes the updates of a `WeightSync` in an object store's bucket, from which a
    `BucketFollower` updates engines elsewhere. The sync uses the publisher like an engine.

    Staging writes an update's objects, and the commit adds it to the index, so that engines
    elsewhere see the versions that this sync's engines serve. It cannot sample: keep it out of an
    `EnginePool`. A bucket has one writer.

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
        """Open the bucket's store; nothing is written before the first update.

        Args:
            url: the bucket's URL, as for `BucketSender`.
            run: the name of the run, which followers see; a bucket has updates of one run only.
            options: arguments of fsspec's file system; None for those of the environment.
            anchor_every: the most updates between anchors; an anchor has every tensor.
            anchors: the number of anchors to keep, with the updates after each.

        Raises:
            ValueError: a number is below 1, the run's name is empty, or as in `Objects`.
        """
        if not run or min(anchor_every, anchors) < 1:
            raise ValueError(
                f"BucketPublisher() got run={run!r}, anchor_every={anchor_every} and "
                f"anchors={anchors}; allowed: a name, and numbers of 1 or more"
            )
        self._objects = Objects(url, options)
        self._run, self._anchor_every, self._anchors = run, anchor_every, anchors
        self._paused = self._anchor_asked = False
        self._needs_cleaning = True  # a writer that died may have left objects
        self._staging = ""
        self._token = secrets.token_bytes(16)
        self._claimed = False
        self._staged: tuple[Index | None, Index] | None = None
        # The indexes that this publisher may find: the last one it read, and the one it wrote.
        self._own_indexes: tuple[Index | None, ...] = ()

    @property
    def name(self) -> str:
        """The bucket's URL without secrets."""
        return self._objects.address

    def ask_for_anchor(self) -> None:
        """Make `health` report that the next update must be an anchor, i.e. have every tensor."""
        self._anchor_asked = True

    async def generate(self, request: Request) -> Sample:
        """Raise `EngineUnsupported`: a bucket has no model."""
        raise EngineUnsupported(f"{self.name} draws no samples; send requests to engines")

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Allow `commit` from now on; a publisher has no requests to stop."""
        self._paused = True

    async def resume(self) -> None:
        """Make `commit` raise an error until the next pause."""
        self._paused = False

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """Write an update's objects and manifest to the bucket; see `RolloutEngine.stage`.

        Followers do not see the update before the commit.

        Raises:
            UpdateRefused: also if the bucket belongs to another run or another trainer writes it.
            TransportError: the store failed.
        """
        index = await self._index()
        if not self._claimed:
            await asyncio.to_thread(self._objects.write, _WRITER, self._token)
            # Read again: the claim stops an earlier publisher from changing the index.
            self._claimed = True
            index = await self._index()
        newest = index.newest if index else None
        if newest and newest.id == update.id:
            return
        served = newest.version if newest else None
        least = 0 if served is None else served + 1
        refuse_out_of_turn(self.name, update, least=least, serving=served, staging=self._staging)
        self._staging, self._staged = update.id, None
        try:
            if self._needs_cleaning:
                await asyncio.to_thread(self._clean, index)
            self._needs_cleaning = True  # reset by the commit
            written = [
                await asyncio.to_thread(self._write, update, bucket)
                async for bucket in buckets
                if bucket.tensors
            ]
            destination = self._objects, self._run
            listed = await asyncio.to_thread(write_manifest, *destination, update, written)
            new_index = Index(run=self._run, updates=(*(index.updates if index else ()), listed))
            first = new_index.anchors[-self._anchors :][0]
            new_index = dataclasses.replace(new_index, updates=new_index.updates[first:])
            self._staged = index, new_index
        finally:
            self._staging = ""

    async def commit(self, update_id: str) -> int:
        """Add the staged update to the bucket's index, from where followers read it; see
        `RolloutEngine.commit`.

        Raises:
            UpdateRefused: another trainer publishes in this bucket.
            EngineError: the update is not staged, or the publisher is not paused.
        """
        index = await self._index()
        if (
            index and index.newest.id == update_id
        ):  # an earlier commit succeeded, but its reply was lost
            self._committed(index)
            return index.newest.version
        if self._staged is None or self._staged[1].newest.id != update_id or not self._paused:
            raise EngineError(
                f"{self.name} has not staged update {update_id}, or is not paused; do both before "
                "the commit"
            )
        new_index = self._staged[1]
        self._own_indexes = index, new_index
        await asyncio.to_thread(new_index.write, self._objects)
        self._committed(new_index)
        return new_index.newest.version

    async def rollback(self, update_id: str) -> None:
        """Forget the staged update; a later `stage` removes the update's objects."""
        if self._staged is not None and self._staged[1].newest.id == update_id:
            self._staged = None

    async def health(self) -> EngineHealth:
        """Return this publisher's status, and the newest weight version in the storage bucket; the
        status is DEAD if the bucket cannot be read. See `RolloutEngine.health`.
        """
        try:
            index = await self._index()
        except Exception as error:  # noqa: BLE001 (health reports any error)
            return EngineHealth(status="DEAD", version=None, detail=str(error))
        return EngineHealth(
            status="PAUSED" if self._paused else "SERVING",
            version=index.newest.version if index else None,
            wants_all=self._anchor_asked
            or index is None
            or len(index.updates) - index.anchors[-1] >= self._anchor_every,
        )

    async def close(self) -> None:
        """Do nothing: a publisher keeps no resources, and published updates stay."""

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
        # This includes an index that was written although the reply was lost.
        if self._own_indexes and index not in self._own_indexes:
            raise UpdateRefused(
                f"{self.name} has version {index and index.newest.version}, which this trainer "
                "did not publish: another trainer publishes there; give each its own bucket"
            )
        if writer not in (self._token, None):
            # The other trainer may have removed this one's staged objects.
            raise UpdateRefused(
                f"another trainer has begun to publish in {self.name}; give each one its own bucket"
            )
        self._own_indexes = self._own_indexes or (index,)
        return index

    def _write(self, update: WeightUpdate, bucket: Bucket) -> Mapping[str, Any]:
        layout = BucketLayout.of(update.id, bucket)
        return {**layout.as_json(), **put_bucket(self._objects, "objects/", layout, bucket)}

    def _committed(self, index: Index) -> None:
        old_index = self._staged[0] if self._staged else None
        # Objects of updates that left the index are removed by the next update, not in the pause.
        self._needs_cleaning = old_index is not None and index.updates[0] != old_index.updates[0]
        self._anchor_asked &= index.newest.base_version is not None
        self._staged = None

    def _clean(self, index: Index | None) -> None:
        """Remove from the storage bucket all objects that no update in the index needs. The newest
        objects may stay until a later call, because the store may not list them yet.
        """
        self._objects.remove_partials()
        listed = index.updates if index else ()
        try:
            needed = [Manifest(self._objects, self._run, update).keys for update in listed]
        except UpdateDamaged as error:
            # Its objects are unknown. The update will leave the index later.
            _log.warning("%s is not cleaned: %s", self.name, error)
            return
        stored_keys = self._objects.keys("objects") | self._objects.keys("manifests")
        self._objects.remove(stored_keys.difference(*needed))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CatchUp:
    """A report of how `BucketFollower` updated engines to the bucket's newest version.

    Example: `(await follower.catch_up()).describe()`.
    """

    version: int
    engines: Mapping[str, EngineOutcome]
    updates: int
    """The number of updates that were read and merged."""
    whole: bool
    """True if the first of these updates was an anchor."""
    bytes_read: int
    """The bytes of the fetched objects."""
    pause_s: float
    """Seconds in which requests were paused."""
    total_s: float
    """Seconds for the entire `catch_up`."""

    def describe(self) -> str:
        """Return the report as one line of text."""
        began = "the anchor and what came after it" if self.whole else "what was missed"
        updates = "1 update" if self.updates == 1 else f"{self.updates} updates"
        return (
            f"version {self.version} from {updates} ({began}), "
            f"{self.bytes_read / 1e6:.3f} MB in {self.total_s:.2f} s, paused {self.pause_s:.3f} s"
        )


def _has_it(outcome: EngineOutcome) -> bool:
    return outcome.outcome == "committed"


class BucketFollower:
    """Updates engines to the newest version that a `BucketPublisher` has put into a bucket, from
    any older version.

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
        """Open the bucket's store; `catch_up` reads the bucket and updates the engines.

        Args:
            url: the publisher's URL.
            engines: the engines to update; objects are fetched once for all of them.
            run: the run to follow; None for the first run that the bucket has.
            options: arguments of fsspec's file system; None for those of the environment.
            settings: the limits; None for the defaults of `SyncSettings`.

        Raises:
            ValueError: as in `Objects` for the URL, and in `WeightSync` for the engines.
        """
        self._objects = Objects(url, options)
        self._settings = settings or SyncSettings()
        self._sync = WeightSync(engines, settings=self._settings)
        self._engines = tuple(engines)
        self._run, self._newest, self._warned = run, -1, False

    async def catch_up(self) -> CatchUp | None:
        """Update all engines to the newest version in the object store's bucket. Return None if no
        update is published there, or all engines already serve that version.

        An engine gets the updates that it missed, merged into one, or the last anchor and the
        updates after it if that is shorter, or if the engine's weights are not those of its
        version. The first time that the bucket is empty, a warning is logged.

        Raises:
            UpdateDamaged: an object is missing or damaged; no engine has changed.
            UpdateRefused: the bucket has another run, or went back to an older version.
            TransportError: the store does not respond.
            SyncError: no engine took the update; the message has the reasons.
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
            health = healths[engine.name]
            if health.status == "SERVING" and health.version == newest.version:
                current = EngineOutcome(outcome="committed", version=newest.version)
                outcomes[engine.name] = current
            elif health.status == "DEAD":
                outcomes[engine.name] = given_up(health, "it does not answer")
            elif (health.version or 0) > newest.version:
                raise UpdateRefused(
                    f"engine {engine.name} serves version {health.version}, and "
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
        # Second try, from an anchor: an engine's weights may differ from those of its version.
        for base in (versions.pop() if len(versions) == 1 else None, None):
            if not behind or index.chain(base) == chain:
                break
            chain = index.chain(base)
            reading = await asyncio.to_thread(Chain, self._objects, index.run, chain)
            attempt = UpdateAttempt(behind, reading.update, self._settings, Phases(None))
            await attempt.run(reading.buckets(self._settings.bucket_bytes), None)
            updates, bytes_read = updates + len(chain), bytes_read + reading.bytes_read
            pause_s += attempt.pause_s
            outcomes |= attempt.outcomes
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
            details = "; ".join(f"{name}: {outcome.detail}" for name, outcome in outcomes.items())
            raise SyncError(f"no engine took version {newest.version} of {index.run}: {details}")
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
