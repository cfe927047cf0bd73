"""Parts of logits that are products of hidden states and a weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .asked import accumulated
from .rows import rows_of_a_block

#: Narrower matrices are multiplied at a fraction of the speed.
NARROWEST = 256
#: Rows of a product's tiles on a GPU; the last one of a block may be empty for the most part.
TILE = 128


class Parts(NamedTuple):
    """The size of the parts in which logits are computed, and the target of gradients."""

    logits_bytes: int
    reduce: bool
    """The hidden states' are added up here, over the ranks that share the columns; else each rank
    returns its columns' share."""
    fused: bool
    """The weight's is added to its `main_grad`."""

    def of_tokens(self, tokens: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
        """All columns of some tokens."""
        rows = rows_of_a_block(columns, self.logits_bytes, 1, dtype)
        rows = rows // TILE * TILE or rows
        for start in range(0, tokens or 1, rows):  # without tokens, once none
            yield slice(start, min(start + rows, tokens))

    def of_columns(self, tokens: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
        """Some columns of all tokens, which take as much again where they are computed."""
        width = rows_of_a_block(tokens, self.logits_bytes, 1, accumulated(dtype))
        width = max(NARROWEST, width)
        for start in range(0, columns or 1, width):  # without columns, once none
            yield slice(start, min(start + width, columns))


class Product:
    """Products of matrices that are needed one after the other, in the same memory."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def __call__(self, left_nH: Tensor, right_Hv: Tensor) -> Tensor:
        """[n, v], until the next call."""
        shape = len(left_nH), right_Hv.shape[1]
        size = shape[0] * shape[1]
        if self._memory is None or self._memory.numel() < size:
            self._memory = left_nH.new_empty(size)
        return torch.mm(left_nH, right_Hv, out=self._memory[:size].view(shape))
