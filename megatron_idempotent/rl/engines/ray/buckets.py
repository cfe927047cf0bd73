"""Sends buckets to actors, a few at a time, with one copy of each in Ray's store."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from megatron_idempotent.patching.per_process import PerProcessDict
from megatron_idempotent.rl.weights import Bucket

from .actor import pack


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class BucketRef:
    """Keeps a bucket in Ray's store while some engine is to take it. Example: `held.ref`."""

    key: tuple[Any, int]
    bucket: Bucket
    """The bucket itself, kept so that no other object gets its id."""
    storing: asyncio.Future[Any]
    users: int = 0

    @property
    def ref(self) -> Any:
        """The reference that Ray passes on."""
        return self.storing.result()

    def release(self) -> None:
        """Let go for one engine, which has it or wants it no more; once for each `hold`."""
        self.users -= 1
        if not self.users:
            _held.pop(self.key, None)


_held: dict[tuple[Any, int], BucketRef] = PerProcessDict(__name__, "_held")


async def hold(ray: Any, bucket: Bucket) -> BucketRef:
    """Copy a bucket into the store, or share the copy that is there for another engine.

    After the return its sender may free or change it. Errors: Ray's, if the store has no room.
    """
    loop = asyncio.get_running_loop()
    key = (loop, id(bucket))
    if key not in _held:
        # In a thread: tens of milliseconds for a large one.
        storing = asyncio.ensure_future(asyncio.to_thread(lambda: ray.put(pack(bucket))))
        _held[key] = BucketRef(key=key, bucket=bucket, storing=storing)
    held = _held[key]
    held.users += 1
    try:
        await asyncio.wait({held.storing})
        held.ref  # noqa: B018 - raises what went wrong
    except BaseException:
        held.release()
        raise
    return held


IN_FLIGHT = 2
"""The most buckets sent and not taken yet: one is on its way while the engine takes another."""


class ActorReceiver(Protocol):
    """Receives the buckets of one update in an actor."""

    async def hold(self, bucket: Bucket) -> BucketRef:
        """Copy a bucket: its sender may then free or change it."""
        ...

    def put(self, place: int, held: BucketRef) -> Coroutine[Any, Any, None]:
        """Send that copy with its place; returns once it is taken, or will never be."""
        ...

    async def end(self, count: int) -> None:
        """Say how many buckets there are."""
        ...


async def send(
    buckets: AsyncIterator[Bucket], receiver: ActorReceiver, staging: asyncio.Future[Any]
) -> None:
    """Pull buckets and send each, as soon as fewer than `IN_FLIGHT` are under way.

    Args:
        buckets: the update's buckets; the iterator is closed in any case.
        receiver: the actor's end, which gets them.
        staging: the engine's own call; once it is done, no more are pulled.

    Errors: those of the iterator and of the receiver.
    """
    sent: set[asyncio.Future[None]] = set()
    count = 0
    try:
        while True:
            await _until_fewer(sent, IN_FLIGHT, staging)
            bucket = await _next(buckets, staging)
            if bucket is None:
                break
            held = await receiver.hold(bucket)
            putting = asyncio.ensure_future(receiver.put(count, held))
            putting.add_done_callback(functools.partial(_release, held))
            sent.add(putting)
            count += 1
        if not staging.done():
            await receiver.end(count)
            await _until_fewer(sent, 1, staging)
    finally:
        for each in sent:
            each.cancel()
        if sent:
            await asyncio.wait(sent)
        close = getattr(buckets, "aclose", None)
        if close is not None:
            with contextlib.suppress(Exception):  # the update's own error is the one to see
                await close()


def _release(held: BucketRef, putting: asyncio.Future[None]) -> None:
    held.release()
    if not putting.cancelled():
        putting.exception()  # looked at, also where the stage's own error is raised


async def _until_fewer(
    sent: set[asyncio.Future[None]], limit: int, staging: asyncio.Future[Any]
) -> None:
    while len(sent) >= limit and not staging.done():
        await asyncio.wait((*sent, staging), return_when=asyncio.FIRST_COMPLETED)
        for each in [each for each in sent if each.done()]:
            sent.discard(each)
            if not staging.done():  # else its own error says more
                each.result()


async def _next(buckets: AsyncIterator[Bucket], staging: asyncio.Future[Any]) -> Bucket | None:
    """Returns the next bucket; None after the last one, or if the engine has stopped."""
    if staging.done():
        return None
    pulling = asyncio.ensure_future(_pulled(buckets))
    try:
        await asyncio.wait((pulling, staging), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not pulling.done():
            pulling.cancel()
            await asyncio.wait({pulling})
    if staging.done():
        return None
    return pulling.result()


async def _pulled(buckets: AsyncIterator[Bucket]) -> Bucket | None:
    try:
        return await buckets.__anext__()
    except StopAsyncIteration:
        return None
