"""Iterates over weights on all ranks in lock-step, and lets ranks leave early."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import torch
import torch.distributed as dist

from megatron_idempotent.rl.weights.records import Bucket, TensorInfo

Named = Iterator[tuple[str, torch.Tensor]]
Convert = Callable[[Named], Named]


Fetch = Callable[[range], Mapping[str, torch.Tensor]]
"""Brings some tensors by name to rank 0, and none to others.

All ranks enter, with the same range, each range once.
"""


def split(sizes: Sequence[int], most: int) -> list[range]:
    """Split members into consecutive ranges whose sizes add up to at most `most` each.

    A member that is larger has a range of its own.
    """
    ranges: list[range] = []
    start = total = 0
    for member, size in enumerate(sizes):
        if member > start and total + size > most:
            ranges.append(range(start, member))
            start, total = member, 0
        total += size
    return ranges + ([range(start, len(sizes))] if sizes else [])


class BucketStream(Iterator[Bucket]):
    """Yields the buckets of `WeightSource.buckets`; each rank takes all, or closes its stream.

    Closing, which leaving a `with` block does too, takes this rank through the rest of the
    collective and keeps nothing, so that the others come to its end. A stream that is dropped
    half-way warns (`ResourceWarning`), and other ranks wait. An exception while a bucket is made
    closes the stream, unless communication failed: then the process group can no longer be used,
    and nothing more is tried.

    Example:
        with source.buckets(bucket_bytes=1 << 30) as buckets:
            for bucket in buckets:
                send(bucket)
    """

    def __init__(
        self,
        units: Sequence[Sequence[TensorInfo]],
        fetch: Fetch,
        *,
        sources: Sequence[int] | None = None,
        bucket_bytes: int,
        convert: Convert | None = None,
        checksums: dict[str, int] | None = None,
        keeps: bool,
    ) -> None:
        """
        Args:
            units: the tensors to yield, in order; those of a unit come in one bucket.
            fetch: brings to rank 0 the tensors that units are made from.
            sources: for each unit the number of the fetched tensor that it is made from, which
                never decreases; None for the unit's own number.
            bucket_bytes: the most bytes of units in a bucket, which has at least one.
            convert: makes all units' tensors from the fetched ones, in turn, on rank 0; None if
                they are the same.
            checksums: is given those of the buckets; None for nothing.
            keeps: True on rank 0, which keeps the tensors.
        """
        sources = range(len(units)) if sources is None else sources
        self._feed = _Feed(fetch, sources[-1] + 1 if sources else 0)
        weakref.finalize(self, _warn_if_waited_for, self._feed).atexit = False
        if type(bucket_bytes) is not int or bucket_bytes < 1:
            self.close()  # the other ranks may have been given another number
            raise ValueError(f"buckets() got bucket_bytes={bucket_bytes!r}; allowed: 1 or more")
        sizes = [sum(info.nbytes for info in infos) for infos in units]
        self._ranges = split(sizes, bucket_bytes)
        self._units, self._sources = units, sources
        self._index, self._checksums = 0, checksums
        self._converted = convert(self._feed.one_by_one()) if convert and keeps else None

    def __next__(self) -> Bucket:
        if self._feed.closed or self._index == len(self._ranges):
            raise StopIteration
        members = self._ranges[self._index]
        try:
            if self._converted is None:
                tensors = self._feed.take_until(self._sources[members.stop - 1] + 1)
            else:
                count = sum(len(self._units[member]) for member in members)
                tensors = dict(islice(self._converted, count))
                if members.stop == len(self._units):
                    next(self._converted, None)  # which checks what it can only at the end
            bucket = Bucket.of(self._index, tensors)
            if self._checksums is not None:
                self._checksums.update(bucket.checksums)
        except BaseException:
            self.close()
            raise
        self._index += 1
        return bucket

    def __enter__(self) -> BucketStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Take this rank through the rest of the collective, and keep nothing. Twice: no-op."""
        self._feed.drain()


def _warn_if_waited_for(feed: _Feed) -> None:
    # No collective from here: which ranks collect garbage, and when, nobody knows.
    if feed.is_waited_for and dist.is_initialized():
        warnings.warn(
            f"an export was dropped after {feed.done} of {feed.count} tensors, and other ranks "
            "may wait in it: close() it, or use it in a with statement",
            ResourceWarning,
            stacklevel=2,
        )


class _Feed:
    """Tracks this rank's progress in the collective."""

    def __init__(self, fetch: Fetch, count: int) -> None:
        self._fetch, self.count = fetch, count
        self.done = 0
        self._broken = self.closed = False

    @property
    def is_waited_for(self) -> bool:
        """True while other ranks may wait for this one in the rest of the collective."""
        return self.done < self.count and not self._broken

    def take_until(self, stop: int) -> Mapping[str, torch.Tensor]:
        self._broken = True  # until it has come back
        tensors = self._fetch(range(self.done, stop))
        self._broken = False
        self.done = stop
        return tensors

    def one_by_one(self) -> Named:
        while self.done < self.count:
            yield from self.take_until(self.done + 1).items()

    def drain(self) -> None:
        self.closed = True
        while self.is_waited_for:
            self.take_until(self.done + 1)
