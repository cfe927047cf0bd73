"""Defines the buckets of an update, and the sources that give a trainer's weights in buckets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from .records import DELTA, TensorInfo, checksum

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bucket:
    """Holds some tensors of an update, whole, in the model's order; nobody may change them.

    Example: `Bucket.of(0, {"model.norm.weight": tensor})`.
    """

    index: int
    """Counts the buckets of one update from 0."""
    tensors: Mapping[str, torch.Tensor]
    checksums: Mapping[str, int]
    """`checksum()` of each tensor by name, computed where the tensor was made."""

    @classmethod
    def of(cls, index: int, tensors: Mapping[str, torch.Tensor]) -> Bucket:
        """Return a bucket with the checksums of its tensors."""
        return cls(
            index=index,
            tensors=dict(tensors),
            checksums={name: checksum(tensor) for name, tensor in tensors.items()},
        )

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    @property
    def elements_changed(self) -> int:
        """The number of elements that the bucket brings, in tensors and in deltas."""
        return sum(changed_elements(name, tensor) for name, tensor in self.tensors.items())


def changed_elements(name: str, tensor: torch.Tensor) -> int:
    """Return how many elements a sent tensor, or a delta, brings: all of a tensor."""
    if not name.endswith(DELTA):
        return tensor.numel()
    from .deltas import EncodedDelta  # engines without tensors do without torch

    return EncodedDelta(tensor.cpu()).changed


class WeightSource(Protocol):
    """Gives a trainer's weights under Hugging Face names. Every method is collective: all enter.

    `hf.MegatronWeights` and `hf.FSDPWeights` are two such sources.
    """

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return all tensors in the order in which they are sent; the same on all ranks.

        Moves no data.
        """
        ...

    def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
        """Yield the weights in buckets of up to `bucket_bytes`, at least one tensor each.

        Only rank 0 of the trainer gets tensors, unless the source has others send theirs, too; the
        others get as many buckets without any, and must take them all. A bucket is made when it is
        asked for. If the iterator has `close()`, as generators do, that ends an iteration half-way,
        and the other ranks' with it.
        """
        ...


class ChangesSource(WeightSource, Protocol):
    """Finds by itself what has changed, on the ranks that have it. `finds_changes` is True."""

    finds_changes: bool

    def buckets(self, *, bucket_bytes: int, whole: bool = True) -> Iterator[Bucket]:
        """Yield what has changed since the last iteration, or everything with `whole`.

        Rank 0's `whole` holds on all ranks. Tensors that have changed come as deltas, under their
        name and `DELTA`, or whole, and the others do not come.
        """
        ...


def end_export(buckets: Iterator[Bucket]) -> None:
    """End an iteration of `WeightSource.buckets` half-way, if its iterator has `close()`."""
    close = getattr(buckets, "close", None)
    if close is not None:
        close()
