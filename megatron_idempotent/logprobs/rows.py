"""Reads and writes rows of logits [..., V] in the order in which they lie in memory.

Legend: n, b some of N tokens, K columns of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

#: Rows with at least this many gaps for each block are copied into blocks by their indices; others
#: are cut at their gaps, and need no copy.
_SHORTER = 4


class Order:
    """Orders a tensor's leading dimensions by descending stride, the order of rows in memory.

    A view [B, S, V] of a tensor [S, B, V] is thereby read from front to back. `flat` puts vectors
    over the tokens into that order, `unflat` puts them back.
    """

    def __init__(self, tensor: Tensor) -> None:
        leading = tensor.dim() - 1
        self._order = sorted(range(leading), key=tensor.stride, reverse=True)
        self._back = [self._order.index(dim) for dim in range(leading)]
        self._shape = [tensor.shape[dim] for dim in self._order]

    def rows(self, tensor: Tensor) -> Tensor:
        """Return a view of a tensor with its leading dimensions permuted into this order; the last
        stays last. The constructor's tensor determines the order, not this tensor's strides.
        """
        return tensor.permute(*self._order, tensor.dim() - 1)

    def flat(self, per_token: Tensor) -> Tensor:
        """Flatten values of each token, [...] or [..., K], to [N] or [N, K], in the order of rows
        in memory.
        """
        leading = len(self._order)
        ordered = per_token.permute([*self._order, *range(leading, per_token.dim())])
        return ordered.reshape(math.prod(self._shape), *ordered.shape[leading:])

    def unflat(self, per_token_N: Tensor) -> Tensor:
        """Undo `flat`: return [N] as [...], or [N, K] as [..., K]."""
        behind = per_token_N.shape[1:]
        dims = [*self._back, *range(len(self._back), len(self._back) + len(behind))]
        return per_token_N.view([*self._shape, *behind]).permute(dims)


def as_matrices(*tensors: Tensor) -> tuple[list[Tensor], ...]:
    """Return each tensor's rows as a list of matrices, which are views.
    Such a matrix is called a panel.

    It is one matrix, unless a tensor is a slice whose rows do not have one stride. The tensors have
    one shape, and are cut at the same rows.
    """
    try:
        return tuple([tensor.view(-1, tensor.shape[-1])] for tensor in tensors)
    except RuntimeError:  # the rows do not have one stride
        panels: tuple[list[Tensor], ...] = tuple([] for _ in tensors)
        for parts in zip(*(tensor.unbind(0) for tensor in tensors), strict=True):
            for of_tensor, of_part in zip(panels, as_matrices(*parts), strict=True):
                of_tensor += of_part
        return panels


class RowBlock(NamedTuple):
    """Describes some rows of one panel (a matrix that `as_matrices` returned), and their indices
    among the kept tokens.
    """

    panel: int
    rows: slice | Tensor
    tokens: slice

    def read(self, panels: list[Tensor]) -> Tensor:
        """Return this block's rows from its panel, which is one of the matrices `panels`: a view if
        the rows are contiguous, else a copy.
        """
        rows, matrix = self.rows, panels[self.panel]
        if isinstance(rows, Tensor):
            return matrix.index_select(0, rows)
        return matrix.narrow(0, rows.start, rows.stop - rows.start)

    def write(self, panels: list[Tensor], values: Tensor) -> None:
        """Write `values` into this block's rows of its panel, which is one of the matrices
        `panels`. The values are rounded to the panel's dtype.
        """
        matrix = panels[self.panel]
        values = values.to(matrix.dtype)
        if isinstance(self.rows, slice):
            matrix[self.rows] = values
        else:
            matrix.index_copy_(0, self.rows, values)


def blocks_of(panels: list[Tensor], kept_N: Tensor | None, rows: int) -> Iterator[RowBlock]:
    """Yield `RowBlock`s of at most `rows` rows, which together cover these panels' kept tokens.
    Without a mask they cover all rows.

    `kept_N` is a bool mask, or None for all tokens; the host reads it once for each panel.
    """
    start = 0
    for panel, (matrix, mask) in enumerate(masked(panels, kept_N)):
        row_n = None if mask is None else mask.nonzero().squeeze(1)
        for part in _parts(len(matrix), row_n, rows):
            stop = start + (part.stop - part.start if isinstance(part, slice) else len(part))
            yield RowBlock(panel, part, slice(start, stop))
            start = stop


def masked(panels: list[Tensor], mask_N: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (panel, the part of the mask for its rows) pairs; (panel, None) without a mask."""
    if mask_N is None:
        return ((panel, None) for panel in panels)
    return zip(panels, torch.split(mask_N, [len(panel) for panel in panels]), strict=True)


def _parts(size: int, row_n: Tensor | None, rows: int) -> Iterator[slice | Tensor]:
    """Yield rows in parts of at most `rows`: slices if most rows are contiguous, else indices.
    A slice needs no copy.
    """
    if row_n is None:
        runs = [(0, size)]
    elif not len(row_n):
        return
    else:
        breaks = (row_n[1:] - row_n[:-1] != 1).nonzero().squeeze(1)
        if len(breaks) >= _SHORTER * -(-len(row_n) // rows):
            yield from torch.split(row_n, rows)
            return
        first = torch.cat([row_n[:1], row_n[breaks + 1]])
        last = torch.cat([row_n[breaks], row_n[-1:]])
        runs = list(zip(first.tolist(), (last + 1).tolist(), strict=True))
    for start, stop in runs:
        for row in range(start, stop, rows):
            yield slice(row, min(row + rows, stop))


def kept_places(kept_N: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` True elements of a bool mask, in order; int64 [count].

    `nonzero()` returns the same, but the host waits for the device to get their number.
    """
    place_N = torch.where(kept_N, kept_N.cumsum(0) - 1, count)
    row_n = place_N.new_empty(count + 1)
    row_n.scatter_(0, place_N, torch.arange(len(place_N), device=place_N.device))
    return row_n[:count]


def zero_others(panels: list[Tensor], kept_N: Tensor | None, columns: int) -> None:
    """Zero in place the entries of a gradient that get no value: padded columns, and rows of tokens
    not kept.
    """
    for panel, mask in masked(panels, kept_N):
        panel[:, columns:] = 0
        if mask is not None:
            panel.index_fill_(0, mask.logical_not().nonzero().squeeze(1), 0)


def submask(kept_N: Tensor | None, picked_K: Tensor) -> Tensor:
    """Return a bool mask over all tokens that is True for the tokens that `picked_K` marks among
    the K kept tokens.
    """
    return picked_K if kept_N is None else kept_N.masked_scatter(kept_N, picked_K)


def rows_of_a_block(columns: int, workspace_bytes: int, buffers: int, dtype: torch.dtype) -> int:
    """Return the number of rows that fit into the scratch memory, at least one."""
    return max(1, workspace_bytes // (max(columns, 1) * buffers * dtype.itemsize))


def flat_indices(
    panels: list[Tensor], kept_N: Tensor | None, token_E: Tensor
) -> Iterator[tuple[Tensor, slice | Tensor, Tensor]]:
    """Yield (panel, entries, rows) for each panel: `entries`, indices or a slice, selects the
    entries of `token_E` whose tokens are in this panel; `rows` has the panel's row of each of these
    tokens.

    `token_E` has indices among the kept tokens.
    """
    row_E = token_E if kept_N is None else kept_N.nonzero().squeeze(1)[token_E]
    if len(panels) == 1:
        yield panels[0], slice(None), row_E
        return
    start = 0
    for panel in panels:
        entry_e = ((row_E >= start) & (row_E < start + len(panel))).nonzero().squeeze(1)
        yield panel, entry_e, row_E[entry_e] - start
        start += len(panel)
