"""Divides items among the ranks that share a replica of the model, and gathers them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_idempotent.rl.weights import Bucket, TensorInfo, WeightSource

from .layout import RankLayout

Item = TypeVar("Item")


class Replica:
    """Knows the replica that this rank has a part of, and its other ranks.

    These ranks sample and score different prompts, and train on all of them.
    Example: `replica.share(prompts)`.
    """

    def __init__(self, layout: RankLayout) -> None:
        """Make the replica's process group. Collective over all ranks, after Megatron's groups.

        Errors: `RuntimeError` if Megatron has numbered this rank differently.
        """
        from megatron.core import parallel_state

        rank = dist.get_rank()
        found = int(parallel_state.get_data_parallel_rank())
        if found != layout.replica(rank):
            raise RuntimeError(
                f"rank {rank} is data-parallel rank {found} in Megatron, and "
                f"{layout.replica(rank)} in the layout of the run: leave Megatron's order of ranks "
                "as it is"
            )
        self._layout, self._rank = layout, rank
        groups = [list(layout.ranks_of(replica)) for replica in range(layout.replicas)]
        group, _ = dist.new_subgroups_by_enumeration(groups)
        assert isinstance(group, dist.ProcessGroup)  # each rank is in one of them
        self.group = group

    def share(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """Return this rank's items, given those of all ranks."""
        return self._layout.share(items, self._rank)

    def gather(self, mine: Sequence[Item]) -> list[Item]:
        """Return all items of the replica, in order, given one for each item of a rank's share.

        Collective over the ranks of the replica.
        """
        if self._layout.members == 1:
            return list(mine)
        shares: list[Sequence[Item]] = [()] * self._layout.members
        dist.all_gather_object(shares, tuple(mine), group=self.group)
        return self._layout.merge(shares)


class SpreadWeights:
    """Implements `WeightSource` for all ranks of a group, from a source for its first rank alone.

    So each rank can have an engine of its own. Example: `SpreadWeights(weights, group)`.
    """

    def __init__(self, source: WeightSource, group: Any) -> None:
        """Take a source that is collective in `group`; None is the default group."""
        self._source, self._group = source, group

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return name, shape and type of all tensors; see `WeightSource.tensors`."""
        return self._source.tensors()

    def buckets(self, *, bucket_bytes: int) -> SpreadBuckets:
        """Iterate over buckets with all tensors, on every rank; see `WeightSource.buckets`."""
        return SpreadBuckets(
            self._source.buckets(bucket_bytes=bucket_bytes), self.tensors(), self._group
        )


class SpreadBuckets(Iterator[Bucket]):
    """Broadcasts the buckets of a source to all ranks of a group. Example: `next(buckets)`."""

    def __init__(self, buckets: Iterator[Bucket], infos: Sequence[TensorInfo], group: Any) -> None:
        self._buckets, self._group = buckets, group
        self._infos = {info.name: info for info in infos}
        self._first = 0 if group is None else dist.get_global_rank(group, 0)
        self._ended = False

    def __next__(self) -> Bucket:
        if self._ended:
            raise StopIteration
        # Until it has come back: a collective that failed is not entered again.
        self._ended = True
        bucket = next(self._buckets, None)
        if bucket is None:
            raise StopIteration
        told: list[Any] = [dict(bucket.checksums)]
        dist.broadcast_object_list(told, self._first, group=self._group)
        checksums: dict[str, int] = told[0]
        tensors = dict(bucket.tensors)
        for name in checksums:
            if name not in tensors:
                info = self._infos[name]
                tensors[name] = torch.empty(info.shape, dtype=info.dtype, device="cuda")
            # As bytes: backends do not take all types.
            bytes_N = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
            dist.broadcast(bytes_N, self._first, group=self._group)
        self._ended = False
        return Bucket(index=bucket.index, tensors=tensors, checksums=checksums)

    def close(self) -> None:
        """Receive the buckets that are left, so that other ranks can end; may be called twice."""
        for _ in self:
            pass
