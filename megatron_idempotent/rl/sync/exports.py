"""Has the ranks send the policy's weights, while the controller conducts.

Senders live on the ranks that have tensors of a bucket: rank 0, or several side by side. What
passes through the controller is descriptions of buckets, checksums and announcements. Importing
this imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist

from megatron_idempotent.rl.hf.buckets import BucketStream
from megatron_idempotent.rl.weights.last_sent import LastSent
from megatron_idempotent.rl.weights.records import (
    Bucket,
    TensorInfo,
    WeightSource,
    WeightUpdate,
    end_export,
)
from megatron_idempotent.rl.weights.transports import (
    SharedMemorySender,
    TransportError,
    TransportTimeout,
    receiver,
)
from megatron_idempotent.rl.weights.transports.base import Announcement, Receiver, Sender
from megatron_idempotent.rl.weights.transports.several import announced_together, opened_together
from megatron_idempotent.rl.workers import RankFailed, RankGroup, RanksLost

#: Seconds, after those of a call, for the ranks to be ended; so the wait for the loop has a bound.
_MARGIN_S = 60.0
#: One is being sent while the next is made.
_BUCKETS = 2

MakeSender = Callable[[], Sender]
"""A function that travels to the ranks, such as `functools.partial(DiskSender, folder)`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BucketOnRank:
    """Describes what one rank holds of a bucket. Example: `BucketOnRank.of(bucket).infos`."""

    index: int
    infos: tuple[TensorInfo, ...]
    checksums: Mapping[str, int]
    elements_changed: int

    @classmethod
    def of(cls, bucket: Bucket) -> BucketOnRank:
        """Describe a bucket."""
        return cls(
            index=bucket.index,
            infos=tuple(TensorInfo.of(name, tensor) for name, tensor in bucket.tensors.items()),
            checksums=dict(bucket.checksums),
            elements_changed=bucket.elements_changed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DescribedBucket(Bucket):
    """Has the names, shapes and types of a bucket's tensors, which are on the device "meta".

    Example: `DescribedBucket.of_ranks(parts).nbytes`.
    """

    changed: int

    @classmethod
    def of_ranks(cls, parts: Sequence[BucketOnRank]) -> DescribedBucket:
        """Make one of what ranks say of their parts of one bucket."""
        return cls(
            index=parts[0].index,
            tensors={
                info.name: torch.empty(info.shape, dtype=info.dtype, device="meta")
                for part in parts
                for info in part.infos
            },
            checksums={name: value for part in parts for name, value in part.checksums.items()},
            changed=sum(part.elements_changed for part in parts),
        )

    @property
    def elements_changed(self) -> int:
        """The number of elements that the bucket brings."""
        return self.changed


class Exports:
    """Gives a worker the methods that `RemoteWeights` calls, over a source of its rank.

    Derive a worker from it, or hand its methods on. There is one export at a time; a new one ends
    the one before. Ranks keep what they have of the two newest buckets until senders have sent it.
    Those are rank 0, and others whose source says so by `keeps`, as `MegatronWeights` does.

    Example:
        class Worker(Exports):
            def __init__(self, chunks, arch):
                super().__init__(MegatronWeights(chunks, arch))
    """

    def __init__(self, source: WeightSource) -> None:
        self._export_source = source
        self._export: Iterator[Bucket] | None = None
        self._whole: bool | None = None
        self._last: LastSent | None = None
        self._held: dict[int, Bucket] = {}
        self._senders: dict[str, Sender] = {}

    def export_tensors(self) -> tuple[TensorInfo, ...] | None:
        """Return all tensors, on rank 0; None on others. Collective."""
        infos = self._export_source.tensors()
        return infos if _rank() == 0 else None

    def export_begin(self, bucket_bytes: int, whole: bool | None = None) -> None:
        """Begin an export. Collective.

        Args:
            bucket_bytes: the size of buckets.
            whole: False for what has changed since the last export, and True for everything, from
                which on changes are found, by the source if it can, else by a copy of what was
                sent, on the ranks that send. None for everything.

        Errors: those of the source, as for a `bucket_bytes` below 1.
        """
        self.export_end()
        self._held.clear()
        source: Any = self._export_source
        finds_changes = getattr(source, "finds_changes", False)
        more = {"whole": whole} if finds_changes and whole is not None else {}
        self._whole = None if finds_changes else whole
        if self._whole is not None and self._last is None:
            self._last = LastSent()
        self._export = source.buckets(bucket_bytes=bucket_bytes, **more)

    def export_next(self) -> BucketOnRank | None:
        """Make the next bucket; return what this rank has of it, None at the end. Collective.

        Errors: `RuntimeError` if no export has begun; those of the source.
        """
        if self._export is None:
            raise RuntimeError("export_next() without an export: call export_begin() first")
        with _held_open(self._export):
            bucket = next(self._export, None)
        if bucket is None:
            return None
        if self._last is not None and self._whole is not None and self._sends():
            bucket = self._last.changed(bucket, whole=self._whole)
        self._held[bucket.index] = bucket
        self._held.pop(bucket.index - _BUCKETS, None)
        return BucketOnRank.of(bucket)

    def sender_open(self, key: str, make: MakeSender, update: WeightUpdate) -> Announcement | None:
        """Make a sender, and return its announcement; None on ranks that send nothing.

        Errors: those of the sender.
        """
        if not self._sends():
            return None
        sender = self._senders[key] = make()
        return asyncio.run(sender.open(update))

    def sender_step(self, key: str, step: str, index: int) -> Announcement | None:
        """Do a step of a sender with a bucket: "announce", "transmit" or "release".

        Return None on ranks that send nothing.

        Errors: those of the sender; `TransportError` for a bucket that is no longer kept.
        """
        if not self._sends():
            return None
        bucket = self._held.get(index)
        if bucket is None:
            raise TransportError(
                f"bucket {index} is not there to {step}: rank {_rank()} has buckets "
                f"{sorted(self._held)}"
            )
        answer: Announcement | None = asyncio.run(getattr(self._senders[key], step)(bucket))
        return answer

    def sender_close(self, key: str) -> None:
        """Close this rank's sender; without one: no-op."""
        sender = self._senders.pop(key, None)
        if sender is not None:
            asyncio.run(sender.close())
        self._let_go()

    def export_end(self) -> None:
        """End the export, also half-way. Collective. Without one: no-op."""
        export, self._export = self._export, None
        self._let_go()
        if export is not None:
            end_export(export)

    def _let_go(self) -> None:
        """Let go of the last buckets, once the export has ended and nobody sends them."""
        if self._export is None and not self._senders:
            self._held.clear()

    def _sends(self) -> bool:
        return bool(getattr(self._export_source, "keeps", _rank() == 0))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class RemoteWeights:
    """Implements `ChangesSource` for ranks in other processes, for the controller's `WeightSync`.

    Its methods block the thread that calls them, which must not be the event loop's: `WeightSync`
    iterates in a thread of its own. `buckets` itself does nothing yet, and may be called anywhere.
    Between two buckets the ranks are free for calls.

    Example: `await sync.update(RemoteWeights(ranks, asyncio.get_running_loop()), version)`.
    """

    finds_changes = True

    def __init__(
        self,
        ranks: RankGroup,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float = 300.0,
        transport: MakeSender | None = SharedMemorySender,
    ) -> None:
        """
        Args:
            ranks: the ranks, whose worker has the methods of `Exports`.
            loop: the event loop on which these are called.
            timeout_s: seconds for one bucket, after which the ranks count as lost.
            transport: makes the senders on ranks from which this process receives each bucket, once
                for all engines in it. None where all engines are sent to by `sender`: buckets then
                describe tensors and have none.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; allowed: seconds above 0")
        self._ranks, self._loop, self._timeout_s = ranks, loop, timeout_s
        self._transport = transport

    def sender(self, make: MakeSender) -> Sender:
        """Return a sender for an engine, such as a `VllmEngine`, whose work is done on ranks.

        On each rank that sends, `make` makes a sender, of one kind and for that rank's machine.
        """
        return _RankSender(self, make)

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return all tensors in the order in which they are sent.

        Errors: `RankFailed`, `RanksLost`; `RuntimeError` in the event loop's own thread.
        """
        infos: tuple[TensorInfo, ...] = self.ask("export_tensors")[0]
        return infos

    def buckets(self, *, bucket_bytes: int, whole: bool | None = None) -> RemoteBuckets:
        """Return the weights in buckets of `bucket_bytes`; the export begins with the first.

        `whole` is False for what has changed since the last export; see `Exports.export_begin`.
        """
        if type(bucket_bytes) is not int or bucket_bytes < 1:
            raise ValueError(f"buckets() got bucket_bytes={bucket_bytes!r}; allowed: 1 or more")
        way = None if self._transport is None else _Way(self, self._transport)
        return RemoteBuckets(self, way, bucket_bytes, whole)

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all ranks, and return their results. Errors: as for `tensors`."""
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            raise RuntimeError(
                f"{method}() would block the event loop that it waits for; call it in a thread"
            )
        calling = self.call(method, *args)
        try:
            asked = asyncio.run_coroutine_threadsafe(calling, self._loop)
        except RuntimeError as closed:
            calling.close()
            raise RanksLost(f"{method}(): the controller's event loop is closed") from closed
        wait([asked], 2 * self._timeout_s + _MARGIN_S)
        if asked.cancelled() or not asked.done():
            asked.cancel()
            raise RanksLost(f"{method}(): the controller's event loop ended, or does not answer")
        return asked.result()

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on all ranks, on the loop, and return their results in order of rank.

        Errors: `RanksLost`; `TransportError` if a transport raised it; else `RankFailed`.
        """
        try:
            return await self._ranks.call(method, *args, timeout_s=self._timeout_s)
        except RankFailed as error:
            for kind in (TransportTimeout, TransportError):
                if error.errors[0].exception_type == f"{kind.__module__}.{kind.__qualname__}":
                    raise kind(error.errors[0].message) from error
            raise


class RemoteBuckets(Iterator[Bucket]):
    """Iterates once over the buckets of `RemoteWeights`. Example: `next(buckets)`."""

    def __init__(self, weights: RemoteWeights, way: _Way | None, *asked: Any) -> None:
        self._weights, self._way, self._asked = weights, way, asked
        self._begun = self._ended = False

    def __next__(self) -> Bucket:
        if self._ended:
            raise StopIteration
        if not self._begun:
            self._begun = True
            self._weights.ask("export_begin", *self._asked)
        exported: list[BucketOnRank | None] = self._weights.ask("export_next")
        parts = [part for part in exported if part is not None]
        if not parts:
            self.close()
            raise StopIteration
        bucket = DescribedBucket.of_ranks(parts)
        return bucket if self._way is None else self._way.receive(bucket)

    def close(self) -> None:
        """End the export on all ranks, also half-way. Twice, or before the first bucket: no-op.

        Errors: as for a bucket, except that lost ranks are no error: they have nothing to end.
        """
        if self._begun and not self._ended:
            self._ended = True
            with contextlib.suppress(RanksLost):
                if self._way is not None:
                    self._way.close()
                self._weights.ask("export_end")


class _Way:
    """Brings buckets of the ranks into this process, in the thread of the export."""

    def __init__(self, weights: RemoteWeights, make: MakeSender) -> None:
        self._weights, self._make = weights, make
        self._key = uuid.uuid4().hex
        self._receiver: Receiver | None = None
        self._senders: Sequence[int] = ()

    def receive(self, bucket: Bucket) -> Bucket:
        """Return the bucket with its tensors."""
        ask = self._weights.ask
        if self._receiver is None:
            update = WeightUpdate(id=f"export/{self._key}", version=0)
            self._senders, opened = _opened(ask("sender_open", self._key, self._make, update))
            self._receiver = receiver(opened)
        parts = ask("sender_step", self._key, "announce", bucket.index)
        announced = announced_together([parts[rank] for rank in self._senders])
        # Both ends at once, where a transport needs that.
        with ThreadPoolExecutor(1, "weight-transmit") as thread:
            sending = thread.submit(ask, "sender_step", self._key, "transmit", bucket.index)
            received = self._receiver.receive(announced)
            sending.result()
        ask("sender_step", self._key, "release", bucket.index)
        return received

    def close(self) -> None:
        """Close both ends. Errors: as for a bucket."""
        if self._receiver is not None:
            self._receiver.close()
        self._weights.ask("sender_close", self._key)


class _RankSender(Sender):
    """Implements `Sender` by one on each rank that has tensors, for its parts of buckets."""

    kind = "ranks"

    def __init__(self, weights: RemoteWeights, make: MakeSender) -> None:
        super().__init__()
        self._weights, self._make = weights, make
        self._key = ""
        self._senders: Sequence[int] = ()

    async def open(self, update: WeightUpdate) -> Announcement:
        self._key = uuid.uuid4().hex
        self._senders, opened = _opened(
            await self._weights.call("sender_open", self._key, self._make, update)
        )
        return opened

    async def announce(self, bucket: Bucket) -> Announcement:
        parts = await self._step("announce", bucket)
        return announced_together([parts[rank] for rank in self._senders])

    async def transmit(self, bucket: Bucket) -> None:
        await self._step("transmit", bucket)

    async def release(self, bucket: Bucket) -> None:
        await self._step("release", bucket)

    async def close(self) -> None:
        key, self._key = self._key, ""
        if key:
            with contextlib.suppress(RanksLost):  # which have nothing left to close
                # Shielded: a close that is cancelled closes all the same.
                await asyncio.shield(self._weights.call("sender_close", key))

    async def _step(self, step: str, bucket: Bucket) -> list[Any]:
        if not self._key:
            raise TransportError(f"{step}() has no update; call open() before it")
        return await self._weights.call("sender_step", self._key, step, bucket.index)


def _opened(announcements: Sequence[Announcement | None]) -> tuple[Sequence[int], Announcement]:
    """Return the ranks that have a sender, and one announcement of all their senders."""
    opened = {rank: sender for rank, sender in enumerate(announcements) if sender is not None}
    return tuple(opened), opened_together(list(opened.values()))


@contextlib.contextmanager
def _held_open(export: Iterator[Bucket]) -> Iterator[None]:
    """Keep a stream from closing itself on an error, which takes all ranks into its close.

    The others have returned by then, and come to the end of the collective in `export_end`.
    """
    if not isinstance(export, BucketStream):
        yield
        return
    vars(export)["close"] = lambda: None
    try:
        yield
    finally:
        del vars(export)["close"]
