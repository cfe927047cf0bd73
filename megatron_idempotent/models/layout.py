"""Maps the elements of Hugging Face tensors to Megatron's parameters.

A parameter of Megatron, put together from all of its tensor-parallel shards along one dimension,
is a row of blocks of Hugging Face tensors, and shard r of n is the r-th n-th of that row. That one
description covers fused and interleaved projections, padded vocabularies and more tensor-parallel
ranks than heads of keys; loading and exporting both read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch


class Block(NamedTuple):
    """Consecutive rows, or columns, of a Hugging Face tensor; padding where `name` is None."""

    name: str | None
    start: int
    size: int


class Share(NamedTuple):
    """The part of one Hugging Face tensor in one shard: a range of it along `dim`."""

    name: str
    dim: int
    start: int
    size: int
    segments: tuple[tuple[int, int], ...]
    """The places of the part in the shard, in order: start and size along `dim`."""

    @property
    def place(self) -> tuple[str, int, int, int]:
        """The key that replicas of the same elements have in common."""
        return self.name, self.dim, self.start, self.size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One matrix or vector of a parameter, and what it is made of.

    Example: `Slot(parameter="decoder.final_layernorm.weight", blocks=(Block("n", 0, 64),))`.
    """

    parameter: str
    """Megatron's name in the chunk."""
    blocks: tuple[Block, ...]
    dim: int = 0
    rank: int = 0
    """The index of this shard of the parameter, and the number of shards."""
    count: int = 1
    grouped: tuple[int, int] | None = None
    """The expert's index, and their number, in the old GroupedMLP's weight of all local experts."""

    @property
    def size(self) -> int:
        """The size of the whole row of blocks."""
        return sum(block.size for block in self.blocks)

    @property
    def local_size(self) -> int:
        """The size of this shard along `dim`."""
        return self.size // self.count

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slot's elements in a parameter, oriented as Hugging Face has them; no copy."""
        if self.grouped is None:
            return tensor
        expert, experts = self.grouped
        inputs, outputs = tensor.shape
        if self.dim == 0:  # [H, E x 2F], which is used as [E, H, 2F]
            return tensor.view(experts, inputs, outputs // experts)[expert].T
        return tensor.view(experts, inputs // experts, outputs)[expert].T

    def shares(self) -> tuple[Share, ...]:
        """The parts that this shard holds, by Hugging Face tensor, in the order of the blocks."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for name, start, local, size in self._pieces():
            if name is not None:
                found.setdefault(name, []).append((start, local, size))
        return tuple(self._share(name, pieces) for name, pieces in found.items())

    def padding(self) -> tuple[tuple[int, int], ...]:
        """Rows of this shard that belong to no tensor: start and size."""
        return tuple((local, size) for name, _, local, size in self._pieces() if name is None)

    def _pieces(self) -> Iterable[tuple[str | None, int, int, int]]:
        low = self.rank * self.local_size
        high = low + self.local_size
        at = 0
        for block in self.blocks:
            first, last = max(low, at), min(high, at + block.size)
            if first < last:
                yield block.name, block.start + first - at, first - low, last - first
            at += block.size

    def _share(self, name: str, pieces: Sequence[tuple[int, int, int]]) -> Share:
        starts = [start for start, _, _ in pieces]
        sizes = [size for _, _, size in pieces]
        total = sum(sizes)
        # Blocks of a tensor come in its order, and a shard is consecutive: no gap can be between.
        assert all(
            start + size == following
            for start, size, following in zip(starts, sizes, starts[1:], strict=False)
        ), f"{self.parameter}: parts of {name} are not consecutive"
        segments = tuple((local, size) for _, local, size in pieces)
        return Share(name, self.dim, starts[0], total, segments)


def qkv_blocks(names: Sequence[str], *, heads: int, groups: int, head_dim: int) -> list[Block]:
    """Queries of a group, its keys, its values, and so on with the next group."""
    query, key, value = names
    rows = heads // groups * head_dim
    blocks = []
    for group in range(groups):
        blocks.append(Block(query, group * rows, rows))
        blocks.append(Block(key, group * head_dim, head_dim))
        blocks.append(Block(value, group * head_dim, head_dim))
    return blocks


def gate_up_blocks(names: Sequence[str], *, ffn: int, count: int) -> list[Block]:
    """Returns the blocks of `count` shards that each have their part of the gate, then of `up`."""
    rows = ffn // count
    return [Block(name, shard * rows, rows) for shard in range(count) for name in names]


def vocab_blocks(name: str, *, vocab_size: int, padded: int) -> list[Block]:
    """The vocabulary, and rows that no token has."""
    blocks = [Block(name, 0, vocab_size)]
    return blocks + ([Block(None, 0, padded - vocab_size)] if padded > vocab_size else [])
