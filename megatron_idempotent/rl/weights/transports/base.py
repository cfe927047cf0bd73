"""Defines the two ends of a transport, the part that all senders share, and their errors."""

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
"""JSON that the engine's controller passes on, so that its workers find the bytes."""


def opened_field(opened: Announcement, key: str, kind: type | tuple[type, ...]) -> Any:
    """Return a field of a sender's announcement. Errors: `UpdateDamaged`."""
    return field(opened, key, kind, "the sender's announcement", "pass on what open() gave")


class Receiver:
    """Receives buckets in a worker. Its methods block: call them in a thread, beside the model."""

    def __init__(self, opened: Announcement) -> None:
        self._update_id = opened_field(opened, "update", str)
        self.expected: Mapping[str, TensorInfo] | None = None
        """Every tensor of the model, which announced tensors are held to before there is memory for
        them; None to take any."""

    def receive(self, announced: Announcement) -> Bucket:
        """Return the bucket, in memory of this process: the CPU's, or its GPU's over CUDA IPC.

        Errors: `UpdateDamaged` for a bucket that is incomplete, or did not come in time;
            `UpdateMismatch` for one that does not fit the model.
        """
        layout = BucketLayout.from_json(announced, update_id=self._update_id)
        if self.expected is not None:
            refuse_misfits(self._update_id, layout.tensors, self.expected)
        return self._receive(layout, announced)

    def _receive(self, layout: BucketLayout, announced: Announcement) -> Bucket:
        raise NotImplementedError

    def close(self) -> None:
        """Leave the update that `open` announced. Twice: no-op."""


class TransportError(RuntimeError):
    """A transfer cannot be begun or finished; close the sender, then open it again."""


class TransportTimeout(TransportError):
    """The other end did not come, or did not answer, in time."""


_T = TypeVar("_T")


class Session:
    """Sends one update. Its methods block; they are called in turn, on one thread."""

    def announce(self, layout: BucketLayout, bucket: Bucket) -> Mapping[str, Any]:
        """See `Sender.announce`. Return what a receiver needs in addition to the layout."""
        return {}

    def transmit(self, layout: BucketLayout, bucket: Bucket) -> None:
        """See `Sender.transmit`."""

    def release(self, index: int) -> None:
        """See `Sender.release`."""

    def close(self) -> None:
        """See `Sender.close`. Called once, after all other methods."""


class Sender:
    """Sends buckets from the trainer; each engine has a sender of its own.

        opened = await sender.open(update)            # pass it to the engine's workers
        for bucket in buckets:
            announced = await sender.announce(bucket)
            # pass it to the workers, and at the same time:
            await sender.transmit(bucket)
        await sender.close()

    Each update has a session, which subclasses begin. The session is called on a thread of its own,
    so that the event loop goes on meanwhile, and `close` runs even after a call that was cancelled
    and still runs.
    """

    kind: str
    """The transport's name in announcements."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._session: Session | None = None
        self._update: WeightUpdate | None = None

    def _begin(self, update: WeightUpdate) -> tuple[Session, Mapping[str, Any]]:
        """Return a session, and what a receiver needs to find it."""
        raise NotImplementedError

    async def open(self, update: WeightUpdate) -> Announcement:
        """Begin an update; return what `receiver()` needs, its "kind" among it.

        Errors: `TransportError` while another update is open.
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
            # Cancelled, it may still begin: what it made is discarded after it, on the same thread.
            self._thread.submit(_discard, beginning)
            self._thread.shutdown(wait=False)
            self._thread = None
            raise
        self._session = session
        return {"format": FORMAT, "kind": self.kind, "update": update.id, **fields}

    async def announce(self, bucket: Bucket) -> Announcement:
        """Return the bucket's metadata, once it is where workers find it or about to come."""
        session, layout = self._opened("announce"), self._layout(bucket)
        fields = await self._call(lambda: session.announce(layout, bucket))
        return {**layout.as_json(), **fields}

    async def transmit(self, bucket: Bucket) -> None:
        """Send the bucket's bytes where that takes both ends at once; elsewhere a no-op."""
        session, layout = self._opened("transmit"), self._layout(bucket)
        await self._call(lambda: session.transmit(layout, bucket))

    async def release(self, bucket: Bucket) -> None:
        """Free what the bucket held, once all workers have it."""
        session, index = self._opened("release"), bucket.index
        await self._call(lambda: session.release(index))

    async def close(self) -> None:
        """End the update, complete or not, and leave no bytes. Twice: no-op."""
        thread, session = self._thread, self._session
        if thread is None or session is None:
            return
        self._thread = self._session = None
        closing = thread.submit(session.close)
        thread.shutdown(wait=False)
        # Shielded: a close that is cancelled closes all the same.
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
    """Gives memory that other processes can open."""

    nbytes: int
    flat_N: torch.Tensor
    """The whole memory as bytes, [nbytes] of uint8."""

    def announced(self) -> Mapping[str, Any]:
        """Return the JSON with which a receiver opens it."""
        ...

    def unlink(self) -> None:
        """Give the memory back."""
        ...


class TwoSegments(Session):
    """Keeps each bucket of an update in one of two segments until it is released."""

    def __init__(
        self,
        update_id: str,
        *,
        make: Callable[[int], SharedMemory],
        copying: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """
        Args:
            update_id: the update's id, for errors.
            make: makes memory of at least the given number of bytes.
            copying: the context in which a bucket is copied.
        """
        self._update_id, self._make, self._copying = update_id, make, copying
        self._free: list[SharedMemory] = []
        self._taken: dict[int, SharedMemory] = {}

    def announce(self, layout: BucketLayout, bucket: Bucket) -> Mapping[str, Any]:
        """See `Session.announce`."""
        self.release(layout.index)  # of a first try
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
        for place, segment in enumerate(self._free):
            if segment.nbytes >= nbytes:
                return self._free.pop(place)
        if len(self._taken) + len(self._free) == _SEGMENTS:
            self._free.pop().unlink()  # too small
        return self._make(nbytes)

    def release(self, index: int) -> None:
        """See `Session.release`."""
        if index in self._taken:
            self._free.append(self._taken.pop(index))

    def close(self) -> None:
        """See `Session.close`."""
        for segment in (*self._free, *self._taken.values()):
            segment.unlink()
        self._free.clear()
        self._taken.clear()
