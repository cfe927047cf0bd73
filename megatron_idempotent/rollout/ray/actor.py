"""An engine in a Ray actor: calls on it by number, so that each can be given up."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pickle
from collections.abc import Coroutine
from typing import Any

from megatron_idempotent.weights import WeightUpdate

from .arrival import Arrival
from .wire import Answer, PackedBucket


class HostedEngine:
    """The actor class. All methods are coroutines, so Ray runs them in one event loop.

    Ray may run calls in another order than they were made in: a call may be given up before it
    has begun.
    """

    def __init__(self) -> None:
        self._engine: Any = None
        self._calls: dict[int, asyncio.Task[Any]] = {}
        self._given_up: set[int] = set()
        self._arrivals: dict[int, Arrival] = {}

    async def open(self, factory: str, argument: bytes) -> Answer:
        """Make the engine, and await it where the factory is a coroutine."""
        try:
            module, _, name = factory.partition(":")
            made = getattr(importlib.import_module(module), name)(pickle.loads(argument))
            self._engine = await made if inspect.isawaitable(made) else made
        except Exception as error:  # noqa: BLE001 - an answer like any other
            return Answer.of(error)
        return Answer()

    async def call(self, number: int, method: str, arguments: tuple[Any, ...]) -> Answer:
        """Run a method of the engine."""
        return await self._run(number, getattr(self._engine, method)(*arguments))

    async def expect(self, number: int) -> None:
        """Make ready for a stage of that number."""
        self._arrivals[number] = Arrival()

    async def forget(self, number: int) -> None:
        """Nothing more comes for it."""
        arrival = self._arrivals.pop(number, None)
        if arrival is not None:
            await arrival.close()

    async def stage(self, number: int, update: WeightUpdate) -> Answer:
        """Run the engine's `stage` on buckets that `put` brings."""
        arrival = self._arrivals[number]
        try:
            return await self._run(number, self._engine.stage(update, arrival))
        finally:
            await arrival.close()

    async def wanted(self, number: int) -> bool:
        """Wait until the stage reads; False where it ends without."""
        arrival = self._arrivals.get(number)
        return arrival is not None and await arrival.wanted()

    async def put(self, number: int, place: int, packed: PackedBucket) -> None:
        """A bucket for it; returns once it is taken, or will never be."""
        if number in self._arrivals:
            await self._arrivals[number].put(place, packed)

    async def end(self, number: int, count: int) -> None:
        """There are so many."""
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

    async def _run(self, number: int, doing: Coroutine[Any, Any, Any]) -> Answer:
        if number in self._given_up:
            self._given_up.discard(number)
            doing.close()
            return Answer.of(asyncio.TimeoutError("given up before it began"))
        task = self._calls[number] = asyncio.ensure_future(doing)
        try:
            await asyncio.wait({task})
        finally:
            del self._calls[number]
        if task.cancelled():
            return Answer.of(asyncio.TimeoutError("given up"))
        error = task.exception()
        if error is None:
            return Answer(value=task.result())
        return Answer.of(error if isinstance(error, Exception) else RuntimeError(repr(error)))
