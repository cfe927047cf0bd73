"""Brings the policy's weights from its ranks to the controller's process.

Importing this imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import torch
import torch.distributed as dist

from megatron_idempotent.rl.hf.buckets import BucketStream
from megatron_idempotent.rl.weights.records import Bucket, TensorInfo, WeightSource, end_export

from .protocol import RankGroup, RanksLost

#: Seconds, after those of a call, for the ranks to be ended; so the wait for the loop has a bound.
_MARGIN_S = 60.0


class Exports:
    """Gives a worker the four methods that `RemoteWeights` calls, over a source of its rank.

    Derive a worker from it, or hand its methods on. There is one export at a time; a new one ends
    the one before.

    Example:
        class Worker(Exports):
            def __init__(self, chunks, arch):
                super().__init__(MegatronWeights(chunks, arch))
    """

    def __init__(self, source: WeightSource) -> None:
        self._export_source = source
        self._export: Iterator[Bucket] | None = None

    def export_tensors(self) -> tuple[TensorInfo, ...] | None:
        """Return all tensors, on rank 0; None on others. Collective."""
        infos = self._export_source.tensors()
        return infos if self._keeps() else None

    def export_begin(self, bucket_bytes: int, whole: bool = True) -> None:
        """Begin an export, with whole=False of what has changed; see `ChangesSource`. Collective.

        Errors: those of the source, as for a `bucket_bytes` below 1.
        """
        self.export_end()
        source: Any = self._export_source
        more = {} if whole else {"whole": False}
        self._export = source.buckets(bucket_bytes=bucket_bytes, **more)

    def export_next(self) -> Bucket | None:
        """Return rank 0's next bucket, on the CPU; None on others and after the last. Collective.

        Errors: `RuntimeError` if no export has begun; those of the source.
        """
        if self._export is None:
            raise RuntimeError("export_next() without an export: call export_begin() first")
        with _held_open(self._export):
            bucket = next(self._export, None)
        if bucket is None or not self._keeps():
            return None
        tensors = {
            name: torch.Tensor.cpu(tensor.detach()).contiguous()
            for name, tensor in bucket.tensors.items()
        }
        return Bucket(index=bucket.index, tensors=tensors, checksums=dict(bucket.checksums))

    def export_end(self) -> None:
        """End the export, also half-way. Collective. Without one: no-op."""
        export, self._export = self._export, None
        if export is not None:
            end_export(export)

    def _keeps(self) -> bool:
        return not dist.is_initialized() or dist.get_rank() == 0


class RemoteWeights:
    """Implements `WeightSource` for ranks in other processes, for the controller's `WeightSync`.

    Its methods block the thread that calls them, which must not be the event loop's: `WeightSync`
    iterates in a thread of its own. `buckets` itself does nothing yet, and may be called anywhere.
    Buckets come from rank 0, by its connection; between two of them the ranks are free for calls.

    Example: `await sync.update(RemoteWeights(ranks, asyncio.get_running_loop()), version)`.
    """

    def __init__(
        self,
        ranks: RankGroup,
        loop: asyncio.AbstractEventLoop,
        *,
        timeout_s: float = 300.0,
        finds_changes: bool = False,
    ) -> None:
        """
        Args:
            ranks: the ranks, whose worker has the methods of `Exports`.
            loop: the event loop on which these are called.
            timeout_s: seconds for one bucket, after which the ranks count as lost.
            finds_changes: True if the ranks' source is a `ChangesSource` that finds them.
        """
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; allowed: seconds above 0")
        self._ranks, self._loop, self._timeout_s = ranks, loop, timeout_s
        self.finds_changes = finds_changes

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return all tensors in the order in which they are sent.

        Errors: `RankFailed`, `RanksLost`; `RuntimeError` in the event loop's own thread.
        """
        infos: tuple[TensorInfo, ...] = self.ask("export_tensors")
        return infos

    def buckets(self, *, bucket_bytes: int, whole: bool = True) -> RemoteBuckets:
        """Return the weights in buckets of `bucket_bytes`; the export begins with the first.

        With whole=False it is what has changed since the last one; see `ChangesSource`.
        """
        if type(bucket_bytes) is not int or bucket_bytes < 1:
            raise ValueError(f"buckets() got bucket_bytes={bucket_bytes!r}; allowed: 1 or more")
        return RemoteBuckets(self, bucket_bytes, whole)

    def ask(self, method: str, *args: Any) -> Any:
        """Call a method on all ranks, and return rank 0's result. Errors: as for `tensors`."""
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            raise RuntimeError(
                f"{method}() would block the event loop that it waits for; call it in a thread"
            )
        calling = self._ranks.call(method, *args, timeout_s=self._timeout_s)
        try:
            asked = asyncio.run_coroutine_threadsafe(calling, self._loop)
        except RuntimeError as closed:
            calling.close()
            raise RanksLost(f"{method}(): the controller's event loop is closed") from closed
        wait([asked], 2 * self._timeout_s + _MARGIN_S)
        if asked.cancelled() or not asked.done():
            asked.cancel()
            raise RanksLost(f"{method}(): the controller's event loop ended, or does not answer")
        return asked.result()[0]


class RemoteBuckets(Iterator[Bucket]):
    """Iterates once over the buckets of `RemoteWeights`. Example: `next(buckets)`."""

    def __init__(self, weights: RemoteWeights, *asked: Any) -> None:
        self._weights, self._asked = weights, asked
        self._begun = self._ended = False

    def __next__(self) -> Bucket:
        if self._ended:
            raise StopIteration
        if not self._begun:
            self._begun = True
            self._weights.ask("export_begin", *self._asked)
        bucket: Bucket | None = self._weights.ask("export_next")
        if bucket is None:
            self.close()
            raise StopIteration
        return bucket

    def close(self) -> None:
        """End the export on all ranks, also half-way. Twice, or before the first bucket: no-op.

        Errors: as for a bucket, except that lost ranks are no error: they have nothing to end.
        """
        if self._begun and not self._ended:
            self._ended = True
            with contextlib.suppress(RanksLost):
                self._weights.ask("export_end")


@contextlib.contextmanager
def _held_open(export: Iterator[Bucket]) -> Iterator[None]:
    """Keep a stream from closing itself on an error, which takes all ranks into its close.

    The others have returned by then, and come to the end of the collective in `export_end`.
    """
    if not isinstance(export, BucketStream):
        yield
        return
    vars(export)["close"] = lambda: None
    try:
        yield
    finally:
        del vars(export)["close"]
