"""Hosts an engine in a Ray actor: takes calls by number, and puts an update's buckets in order."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import pickle
import traceback
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import torch

from megatron_idempotent.rl.engines import protocol as engine_errors
from megatron_idempotent.rl.weights import Bucket, TensorInfo, WeightUpdate
from megatron_idempotent.rl.weights import records as weights_errors

_CLASSES: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        engine_errors.EngineDead,
        engine_errors.EngineTimeout,
        engine_errors.EngineUnsupported,
        engine_errors.EngineError,
        weights_errors.UpdateMismatch,
        weights_errors.UpdateDamaged,
        weights_errors.UpdateRefused,
        weights_errors.WeightsError,
        ValueError,
    )
}
"""Errors that an engine's caller tells apart, by name; subclasses come before their bases."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallResult:
    """Holds the result of a call on the engine. Example: `answer.unwrap("engine-0")`."""

    value: Any = None
    kind: str = ""
    """The name of the error's class; "" if the call has returned."""
    message: str = ""
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception) -> CallResult:
        """Return the result of a call that raised, without any of the engine's own classes."""
        kind = next((name for name, known in _CLASSES.items() if isinstance(error, known)), "other")
        message = str(error) if kind != "other" else f"{type(error).__name__}: {error}"
        return cls(kind=kind, message=message, traceback="".join(traceback.format_exception(error)))

    def unwrap(self, name: str) -> Any:
        """Return the value, or raise the error: of its own class if known, else `EngineError`."""
        if not self.kind:
            return self.value
        known = _CLASSES.get(self.kind)
        if known is not None:
            raise known(self.message)
        raise engine_errors.EngineError(f"{name} raised {self.message}\n{self.traceback}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedBucket:
    """Holds a bucket as arrays of bytes, which Ray passes on without copies of its own.

    Ray would copy pickled tensors three times. Example: `unpack(pack(bucket))`.
    """

    index: int
    tensors: tuple[tuple[TensorInfo, Any], ...]
    """The description of each tensor, with its bytes as a uint8 array."""
    checksums: dict[str, int]


def pack(bucket: Bucket) -> PackedBucket:
    """Return a bucket as bytes in host memory."""
    return PackedBucket(
        index=bucket.index,
        tensors=tuple(
            (
                TensorInfo.of(name, tensor),
                tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(),
            )
            for name, tensor in bucket.tensors.items()
        ),
        checksums=dict(bucket.checksums),
    )


def unpack(packed: PackedBucket) -> Bucket:
    """Return the bucket, in memory of its own.

    What Ray hands out is shared and cannot be written.
    """
    tensors = {info.name: _tensor(info, data) for info, data in packed.tensors}
    return Bucket(index=packed.index, tensors=tensors, checksums=packed.checksums)


def _tensor(info: TensorInfo, data: Any) -> torch.Tensor:
    if not data.size:  # torch has no view of nothing in another type
        return torch.empty(info.shape, dtype=info.dtype)
    return torch.from_numpy(data.copy()).view(info.dtype).reshape(info.shape)


class BucketQueue:
    """Iterates, asynchronously, over buckets that other calls put in.

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
        """Wait until the engine reads, and return True; False if it ends before that."""
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
        """Say how many buckets there are."""
        async with self._changed:
            self._count = count
            self._changed.notify_all()

    async def close(self) -> None:
        """End the buckets: the engine reads no more."""
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


class HostedEngine:
    """Hosts an engine as a Ray actor. All methods are coroutines, which Ray runs in one event loop.

    Ray may run calls in another order than they were made in: a call may be given up before it
    has begun.
    """

    def __init__(self) -> None:
        self._engine: Any = None
        self._calls: dict[int, asyncio.Task[Any]] = {}
        self._given_up: set[int] = set()
        self._arrivals: dict[int, BucketQueue] = {}

    async def open(self, factory: str, argument: bytes) -> CallResult:
        """Make the engine; awaits it if the factory is a coroutine."""
        try:
            module, _, name = factory.partition(":")
            made = getattr(importlib.import_module(module), name)(pickle.loads(argument))
            self._engine = await made if inspect.isawaitable(made) else made
        except Exception as error:  # noqa: BLE001 - an answer like any other
            return CallResult.of(error)
        return CallResult()

    async def call(self, number: int, method: str, arguments: tuple[Any, ...]) -> CallResult:
        """Run a method of the engine."""
        return await self._run(number, getattr(self._engine, method)(*arguments))

    async def expect(self, number: int) -> None:
        """Make a queue for the buckets of the stage with this number."""
        self._arrivals[number] = BucketQueue()

    async def forget(self, number: int) -> None:
        """Drop the queue of a stage, for which nothing more comes."""
        arrival = self._arrivals.pop(number, None)
        if arrival is not None:
            await arrival.close()

    async def stage(self, number: int, update: WeightUpdate) -> CallResult:
        """Run the engine's `stage` on buckets that `put` brings."""
        arrival = self._arrivals[number]
        try:
            return await self._run(number, self._engine.stage(update, arrival))
        finally:
            await arrival.close()

    async def wanted(self, number: int) -> bool:
        """Wait until the stage reads, and return True; False if it ends before that."""
        arrival = self._arrivals.get(number)
        return arrival is not None and await arrival.wanted()

    async def put(self, number: int, place: int, packed: PackedBucket) -> None:
        """Hand over a bucket; return once it is taken, or will never be."""
        if number in self._arrivals:
            await self._arrivals[number].put(place, packed)

    async def end(self, number: int, count: int) -> None:
        """Say how many buckets there are."""
        if number in self._arrivals:
            await self._arrivals[number].end(count)

    async def give_up(self, number: int) -> None:
        """Cancel a call, begun or not; returns once it has ended."""
        task = self._calls.get(number)
        if task is None:
            self._given_up.add(number)
            return
        task.cancel()
        await asyncio.wait({task})

    async def _run(self, number: int, doing: Coroutine[Any, Any, Any]) -> CallResult:
        if number in self._given_up:
            self._given_up.discard(number)
            doing.close()
            return CallResult.of(asyncio.TimeoutError("given up before it began"))
        task = self._calls[number] = asyncio.ensure_future(doing)
        try:
            await asyncio.wait({task})
        finally:
            del self._calls[number]
        if task.cancelled():
            return CallResult.of(asyncio.TimeoutError("given up"))
        error = task.exception()
        if error is None:
            return CallResult(value=task.result())
        return CallResult.of(error if isinstance(error, Exception) else RuntimeError(repr(error)))
