"""Shares one export among all engines: each bucket is made once, for all remaining engines."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from megatron_idempotent.rl.weights import Bucket
from megatron_idempotent.rl.weights.records import end_export

from .records import SyncError

if TYPE_CHECKING:
    from megatron_idempotent.rl.weights.last_sent import LastSent

Made = TypeVar("Made")


class Reader:
    """An async iterator over the buckets of an export for one engine; `FanOut.reader` makes it.

    If the engine is too slow, `dropped` is set, and it gets no more buckets.
    """

    def __init__(self, on_change: Callable[[Reader], None]) -> None:
        self._on_change = on_change
        self._wanted_buckets = 0
        self._handed: asyncio.Queue[Bucket | SyncError | None] = asyncio.Queue()
        self._gone = False
        self.dropped = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Bucket]:
        return self

    async def __anext__(self) -> Bucket:
        self._wanted_buckets += 1
        self._on_change(self)
        item = await self._handed.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, SyncError):
            raise item
        return item

    def leave(self) -> None:
        """Tell the `FanOut` that this reader takes no more buckets; the other readers continue."""
        self._gone = True
        self._on_change(self)

    @property
    def _silent(self) -> bool:
        return not self._wanted_buckets and not self._gone

    def _drop(self) -> None:
        self._gone = True
        self.dropped.set()

    def _give(self, bucket: Bucket) -> None:
        if not self._gone:
            self._wanted_buckets -= 1
            self._hand(bucket)

    def _hand(self, item: Bucket | SyncError | None) -> None:
        self._handed.put_nowait(item)


class FanOut:
    """Passes the buckets of one export to the readers of several engines. All readers get a bucket
    together, once each has requested one.

    Readers get a bucket once all of them have requested it; the next one is made meanwhile, so two
    are in memory. Readers that do not request it in time are dropped together, so that several slow
    readers delay the others only once. If no reader is left, the export still runs to its end,
    because the trainer's other ranks take part in it.

    Example:
        fan_out = FanOut(source.buckets(bucket_bytes=1 << 28), bucket_timeout_s=60.0)
        readers = [fan_out.reader() for engine in engines]
        await fan_out.run()      # concurrently with the engines
    """

    def __init__(self, buckets: Iterator[Bucket], *, bucket_timeout_s: float) -> None:
        self._buckets = buckets
        self._bucket_timeout_s = bucket_timeout_s
        self._readers: list[Reader] = []
        self._silent: set[Reader] = set()
        self._all_ready: asyncio.Future[None] | None = None

    def reader(self) -> Reader:
        """Add a reader for one more engine, and return it; call this before `run`."""
        self._readers.append(Reader(self._on_reader_change))
        return self._readers[-1]

    async def run(self) -> None:
        """Take all buckets from the export, and pass each bucket to all readers, until the export
        ends or fails.

        An error of the export is raised here, and readers get a `SyncError` with its text. If this
        is cancelled, it closes the source, so that the trainer's other ranks can finish their
        export.

        Raises:
            Exception: the export's error.
        """
        end: SyncError | None = SyncError("the export of the weights was stopped half-way")
        with _export_thread() as thread:
            step = functools.partial(next, self._buckets, None)
            try:
                while (bucket := await _run_to_end(thread, step)) is not None:
                    await self._wait_for_all()
                    for reader in self._readers:
                        reader._give(bucket)
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

    async def _wait_for_all(self) -> None:
        """Wait until every reader has requested a bucket or left. Drop the readers that have not
        done so within the time limit.
        """
        self._silent = {reader for reader in self._readers if reader._silent}
        if not self._silent:
            return
        self._all_ready = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(self._all_ready, self._bucket_timeout_s)
        except asyncio.TimeoutError:
            for reader in self._silent:
                reader._drop()
        finally:
            self._all_ready = None

    def _on_reader_change(self, reader: Reader) -> None:
        self._silent.discard(reader)
        if self._all_ready is not None and not self._silent and not self._all_ready.done():
            self._all_ready.set_result(None)


async def _run_to_end(thread: ThreadPoolExecutor, step: Callable[[], Made]) -> Made:
    """Run `step`, which may be a collective, in the executor's thread, and return the result. If
    the caller is cancelled, first wait until `step` has ended.
    """
    running = asyncio.get_running_loop().run_in_executor(thread, step)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def _export_thread() -> ThreadPoolExecutor:
    """Make an executor with one thread for the export, and set the caller's current CUDA device in
    this thread, because the setting is per thread.
    """
    torch = sys.modules.get("torch")  # weights without tensors need none
    if torch is None or not torch.cuda.is_available():
        return ThreadPoolExecutor(1, "weight-export")
    return ThreadPoolExecutor(
        1, "weight-export", torch.cuda.set_device, (torch.cuda.current_device(),)
    )


class Outgoing:
    """Iterates over the buckets to send for one update, and counts bytes, tensors and elements.

    Given a copy of what was sent last, it replaces changed tensors by deltas and omits unchanged
    tensors. A source may do that itself.

    Example: `for bucket in outgoing.buckets(): …` and then `outgoing.bytes_sent`.
    """

    def __init__(self, buckets: Iterator[Bucket], last: LastSent | None, *, whole: bool) -> None:
        """Take the buckets of an export, without beginning it, and set all counts to 0.

        Args:
            buckets: the buckets of the export.
            last: a copy of what was sent last, to compare with and update; None to send the buckets
                unchanged.
            whole: True to send every tensor in full.
        """
        self.bytes_sent = self.tensors_sent = self.elements_changed = 0
        self.encode_s = 0.0
        self.size = (0, 0)
        """Elements and bytes of the tensors that the export yielded in full."""
        self._buckets, self._last, self._whole = buckets, last, whole

    def buckets(self) -> Generator[Bucket, None, None]:
        """Yield the buckets to send, and count what they contain; call this once. Closing the
        generator ends the export.
        """
        try:
            while True:
                started = time.perf_counter()
                sent = bucket = next(self._buckets, None)
                if self._last is not None:
                    started = time.perf_counter()
                    if bucket is not None:
                        sent = self._last.changed(bucket, whole=self._whole)
                if not self._whole:
                    self.encode_s += time.perf_counter() - started
                if bucket is None or sent is None:
                    return
                if self._whole or self._last is not None:
                    elements = sum(tensor.numel() for tensor in bucket.tensors.values())
                    self.size = self.size[0] + elements, self.size[1] + bucket.nbytes
                self.bytes_sent += sent.nbytes
                self.tensors_sent += len(sent.tensors)
                self.elements_changed += sent.elements_changed
                yield sent
        finally:
            end_export(self._buckets)
