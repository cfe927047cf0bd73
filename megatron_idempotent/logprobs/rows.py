"""Reads a tensor [..., V] as rows, in the order in which they lie in memory, block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: How many times as many blocks there may be for the sake of rows that follow each other.
_SHORTER = 4


class Order:
    """Orders leading dimensions by descending stride, which is the order of rows in memory.

    A view [B, S, V] of a tensor [S, B, V] is thereby read from front to back. `flat` puts vectors
    over the tokens into that order, `unflat` puts them back.
    """

    def __init__(self, tensor: Tensor) -> None:
        leading = tensor.dim() - 1
        self._order = sorted(range(leading), key=tensor.stride, reverse=True)
        self._back = [self._order.index(place) for place in range(leading)]
        self._shape = [tensor.shape[place] for place in self._order]

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a view of the tensor with its leading dimensions in this order."""
        return tensor.permute(*self._order, tensor.dim() - 1)

    def flat(self, per_token: Tensor) -> Tensor:
        """Return [...] as [N], or [..., K] as [N, K], in this order."""
        behind = range(len(self._order), per_token.dim())
        moved = per_token.permute([*self._order, *behind])
        return moved.reshape(math.prod(self._shape), *(moved.shape[place] for place in behind))

    def unflat(self, per_token_N: Tensor) -> Tensor:
        """Return [N] as [...], or [N, K] as [..., K]; undo `flat`."""
        behind = per_token_N.shape[1:]
        places = [*self._back, *range(len(self._back), len(self._back) + len(behind))]
        return per_token_N.view([*self._shape, *behind]).permute(places)


def as_matrices(*tensors: Tensor) -> tuple[list[Tensor], ...]:
    """View each tensor as a list of matrices that together are all of it.

    There is one matrix, unless some tensor is a slice whose rows no one stride leads through. The
    tensors have one shape and are cut at the same places.
    """
    try:
        return tuple([tensor.view(-1, tensor.shape[-1])] for tensor in tensors)
    except RuntimeError:  # no one stride leads from row to row
        found: tuple[list[Tensor], ...] = tuple([] for _ in tensors)
        for parts in zip(*(tensor.unbind(0) for tensor in tensors), strict=True):
            for of_tensor, of_part in zip(found, as_matrices(*parts), strict=True):
                of_tensor += of_part
        return found


class RowBlock(NamedTuple):
    """Names some rows of one panel, and their places among the kept tokens."""

    panel: int
    rows: slice | Tensor
    kept: slice

    def read(self, as_matrices: list[Tensor]) -> Tensor:
        """Return the block's rows of these panels; a view if the rows follow each other."""
        rows, matrix = self.rows, as_matrices[self.panel]
        if isinstance(rows, Tensor):
            return matrix.index_select(0, rows)
        return matrix.narrow(0, rows.start, rows.stop - rows.start)

    def view(self, as_matrices: list[Tensor]) -> Tensor | None:
        """Return a view of the block's rows; None if they do not follow each other."""
        return self.read(as_matrices) if isinstance(self.rows, slice) else None

    def write(self, as_matrices: list[Tensor], values: Tensor) -> None:
        """Write values to the block's rows of these panels, rounded to the panels' type."""
        matrix = as_matrices[self.panel]
        values = values.to(matrix.dtype)
        if isinstance(self.rows, slice):
            matrix[self.rows] = values
        else:
            matrix.index_copy_(0, self.rows, values)


def split_like(blocks: Sequence[RowBlock], per_token: Tensor) -> Sequence[Tensor]:
    """Split [N, ...] into a view for each of the blocks, which together are all kept tokens."""
    return torch.split(per_token, [each.kept.stop - each.kept.start for each in blocks])


def blocks(sizes: list[int], kept_N: Tensor | None, rows: int) -> Iterator[RowBlock]:
    """Yield blocks of at most `rows` rows: all tokens of panels of these sizes, or the kept ones.

    `kept_N` is a bool mask, or None for all tokens; the host reads it once for each panel.
    """
    masks = [None] * len(sizes) if kept_N is None else torch.split(kept_N, sizes)
    done = 0
    for panel, (size, mask) in enumerate(zip(sizes, masks, strict=True)):
        chosen = None if mask is None else mask.nonzero().squeeze(1)
        for part in _parts(size, chosen, rows):
            count = part.stop - part.start if isinstance(part, slice) else len(part)
            yield RowBlock(panel, part, slice(done, done + count))
            done += count


def _parts(size: int, chosen: Tensor | None, rows: int) -> Iterator[slice | Tensor]:
    """Cut the rows into parts of at most `rows`; as slices, without a copy, if runs are long."""
    if chosen is None:
        runs = [(0, size)]
    elif not len(chosen):
        return
    else:
        breaks = (chosen[1:] - chosen[:-1] != 1).nonzero().squeeze(1)
        if len(breaks) >= _SHORTER * -(-len(chosen) // rows):
            yield from torch.split(chosen, rows)
            return
        first = torch.cat([chosen[:1], chosen[breaks + 1]])
        last = torch.cat([chosen[breaks], chosen[-1:]])
        runs = list(zip(first.tolist(), (last + 1).tolist(), strict=True))
    for start, stop in runs:
        for row in range(start, stop, rows):
            yield slice(row, min(row + rows, stop))


def kept_places(kept_N: Tensor, count: int) -> Tensor:
    """Return the places of the `count` tokens in a bool mask, in order; int64 [count].

    `nonzero()` finds the same, but has the host wait for the device to learn their number.
    """
    place_N = torch.where(kept_N, kept_N.cumsum(0) - 1, count)
    found = place_N.new_empty(count + 1)
    found.scatter_(0, place_N, torch.arange(len(place_N), device=place_N.device))
    return found[:count]


def submask(kept_N: Tensor | None, chosen_K: Tensor) -> Tensor:
    """Return a bool mask, over all tokens, of those of the K kept ones that are chosen."""
    return chosen_K if kept_N is None else kept_N.masked_scatter(kept_N, chosen_K)


def rows_of_a_block(columns: int, workspace_bytes: int, buffers: int, dtype: torch.dtype) -> int:
    """Return the number of rows that fit into the scratch memory, at least one."""
    return max(1, workspace_bytes // (max(columns, 1) * buffers * dtype.itemsize))


def flat_indices(
    sizes: list[int], kept_N: Tensor | None, token_E: Tensor
) -> Iterator[tuple[int, slice | Tensor, Tensor]]:
    """Yield for each panel its number, which of `token_E` are in it, and their rows there.

    `token_E` are places among the kept tokens.
    """
    row_E = token_E if kept_N is None else kept_N.nonzero().squeeze(1)[token_E]
    if len(sizes) == 1:
        yield 0, slice(None), row_E
        return
    start = 0
    for panel, size in enumerate(sizes):
        chosen = ((row_E >= start) & (row_E < start + size)).nonzero().squeeze(1)
        yield panel, chosen, row_E[chosen] - start
        start += size
