"""One export for all engines: each bucket is made once, and handed to whoever still wants it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from megatron_idempotent.weights import Bucket
from megatron_idempotent.weights.records import end_export

from .records import SyncError

Made = TypeVar("Made")


class Reader:
    """One engine's buckets, as an async iterator. `FanOut.reader` makes it.

    `dropped` is set where the engine was too slow; it gets no more.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Semaphore(0)
        self._handed: asyncio.Queue[Bucket | SyncError | None] = asyncio.Queue()
        self._gone = False
        self.dropped = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Bucket]:
        return self

    async def __anext__(self) -> Bucket:
        self._asked.release()
        found = await self._handed.get()
        if found is None:
            raise StopAsyncIteration
        if isinstance(found, SyncError):
            raise found
        return found

    def leave(self) -> None:
        """Want no more; buckets go on to the others."""
        self._gone = True
        self._asked.release()

    async def _wants_more(self, limit_s: float) -> bool:
        if not self._gone:
            try:
                await asyncio.wait_for(self._asked.acquire(), limit_s)
            except asyncio.TimeoutError:
                self.leave()
                self.dropped.set()
        return not self._gone

    def _hand(self, what: Bucket | SyncError | None) -> None:
        self._handed.put_nowait(what)


class FanOut:
    """Hands the buckets of one export to several readers, in lock-step.

    A bucket is handed over once every reader has asked for it, and the next is made meanwhile, so
    two are alive. A reader that does not ask in time is dropped, so that it cannot hold up the
    others. Where none is left, the export still runs to its end: the trainer's other ranks take
    part in it.

    Example:
        fan_out = FanOut(source.buckets(bucket_bytes=1 << 28), bucket_timeout_s=60.0)
        readers = [fan_out.reader() for engine in engines]
        await fan_out.run()      # beside the engines that read
    """

    def __init__(self, buckets: Iterator[Bucket], *, bucket_timeout_s: float) -> None:
        self._buckets = buckets
        self._bucket_timeout_s = bucket_timeout_s
        self._readers: list[Reader] = []

    def reader(self) -> Reader:
        """One more reader; before `run`."""
        self._readers.append(Reader())
        return self._readers[-1]

    async def run(self) -> None:
        """Make and hand over all buckets.

        An error of the export is raised here, and readers get a `SyncError` that tells of it. When
        cancelled, the source is closed, which lets the trainer's other ranks come to their end.
        """
        end: SyncError | None = SyncError("the export of the weights was stopped half-way")
        with _export_thread() as thread:
            step = functools.partial(next, self._buckets, None)
            try:
                while (bucket := await _run_to_end(thread, step)) is not None:
                    for reader in self._readers:
                        if await reader._wants_more(self._bucket_timeout_s):
                            reader._hand(bucket)
                end = None
            except Exception as error:
                end = SyncError(f"the export of the weights failed: {error!r}")
                end.__cause__ = error
                raise
            finally:
                for reader in self._readers:
                    reader._hand(end)
                if end is not None:
                    await _run_to_end(thread, functools.partial(end_export, self._buckets))


async def _run_to_end(thread: ThreadPoolExecutor, step: Callable[[], Made]) -> Made:
    """What `step` makes. A cancelled caller leaves once the thread is out of its collective."""
    running = asyncio.get_running_loop().run_in_executor(thread, step)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _export_thread() -> ThreadPoolExecutor:
    """A thread of its own, on the caller's device: the current CUDA device is a thread's."""
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(1, "weight-export")
    return ThreadPoolExecutor(
        1, "weight-export", torch.cuda.set_device, (torch.cuda.current_device(),)
    )
