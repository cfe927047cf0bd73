"""Iterates over weights on all ranks in lock-step; a rank may stop early."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest

import torch
import torch.distributed as dist

from megatron_idempotent.rl.weights.records import Bucket, TensorInfo

Named = Iterator[tuple[str, torch.Tensor]]
Convert = Callable[[Named], Named]


Fetch = Callable[[Sequence[int]], Mapping[str, torch.Tensor]]
"""Fetches tensors by their index; returns those that this rank keeps, by name.

A collective: all ranks call it with the same indices, each index once.
"""


def split(sizes: Sequence[int], most: int) -> list[range]:
    """Split the indices of `sizes` into consecutive ranges. The sizes of a range sum to at most
    `most`, except that a size above `most` has a range of its own.
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
    """Iterates over the buckets of an export, as `WeightSource.buckets` returns them. Every rank
    must take all buckets, or close its stream.

    `close()`, also at the end of a `with` block, takes part in the rest of the collective without
    keeping tensors, so that the other ranks can finish. A stream that is dropped midway warns
    (`ResourceWarning`), and the other ranks hang. An exception while a bucket is made closes the
    stream, unless communication failed, which makes the process group unusable.

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
        keepers: Sequence[int],
        rank: int,
        bucket_bytes: int,
        convert: Convert | None = None,
        checksums: dict[str, int] | None = None,
    ) -> None:
        """Divide the units (tensors that must share a bucket) among buckets; nothing is fetched
        before the first `next`.

        Args:
            units: the tensors to yield, in order; the tensors of a unit share a bucket.
            fetch: sends the tensors that units are made from to their keepers.
            keepers: for each unit the rank that keeps it. Several keepers fill their parts of a
                bucket concurrently.
            rank: this rank.
            bucket_bytes: the most bytes in a bucket, summed over all ranks; each keeper with units
                left has at least one unit in a bucket.
            convert: makes a keeper's tensors from the fetched ones, in order; None if they are
                identical.
            checksums: receives the checksums of the buckets; None to skip that.
        """
        self._feed = _Feed(fetch, len(units))
        weakref.finalize(self, _warn_if_waited_for, self._feed).atexit = False
        if type(bucket_bytes) is not int or bucket_bytes < 1:
            self.close()  # other ranks may have passed a valid number, and wait for this one
            raise ValueError(f"buckets() got bucket_bytes={bucket_bytes!r}; allowed: 1 or more")
        self._ends: list[tuple[int, int]] = []
        """The number of tensors that this rank keeps in each bucket, and the number of fetched
        tensors after which the bucket is complete."""
        order: list[int] = []
        for parts in _side_by_side(units, keepers, bucket_bytes):
            order += (unit for part in parts for unit in part)
            kept_units = (unit for part in parts for unit in part if keepers[unit] == rank)
            self._ends.append((sum(len(units[unit]) for unit in kept_units), len(order)))
        self._feed.order = order
        self._index, self._checksums = 0, checksums
        keeps = rank in keepers
        self._converted = convert(self._feed.one_by_one()) if convert and keeps else None

    def __next__(self) -> Bucket:
        if self._feed.closed or self._index == len(self._ends):
            raise StopIteration
        count, end = self._ends[self._index]
        try:
            if self._converted is None:
                tensors = self._feed.take_until(end)
            else:
                tensors = dict(islice(self._converted, count))
                if self._index + 1 == len(self._ends):
                    next(self._converted, None)  # runs the final checks of `convert`
                self._feed.take_until(end)  # take part in fetching the other keepers' tensors
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
        """Take part in the rest of the export's collective, keeping no tensors. A second call is a
        no-op.
        """
        self._feed.drain()


def _side_by_side(
    units: Sequence[Sequence[TensorInfo]], keepers: Sequence[int], bucket_bytes: int
) -> Iterator[Sequence[Sequence[int]]]:
    """Divide units, tensors that must share a bucket, among buckets. Each unit has a keeper, the
    rank that gets its tensors. Yield for each bucket one list per keeper: the indices of the
    keeper's units in this bucket.
    """
    by_keeper: dict[int, list[int]] = {}
    for unit, keeper in enumerate(keepers):
        by_keeper.setdefault(keeper, []).append(unit)
    most = max(1, bucket_bytes // max(1, len(by_keeper)))
    columns = []
    for numbers in by_keeper.values():
        sizes = [sum(info.nbytes for info in units[unit]) for unit in numbers]
        columns.append([numbers[members.start : members.stop] for members in split(sizes, most)])
    yield from zip_longest(*columns, fillvalue=())


def _warn_if_waited_for(feed: _Feed) -> None:
    # No collective here: ranks collect garbage at different times.
    if feed.is_waited_for and dist.is_initialized():
        warnings.warn(
            f"an export was dropped after {feed.done} of {feed.count} tensors, and other ranks "
            "may wait in it: close() it, or use it in a with statement",
            ResourceWarning,
            stacklevel=2,
        )


class _Feed:
    """Fetches an export's tensors in order, and counts how many were fetched. A rank that stops
    early thus knows how many collective fetches of the other ranks it must still join.
    """

    def __init__(self, fetch: Fetch, count: int) -> None:
        self._fetch, self.count = fetch, count
        self.order: Sequence[int] = range(count)
        self.done = 0
        self._broken = self.closed = False

    @property
    def is_waited_for(self) -> bool:
        """True while other ranks may wait for this rank in the rest of the export's collective."""
        return self.done < self.count and not self._broken

    def take_until(self, stop: int) -> Mapping[str, torch.Tensor]:
        if stop <= self.done:
            return {}
        self._broken = True  # reset when `_fetch` has returned
        tensors = self._fetch(self.order[self.done : stop])
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
