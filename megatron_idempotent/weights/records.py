"""A model's weights on their way from a trainer to an engine: what is sent, and in what pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from .checksum import checksum

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One tensor by its Hugging Face name.

    Example: `TensorInfo(name="lm_head.weight", shape=(32000, 64), dtype=torch.bfloat16)`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize

    def describe(self) -> str:
        """Type and shape in words, for errors: `bfloat16 [32000, 64]`."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON that `from_json` reads."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"name": self.name, "shape": list(self.shape), "dtype": dtype}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TensorInfo:
        """The tensor that `as_json` described. Errors: `ValueError` for a type torch lacks."""
        import torch

        dtype = getattr(torch, str(fields["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{fields['name']} has dtype {fields['dtype']!r}: torch has none such")
        return cls(name=str(fields["name"]), shape=tuple(fields["shape"]), dtype=dtype)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorInfo:
        """Returns the record of a tensor."""
        return cls(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WeightUpdate:
    """One version of the weights, to be staged and committed under one id.

    Example: `WeightUpdate(id="run-7/12", version=12)`.
    """

    id: str
    version: int
    """The trainer's version of the weights. Engines refuse one that is not above their own."""
    base_version: int | None = None
    """The version that tensors which are not sent are taken from; None where all are sent."""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("WeightUpdate() got an empty id: engines tell updates apart by it")
        if self.version < 0:
            raise ValueError(f"WeightUpdate() got version={self.version}: 0 or more")
        if self.base_version is not None and self.base_version >= self.version:
            raise ValueError(
                f"WeightUpdate() got base_version={self.base_version} and version={self.version}: "
                "an update builds on an older version"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bucket:
    """Some tensors of an update, whole, in the order of the model; they are not to be changed.

    Example: `Bucket.of(0, {"model.norm.weight": tensor})`.
    """

    index: int
    """Counts the buckets of one update from 0."""
    tensors: Mapping[str, torch.Tensor]
    checksums: Mapping[str, int]
    """`checksum()` of each tensor by name, computed where the tensor was made."""

    @classmethod
    def of(cls, index: int, tensors: Mapping[str, torch.Tensor]) -> Bucket:
        """A bucket with the checksums of its tensors."""
        return cls(
            index=index,
            tensors=dict(tensors),
            checksums={name: checksum(tensor) for name, tensor in tensors.items()},
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all of its tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class WeightSource(Protocol):
    """A trainer's weights under Hugging Face names. Every method is collective: all ranks enter.

    `models.MegatronWeights` and `models.FSDPWeights` are two.
    """

    def tensors(self) -> tuple[TensorInfo, ...]:
        """All of them in the order in which they are sent; the same on all ranks. Moves no data."""
        ...

    def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
        """Yields the weights in buckets of up to `bucket_bytes`, at least one tensor each.

        Only rank 0 of the trainer gets tensors; the others get as many buckets without any, and
        must take them all. A bucket is made when it is asked for. Where the iterator has `close()`,
        as generators do, it ends an iteration half-way, and the other ranks' with it.
        """
        ...


def end_export(buckets: Iterator[Bucket]) -> None:
    """End an iteration of `WeightSource.buckets` half-way, where it has a way to: see there."""
    close = getattr(buckets, "close", None)
    if close is not None:
        close()
