"""Sends the policy's weights directly from the ranks; the controller only coordinates.

Senders run on the ranks that have tensors of a bucket: rank 0, or several concurrently. The
controller handles only descriptions of buckets, checksums and announcements. Importing this imports
torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

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

#: Seconds to end the ranks after a call has timed out, so that waiting for the event loop is
#: bounded.
_MARGIN_S = 60.0
#: Buckets to keep: one is being sent while the next one is made.
_BUCKETS = 2

_T = TypeVar("_T")

MakeSender = Callable[[], Sender]
"""A function that is pickled and called on ranks, such as `functools.partial(DiskSender,
folder)`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BucketOnRank:
    """Describes the part of a bucket that one rank has: names, shapes, dtypes and checksums, but no
    data. Example: `BucketOnRank.of(bucket).infos`.
    """

    index: int
    infos: tuple[TensorInfo, ...]
    checksums: Mapping[str, int]
    elements_changed: int

    @classmethod
    def of(cls, bucket: Bucket) -> BucketOnRank:
        """Describe this rank's part of a bucket, without the data, for the controller."""
        return cls(
            index=bucket.index,
            infos=tuple(TensorInfo.of(name, tensor) for name, tensor in bucket.tensors.items()),
            checksums=dict(bucket.checksums),
            elements_changed=bucket.elements_changed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DescribedBucket(Bucket):
    """A bucket without data, for the controller: its tensors are on the device "meta".

    Example: `DescribedBucket.of_ranks(parts).nbytes`.
    """

    changed: int

    @classmethod
    def of_ranks(cls, parts: Sequence[BucketOnRank]) -> DescribedBucket:
        """Combine the descriptions of all ranks' parts of one bucket into one bucket without
        data.
        """
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
        """The number of elements that the bucket transfers: all of a full tensor, and the changed
        ones of a delta.
        """
        return self.changed


class Exports:
    """A base class for workers, with the methods that `RemoteWeights` calls on every rank to export
    the weights.

    Derive a worker from it, or delegate to it. There is one export at a time; a new one ends the
    previous one. Sending ranks keep their parts of the two newest buckets until these are sent. The
    sending ranks are those whose source has a true attribute `keeps`, as in `MegatronWeights`; for
    other sources, rank 0.

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
        self._kept: dict[int, Bucket] = {}
        self._senders: dict[str, Sender] = {}

    def export_tensors(self) -> tuple[TensorInfo, ...] | None:
        """Return the name, shape and dtype of all tensors on rank 0, and None on other ranks. A
        collective.
        """
        infos = self._export_source.tensors()
        return infos if _rank() == 0 else None

    def export_begin(self, bucket_bytes: int, whole: bool | None = None) -> None:
        """Begin an export of the weights, whose buckets `export_next` makes. A collective.

        Args:
            bucket_bytes: the size of buckets.
            whole: False to export the changes since the last export. True to export everything, and
                record it so that a later export can find changes; unless the source does that, the
                sending ranks keep a copy of what they send. None to export everything without
                recording.

        Raises:
            Exception: the source's error, such as for a `bucket_bytes` below 1.
        """
        self.export_end()
        self._kept.clear()
        source: Any = self._export_source
        finds_changes = getattr(source, "finds_changes", False)
        more = {"whole": whole} if finds_changes and whole is not None else {}
        self._whole = None if finds_changes else whole
        if self._whole is not None and self._last is None:
            self._last = LastSent()
        self._export = source.buckets(bucket_bytes=bucket_bytes, **more)

    def export_next(self) -> BucketOnRank | None:
        """Make the next bucket of the export, and keep this rank's part of the bucket for the
        senders. Return the part's description, or None after the last bucket. A collective.

        Returns:
            A description of this rank's part of the bucket; None after the last bucket.

        Raises:
            RuntimeError: no export has begun.
            Exception: the source's error.
        """
        if self._export is None:
            raise RuntimeError("export_next() without an export: call export_begin() first")
        with _without_close(self._export):
            bucket = next(self._export, None)
        if bucket is None:
            return None
        if self._last is not None and self._whole is not None and self._sends():
            bucket = self._last.changed(bucket, whole=self._whole)
        self._kept[bucket.index] = bucket
        self._kept.pop(bucket.index - _BUCKETS, None)
        return BucketOnRank.of(bucket)

    def sender_open(self, key: str, make: MakeSender, update: WeightUpdate) -> Announcement | None:
        """Make a sender, keep it under `key`, and open it for an update; return the sender's
        announcement. Ranks that do not send do nothing, and return None.

        Raises:
            TransportError: the sender failed.
        """
        if not self._sends():
            return None
        sender = self._senders[key] = make()
        return asyncio.run(sender.open(update))

    def sender_step(self, key: str, step: str, index: int) -> Announcement | None:
        """Call the method `step` ("announce", "transmit" or "release") of the sender under `key`,
        for the kept bucket `index`. Ranks that do not send do nothing, and return None.

        Returns:
            The method's result; None on ranks that do not send.

        Raises:
            TransportError: the sender failed, or the bucket is no longer kept.
        """
        if not self._sends():
            return None
        bucket = self._kept.get(index)
        if bucket is None:
            raise TransportError(
                f"bucket {index} is not there to {step}: rank {_rank()} has buckets "
                f"{sorted(self._kept)}"
            )
        answer: Announcement | None = asyncio.run(getattr(self._senders[key], step)(bucket))
        return answer

    def sender_close(self, key: str) -> None:
        """Close this rank's sender under `key`. If there is none: no-op."""
        sender = self._senders.pop(key, None)
        if sender is not None:
            asyncio.run(sender.close())
        self._drop_buckets()

    def export_end(self) -> None:
        """End the export on this rank, complete or not. A collective. If no export is running:
        no-op.
        """
        export, self._export = self._export, None
        self._drop_buckets()
        if export is not None:
            end_export(export)

    def _drop_buckets(self) -> None:
        """Free the kept buckets, if the export has ended and all senders are closed."""
        if self._export is None and not self._senders:
            self._kept.clear()

    def _sends(self) -> bool:
        return bool(getattr(self._export_source, "keeps", _rank() == 0))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class RemoteWeights:
    """Implements `ChangesSource` in the controller's process, for a `WeightSync` there: its methods
    make the ranks, which are other processes, export their weights.

    Its methods block the calling thread, which must not be the event loop's: `WeightSync` iterates
    in a separate thread. `buckets` does not block and may be called in any thread. Between two
    buckets, the ranks can run other calls.

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
        """Keep the ranks and their event loop; no rank is called yet.

        Args:
            ranks: the ranks, whose worker has the methods of `Exports`.
            loop: the event loop of `ranks`.
            timeout_s: seconds for one bucket, after which the ranks count as lost.
            transport: makes the senders through which this process receives each bucket, once for
                all of its engines. None if all engines receive through `sender`; buckets then have
                no data (`DescribedBucket`).
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; allowed: seconds above 0")
        self._ranks, self._loop, self._timeout_s = ranks, loop, timeout_s
        self._transport = transport

    def sender(self, make: MakeSender) -> Sender:
        """Return a `Sender` for an engine, such as a `VllmEngine`, with which the ranks send the
        data directly to the engine.

        Each sending rank calls `make`; all results must be of the same kind.
        """
        return _RankSender(self, make)

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return the name, shape and dtype of all tensors, in the order of sending.

        Raises:
            RankFailed: the source raised on some rank.
            RanksLost: ranks are gone.
            RuntimeError: this was called in the event loop's thread.
        """
        infos: tuple[TensorInfo, ...] = self.ask("export_tensors")[0]
        return infos

    def buckets(self, *, bucket_bytes: int, whole: bool | None = None) -> RemoteBuckets:
        """Return an iterator over the weights in buckets of `bucket_bytes`; its first `next` begins
        the export on the ranks.

        `whole` is False for the changes since the last export; see `Exports.export_begin`.
        """
        if type(bucket_bytes) is not int or bucket_bytes < 1:
            raise ValueError(f"buckets() got bucket_bytes={bucket_bytes!r}; allowed: 1 or more")
        inbound = None if self._transport is None else _Inbound(self, self._transport)
        return RemoteBuckets(self, inbound, bucket_bytes, whole)

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the workers on all ranks, block until the method has ended, and return
        the results by rank. Never call this in the thread of the ranks' event loop.

        Raises:
            Exception: as in `tensors` and `call`.
        """
        return self.wait_for(self.call(method, *args), f"{method}()")

    def wait_for(self, calling: Coroutine[Any, Any, _T], doing: str) -> _T:
        """Run a coroutine in the ranks' event loop, block until the coroutine has ended, and return
        its result. Never call this in the thread of that event loop.

        Raises:
            Exception: as in `tensors` and `call`.
        """
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            calling.close()
            raise RuntimeError(
                f"{doing} would block the event loop that it waits for; call it in a thread"
            )
        try:
            future = asyncio.run_coroutine_threadsafe(calling, self._loop)
        except RuntimeError as closed:
            calling.close()
            raise RanksLost(f"{doing}: the controller's event loop is closed") from closed
        wait([future], 2 * self._timeout_s + _MARGIN_S)
        if future.cancelled() or not future.done():
            future.cancel()
            raise RanksLost(f"{doing}: the controller's event loop ended, or does not answer")
        return future.result()

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the workers on all ranks, and return the results by rank; await this in
        the ranks' event loop. A `TransportError` or `TransportTimeout` on a rank is raised as the
        same type here.

        Raises:
            RanksLost: ranks are gone.
            TransportError: a transport raised it on a rank.
            RankFailed: a rank raised another error.
        """
        try:
            return await self._ranks.call(method, *args, timeout_s=self._timeout_s)
        except RankFailed as error:
            for kind in (TransportTimeout, TransportError):
                if error.errors[0].exception_type == f"{kind.__module__}.{kind.__qualname__}":
                    raise kind(error.errors[0].message) from error
            raise


class RemoteBuckets(Iterator[Bucket]):
    """An iterator over the buckets of `RemoteWeights`: each `next` makes the ranks export one more
    bucket. Example: `next(buckets)`.
    """

    def __init__(self, weights: RemoteWeights, inbound: _Inbound | None, *begin_args: Any) -> None:
        self._weights, self._inbound, self._begin_args = weights, inbound, begin_args
        self._begun = self._ended = False

    def __next__(self) -> Bucket:
        if self._ended:
            raise StopIteration
        if not self._begun:
            self._begun = True
            self._weights.ask("export_begin", *self._begin_args)
        exported: list[BucketOnRank | None] = self._weights.ask("export_next")
        parts = [part for part in exported if part is not None]
        if not parts:
            self.close()
            raise StopIteration
        bucket = DescribedBucket.of_ranks(parts)
        return bucket if self._inbound is None else self._inbound.receive(bucket)

    def close(self) -> None:
        """End the export on all ranks, complete or not.

        A second call, or a call before the first bucket, is a no-op. Lost ranks are not an error,
        because they have nothing to end.

        Raises:
            Exception: as in `RemoteWeights.call`.
        """
        if self._begun and not self._ended:
            self._ended = True
            with contextlib.suppress(RanksLost):
                if self._inbound is not None:
                    self._inbound.close()
                self._weights.ask("export_end")


class _Inbound:
    """Brings the data of the ranks' buckets to the controller's process. Its methods block, and are
    called in the thread that iterates over `RemoteBuckets`.
    """

    def __init__(self, weights: RemoteWeights, make: MakeSender) -> None:
        self._weights, self._sender = weights, weights.sender(make)
        self._receiver: Receiver | None = None

    def receive(self, bucket: Bucket) -> Bucket:
        """Have the ranks send the data of `bucket`, which has only a description; receive the data,
        and return the complete bucket.
        """
        sender, wait_for = self._sender, self._weights.wait_for
        if self._receiver is None:
            update = WeightUpdate(id=f"export/{uuid.uuid4().hex}", version=0)
            self._receiver = receiver(wait_for(sender.open(update), "opening a sender"))
        announced = wait_for(sender.announce(bucket), "announcing a bucket")
        # Send and receive concurrently, which some transports need.
        with ThreadPoolExecutor(1, "weight-transmit") as thread:
            sending = thread.submit(wait_for, sender.transmit(bucket), "sending a bucket")
            received = self._receiver.receive(announced)
            sending.result()
        wait_for(sender.release(bucket), "releasing a bucket")
        return received

    def close(self) -> None:
        """Close the receiver in this process, and the senders on the ranks.

        Raises:
            Exception: as in `RemoteWeights.call`.
        """
        if self._receiver is not None:
            self._receiver.close()
        self._weights.wait_for(self._sender.close(), "closing a sender")


class _RankSender(Sender):
    """Implements `Sender` in the controller's process: each sending rank has a sender of its own,
    for its parts of buckets.
    """

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
            with contextlib.suppress(RanksLost):  # lost ranks have nothing to close
                # Shielded: even a cancelled close completes.
                await asyncio.shield(self._weights.call("sender_close", key))

    async def _step(self, step: str, bucket: Bucket) -> list[Any]:
        if not self._key:
            raise TransportError(f"{step}() has no update; call open() before it")
        return await self._weights.call("sender_step", self._key, step, bucket.index)


def _opened(announcements: Sequence[Announcement | None]) -> tuple[Sequence[int], Announcement]:
    """Combine the announcements of the ranks' senders, given by rank, with None for a rank that
    does not send. Return the ranks that send, and the combined announcement.
    """
    opened = {rank: sender for rank, sender in enumerate(announcements) if sender is not None}
    return tuple(opened), opened_together(list(opened.values()))


@contextlib.contextmanager
def _without_close(export: Iterator[Bucket]) -> Iterator[None]:
    """Make `close()` of a `BucketStream` a no-op during the `with` block, so that the stream does
    not close itself after an error. Other iterators stay as they are.

    Closing is a collective, which the other ranks do not enter before `export_end`.
    """
    if not isinstance(export, BucketStream):
        yield
        return
    vars(export)["close"] = lambda: None
    try:
        yield
    finally:
        del vars(export)["close"]
