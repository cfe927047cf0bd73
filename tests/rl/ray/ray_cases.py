"""Engines and workers that tests put into actors, and what tests look at in them."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from megatron_idempotent.rl.engines.transformers import TransformersEngine


class WatchedEngine(TransformersEngine):
    """Says what it is doing, and does what no engine should."""

    def __init__(self, directory, *, reads=None, **settings) -> None:
        """`reads`: so many buckets, and the others once `go_on` is called."""
        super().__init__(directory, **settings)
        self._reads = reads
        self._go_on = asyncio.Event()

    async def stage(self, update, buckets):
        async def watched():
            async for bucket in buckets:
                for tensor in bucket.tensors.values():
                    tensor.add_(0)  # would end the process where it cannot be written
                yield bucket
                if bucket.index + 1 == self._reads:
                    await self._go_on.wait()

        await super().stage(update, watched())

    async def go_on(self):
        self._go_on.set()

    async def raise_oddly(self):
        raise LookupError("odd")

    async def answer_oddly(self):
        return threading.Lock()

    async def die(self):
        os._exit(1)

    async def hang(self):
        """The whole event loop."""
        time.sleep(600)


async def make_slowly(arguments):
    """A coroutine that makes an engine from a directory and settings."""
    await asyncio.sleep(0)
    directory, settings = arguments
    return WatchedEngine(directory, **settings)


def refuse(argument):
    """A factory that cannot."""
    raise ValueError(f"no engine for {argument}")


def make_surroundings(names):
    """A worker that tells where it runs."""
    return Surroundings(names)


class Surroundings:
    def __init__(self, names) -> None:
        from megatron_idempotent.proof import cpu

        self._told = {name: os.environ.get(name) for name in names}
        self._told["cpu"] = cpu.is_enabled()

    def tell(self):
        return {**self._told, "main": threading.current_thread() is threading.main_thread()}

    def process(self):
        return os.getpid()

    def double(self, array):
        array *= 2
        return array
