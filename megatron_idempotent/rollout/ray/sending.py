"""Buckets on their way to the actor: a few at a time, and none once it has stopped reading."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol

from megatron_idempotent.weights import Bucket

from .held import Held

IN_FLIGHT = 2
"""Buckets that were sent and not taken: one is on its way while the engine takes another."""


class Receiver(Protocol):
    """The other end, for one update."""

    async def hold(self, bucket: Bucket) -> Held:
        """Copy a bucket: its sender may then free or change it."""
        ...

    def put(self, place: int, held: Held) -> Coroutine[Any, Any, None]:
        """Send that copy with its place; returns once it is taken, or will never be."""
        ...

    async def end(self, count: int) -> None:
        """There are so many."""
        ...


async def send(
    buckets: AsyncIterator[Bucket], receiver: Receiver, staging: asyncio.Future[Any]
) -> None:
    """Pull buckets and send each, as soon as fewer than `IN_FLIGHT` are under way.

    Args:
        buckets: of the update; closed in any case.
        receiver: gets them.
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


def _release(held: Held, putting: asyncio.Future[None]) -> None:
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
