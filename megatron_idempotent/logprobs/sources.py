"""Reads logits from a tensor, or as products of hidden states and a weight.

Legend: n, b some of N tokens, K columns of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from .asked import Columns
from .parts import Parts, Product
from .rows import blocks, panels, places, rows_of_a_block


class Source(Protocol):
    """The logits of the tokens that are computed, of this rank's columns without padding."""

    dtype: torch.dtype

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """All of them, some tokens [n, V] at a time."""

    def of(self, token_b: Tensor) -> Tensor:
        """Returns the logits of these tokens, [b, V]."""

    def at(self, column_NK: Tensor) -> Tensor:
        """Returns the logits at some columns of each token, [N, K]."""


class Logits:
    """Logits [..., V] that are there, in the order of `Order`."""

    def __init__(
        self, rows: Tensor, kept_N: Tensor | None, columns: Columns, workspace_bytes: int
    ) -> None:
        self.dtype = rows.dtype
        self._panels = [panel[:, : columns.real] for panel in panels(rows)[0]]
        self._sizes = [len(panel) for panel in self._panels]
        self._kept_N, self._columns, self._workspace = kept_N, columns, workspace_bytes

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Views where all tokens are computed."""
        if not self._panels:
            return
        rows = rows_of_a_block(self._columns.real, self._workspace, 2, self.dtype)
        for block in blocks(self._sizes, self._kept_N, rows):
            yield block.kept, block.read(self._panels)

    def of(self, token_b: Tensor) -> Tensor:
        found = token_b.new_empty(len(token_b), self._columns.real, dtype=self.dtype)
        for panel, chosen, row in places(self._sizes, self._kept_N, token_b):
            found[chosen] = self._panels[panel][row]
        return found

    def at(self, column_NK: Tensor) -> Tensor:
        found = column_NK.new_empty(column_NK.shape, dtype=self.dtype)
        everyone = torch.arange(len(column_NK), device=column_NK.device)
        for panel, chosen, row in places(self._sizes, self._kept_N, everyone):
            found[chosen] = self._panels[panel][row[:, None], column_NK[chosen]]
        return found


class Products:
    """Logits that are made of hidden states [N, H] and a weight [V, H]."""

    def __init__(
        self, hidden_NH: Tensor, weight_VH: Tensor, columns: Columns, parts: Parts
    ) -> None:
        self._hidden_NH, self._weight_VH = hidden_NH, weight_VH[: columns.real]
        self._parts, self.dtype = parts, hidden_NH.dtype

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        weight_HV = self._weight_VH.t()
        columns = len(self._weight_VH)
        product = Product()
        for tokens in self._parts.of_tokens(len(self._hidden_NH), columns, self.dtype):
            yield tokens, product(self._hidden_NH[tokens], weight_HV)

    def of(self, token_b: Tensor) -> Tensor:
        return self._hidden_NH[token_b] @ self._weight_VH.t()

    def at(self, column_NK: Tensor) -> Tensor:
        """Only columns that some token has are multiplied."""
        used_U, place_NK = torch.unique(column_NK, return_inverse=True)
        found = self._hidden_NH.new_empty(column_NK.shape)
        if not len(self._weight_VH):
            return found
        weight_HU = self._weight_VH[used_U].t()
        for tokens in self._parts.of_tokens(len(found), len(used_U), self.dtype):
            found[tokens] = (self._hidden_NH[tokens] @ weight_HU).gather(1, place_NK[tokens])
        return found
