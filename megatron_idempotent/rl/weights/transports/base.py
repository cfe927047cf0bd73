"""Defines senders and receivers, the code that all senders share, and errors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch

from megatron_idempotent.rl.weights.records import (
    Bucket,
    TensorInfo,
    WeightUpdate,
    field,
    refuse_misfits,
)

from .layout import FORMAT, BucketLayout

Announcement = Mapping[str, Any]
"""JSON with which workers find the bytes; the engine's client passes it to them."""


def opened_field(opened: Announcement, key: str, kind: type | tuple[type, ...]) -> Any:
    """Return a field of the announcement that a sender's `open()` returned, after checking its
    type.

    Raises:
        UpdateDamaged: the field is missing or malformed.
    """
    return field(opened, key, kind, "the sender's announcement", "pass on what open() gave")


class Receiver:
    """The base class of receivers, which receive an update's buckets in an engine's worker. Its
    methods block: call them in a separate thread.
    """

    def __init__(self, opened: Announcement) -> None:
        self._update_id = opened_field(opened, "update", str)
        self.expected: Mapping[str, TensorInfo] | None = None
        """Every tensor of the model, to check announced tensors before memory is allocated; None
        for no check."""

    def receive(self, announced: Announcement) -> Bucket:
        """Receive the announced bucket into this process's memory: the host's or, with CUDA IPC,
        its GPU's.

        Raises:
            UpdateDamaged: the bucket is incomplete, or did not arrive in time.
            UpdateMismatch: the bucket does not fit the model.
        """
        layout = BucketLayout.from_json(announced, update_id=self._update_id)
        if self.expected is not None:
            refuse_misfits(self._update_id, layout.tensors, self.expected)
        return self._receive(layout, announced)

    def _receive(self, layout: BucketLayout, announced: Announcement) -> Bucket:
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources that receiving the update uses. A second call is a no-op."""


class TransportError(RuntimeError):
    """A transfer failed; close the sender, then open it again."""


class TransportTimeout(TransportError):
    """The other end of a transfer did not connect or respond in time."""


_T = TypeVar("_T")


class Session:
    """The base class of sessions: a session sends one update for a `Sender`. Its methods block; the
    sender calls them one at a time, in one thread.
    """

    def announce(self, layout: BucketLayout, bucket: Bucket) -> Mapping[str, Any]:
        """Prepare a bucket for the receivers, such as by writing it to a file. Return the JSON
        fields with which receivers find the bucket; the sender adds the fields of `layout`.
        """
        return {}

    def transmit(self, layout: BucketLayout, bucket: Bucket) -> None:
        """Send a bucket's bytes, if the transport needs sender and receivers at the same time, as a
        broadcast does; otherwise a no-op.
        """

    def release(self, index: int) -> None:
        """Free the resources of the bucket with this index, once all workers have received it."""

    def close(self) -> None:
        """End the sending of the update, complete or not. Called once, after all other methods."""


class Sender:
    """The base class of senders, which send an update's buckets from the trainer to the workers of
    one engine.

        opened = await sender.open(update)            # pass it to the engine's workers
        for bucket in buckets:
            announced = await sender.announce(bucket)
            # pass it to the workers, and concurrently:
            await sender.transmit(bucket)
        await sender.close()

    Subclasses make a session per update. The session runs in a separate thread, so that the event
    loop is not blocked, and `close` runs even if an earlier call was cancelled and is still
    running.
    """

    kind: str
    """The transport's name in announcements."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._session: Session | None = None
        self._update: WeightUpdate | None = None

    def _begin(self, update: WeightUpdate) -> tuple[Session, Mapping[str, Any]]:
        """Make the session that sends an update. Return the session, and the fields that this
        transport adds to the announcement.
        """
        raise NotImplementedError

    async def open(self, update: WeightUpdate) -> Announcement:
        """Begin to send an update; return the announcement, from which `receiver()` makes a
        receiver in each worker.

        Raises:
            TransportError: another update is open.
        """
        if self._thread is not None:
            open_id = self._update.id if self._update else "?"
            raise TransportError(
                f"{type(self).__name__} has update {open_id!r} open, so {update.id!r} cannot "
                "begin; close() it first"
            )
        self._update = update
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"weights-{self.kind}")
        beginning = self._thread.submit(self._begin, update)
        try:
            session, fields = await asyncio.wrap_future(beginning)
        except BaseException:
            # After a cancellation it may still begin: discard the session afterwards, in its
            # thread.
            self._thread.submit(_discard, beginning)
            self._thread.shutdown(wait=False)
            self._thread = None
            raise
        self._session = session
        return {"format": FORMAT, "kind": self.kind, "update": update.id, **fields}

    async def announce(self, bucket: Bucket) -> Announcement:
        """Prepare a bucket; return its announcement, with which workers can start to receive it."""
        session, layout = self._opened("announce"), self._layout(bucket)
        fields = await self._call(lambda: session.announce(layout, bucket))
        return {**layout.as_json(), **fields}

    async def transmit(self, bucket: Bucket) -> None:
        """Send a bucket's bytes, if the transport needs sender and receivers at the same time, as a
        broadcast does; otherwise a no-op.
        """
        session, layout = self._opened("transmit"), self._layout(bucket)
        await self._call(lambda: session.transmit(layout, bucket))

    async def release(self, bucket: Bucket) -> None:
        """Free the resources of a bucket that was sent; call it once all workers have received the
        bucket.
        """
        session, index = self._opened("release"), bucket.index
        await self._call(lambda: session.release(index))

    async def close(self) -> None:
        """End the sending of the update, complete or not, and remove the buckets that are still
        stored for the update. A second call is a no-op.
        """
        thread, session = self._thread, self._session
        if thread is None or session is None:
            return
        self._thread = self._session = None
        closing = thread.submit(session.close)
        thread.shutdown(wait=False)
        # Shielded: even a cancelled close completes.
        await asyncio.shield(asyncio.wrap_future(closing))

    def _opened(self, method: str) -> Session:
        if self._session is None:
            raise TransportError(
                f"{type(self).__name__}.{method}() has no update; call open() before it"
            )
        return self._session

    def _layout(self, bucket: Bucket) -> BucketLayout:
        assert self._update is not None
        return BucketLayout.of(self._update.id, bucket)

    async def _call(self, function: Callable[[], _T]) -> _T:
        assert self._thread is not None
        return await asyncio.wrap_future(self._thread.submit(function))


def _discard(beginning: Future[tuple[Session, Mapping[str, Any]]]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result()[0].close()


#: Workers read one segment while the next bucket is written to the other.
_SEGMENTS = 2


class SharedMemory(Protocol):
    """The protocol of a memory segment that other processes can open."""

    nbytes: int
    flat_N: torch.Tensor
    """The memory as bytes, uint8 [nbytes]."""

    def announced(self) -> Mapping[str, Any]:
        """Return the JSON with which a receiver opens the memory."""
        ...

    def unlink(self) -> None:
        """Free the memory segment."""
        ...


class TwoSegments(Session):
    """A session that copies each bucket to one of two shared memory segments, and keeps the copy
    there until the bucket is released.
    """

    def __init__(
        self,
        update_id: str,
        *,
        make: Callable[[int], SharedMemory],
        copying: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Prepare to send an update; `announce` allocates a segment when it needs one.

        Args:
            update_id: the update's id, for errors.
            make: allocates shared memory with at least the given number of bytes.
            copying: makes the context manager in which a bucket is copied.
        """
        self._update_id, self._make, self._copying = update_id, make, copying
        self._free: list[SharedMemory] = []
        self._taken: dict[int, SharedMemory] = {}

    def announce(self, layout: BucketLayout, bucket: Bucket) -> Mapping[str, Any]:
        """Copy a bucket to a free segment; return the JSON with which a receiver opens the segment.

        Raises:
            TransportError: both segments have buckets that are not released yet.
        """
        self.release(layout.index)  # from an earlier attempt
        segment = self._segment(layout.nbytes)
        self._taken[layout.index] = segment
        with self._copying():
            layout.pack(bucket.tensors, segment.flat_N)
        return segment.announced()

    def _segment(self, nbytes: int) -> SharedMemory:
        if len(self._taken) == _SEGMENTS:
            raise TransportError(
                f"update {self._update_id}: buckets {sorted(self._taken)} hold both segments; "
                "release() one, once its workers have it"
            )
        for index, segment in enumerate(self._free):
            if segment.nbytes >= nbytes:
                return self._free.pop(index)
        if len(self._taken) + len(self._free) == _SEGMENTS:
            self._free.pop().unlink()  # too small
        return self._make(nbytes)

    def release(self, index: int) -> None:
        """Make the segment that holds the bucket with this index available for another bucket."""
        if index in self._taken:
            self._free.append(self._taken.pop(index))

    def close(self) -> None:
        """Free all memory segments, including those whose buckets are not released."""
        for segment in (*self._free, *self._taken.values()):
            segment.unlink()
        self._free.clear()
        self._taken.clear()
