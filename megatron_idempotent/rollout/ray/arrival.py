"""The buckets of an update in the engine's process, in their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from megatron_idempotent.weights import Bucket

from .wire import PackedBucket, unpack


class Arrival:
    """An async iterator of buckets that calls from elsewhere fill.

    Ray may run calls in another order than they were made in, so each bucket comes with its place.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, PackedBucket] = {}
        self._next = 0
        self._wanted = 0
        self._count: int | None = None
        self._closed = False
        self._changed = asyncio.Condition()

    async def wanted(self) -> bool:
        """Wait until the engine reads; False where it ends without."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._wanted > 0 or self._closed)
            return self._wanted > 0

    async def put(self, place: int, packed: PackedBucket) -> None:
        """Hand a bucket over; returns once the engine has taken it, or will never."""
        async with self._changed:
            self._waiting[place] = packed
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._next > place or self._closed)

    async def end(self, count: int) -> None:
        """There are so many buckets."""
        async with self._changed:
            self._count = count
            self._changed.notify_all()

    async def close(self) -> None:
        """The engine reads no more."""
        async with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def __aiter__(self) -> AsyncIterator[Bucket]:
        return self

    async def __anext__(self) -> Bucket:
        async with self._changed:
            self._wanted += 1
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._next in self._waiting or self._at_end())
            if self._at_end():
                raise StopAsyncIteration
            packed = self._waiting.pop(self._next)
            self._next += 1
            self._changed.notify_all()
        return await asyncio.to_thread(unpack, packed)

    def _at_end(self) -> bool:
        return self._closed or self._count == self._next
