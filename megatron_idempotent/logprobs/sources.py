"""Reads logits from a tensor, or multiplies hidden states by a weight to make them.

It also adds up the gradients of both: the weight's goes into a tensor of its own, or straight into
`main_grad`.

Legend: n, b some of N tokens, K columns of a token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .request import Columns, accumulated
from .rows import as_matrices, blocks, flat_indices, rows_of_a_block

#: Narrower matrices are multiplied at a fraction of the speed.
NARROWEST = 256
#: Rows of a product's tiles on a GPU; the last one of a block may be empty for the most part.
TILE = 128


class ProductParts(NamedTuple):
    """Says in parts of which size logits are computed, and where their gradients go."""

    logits_bytes: int
    """The bytes of logits that are made at a time."""
    reduce: bool
    """True if the backward adds the hidden states' gradients up over the ranks that share the
    columns; False if it returns the share of this rank's columns."""
    fused: bool
    """True if the weight's gradient is added to its `main_grad`."""

    def of_tokens(self, tokens: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
        """Yield the tokens in slices, each of which is multiplied with all columns."""
        rows = rows_of_a_block(columns, self.logits_bytes, 1, dtype)
        rows = rows // TILE * TILE or rows
        for start in range(0, tokens or 1, rows):  # without tokens, once none
            yield slice(start, min(start + rows, tokens))

    def of_columns(self, tokens: int, columns: int, dtype: torch.dtype) -> Iterator[slice]:
        """Yield the columns in slices, each of which all tokens are multiplied with.

        A part fits `logits_bytes` in the type in which it is computed, which may be wider.
        """
        width = rows_of_a_block(tokens, self.logits_bytes, 1, accumulated(dtype))
        width = max(NARROWEST, width)
        for start in range(0, columns or 1, width):  # without columns, once none
            yield slice(start, min(start + width, columns))


class Product:
    """Multiplies matrices into memory that each product uses again."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def __call__(self, left_nH: Tensor, right_Hv: Tensor) -> Tensor:
        """Return the product, [n, v], which the next call overwrites."""
        shape = len(left_nH), right_Hv.shape[1]
        size = shape[0] * shape[1]
        if self._memory is None or self._memory.numel() < size:
            self._memory = left_nH.new_empty(size)
        return torch.mm(left_nH, right_Hv, out=self._memory[:size].view(shape))


class Source(Protocol):
    """Gives the logits of the tokens that are computed, in this rank's columns without padding."""

    dtype: torch.dtype

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits of all tokens, some tokens [n, V] at a time, with their places."""

    def of(self, token_b: Tensor) -> Tensor:
        """Return the logits of these tokens, [b, V]."""

    def at(self, column_NK: Tensor) -> Tensor:
        """Return the logits at some columns of each token, [N, K]."""


class Logits:
    """Reads logits [..., V] from a tensor, in the order of `Order`."""

    def __init__(
        self, rows: Tensor, kept_N: Tensor | None, columns: Columns, workspace_bytes: int
    ) -> None:
        self.dtype = rows.dtype
        self._panels = [panel[:, : columns.real] for panel in as_matrices(rows)[0]]
        self._sizes = [len(panel) for panel in self._panels]
        self._kept_N, self._columns, self._workspace = kept_N, columns, workspace_bytes

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield some tokens at a time: views if their rows follow each other, else copies."""
        if not self._panels:
            return
        rows = rows_of_a_block(self._columns.real, self._workspace, 2, self.dtype)
        for block in blocks(self._sizes, self._kept_N, rows):
            yield block.kept, block.read(self._panels)

    def of(self, token_b: Tensor) -> Tensor:
        found = token_b.new_empty(len(token_b), self._columns.real, dtype=self.dtype)
        for panel, chosen, row in flat_indices(self._sizes, self._kept_N, token_b):
            found[chosen] = self._panels[panel][row]
        return found

    def at(self, column_NK: Tensor) -> Tensor:
        found = column_NK.new_empty(column_NK.shape, dtype=self.dtype)
        everyone = torch.arange(len(column_NK), device=column_NK.device)
        for panel, chosen, row in flat_indices(self._sizes, self._kept_N, everyone):
            found[chosen] = self._panels[panel][row[:, None], column_NK[chosen]]
        return found


class Products:
    """Makes logits from hidden states [N, H] and a weight [V, H]."""

    def __init__(
        self, hidden_NH: Tensor, weight_VH: Tensor, columns: Columns, parts: ProductParts
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
        """Return the logits [N, K]; multiply only columns that some token asks for."""
        used_U, place_NK = torch.unique(column_NK, return_inverse=True)
        found = self._hidden_NH.new_empty(column_NK.shape)
        if not len(self._weight_VH):
            return found
        weight_HU = self._weight_VH[used_U].t()
        for tokens in self._parts.of_tokens(len(found), len(used_U), self.dtype):
            found[tokens] = (self._hidden_NH[tokens] @ weight_HU).gather(1, place_NK[tokens])
        return found


class HiddenGradient:
    """Adds up the gradient of hidden states [N, H], some columns of the logits at a time."""

    def __init__(self, hidden_NH: Tensor, needed: bool, dtype: torch.dtype) -> None:
        self._sum = torch.zeros_like(hidden_NH, dtype=dtype) if needed else None

    def add(self, d_logits_Nv: Tensor, weight_vH: Tensor) -> None:
        """Add the product of these columns' gradient and weights."""
        if self._sum is None:
            return
        if self._sum.dtype == d_logits_Nv.dtype:
            self._sum.addmm_(d_logits_Nv, weight_vH)
        else:
            self._sum += d_logits_Nv @ weight_vH

    def done(self, few_N: Tensor | None, shape: torch.Size) -> Tensor | None:
        """Return the gradient of all tokens, of which `few_N` were computed; None means all."""
        if few_N is None or self._sum is None:
            return self._sum
        return self._sum.new_zeros(shape).masked_scatter_(few_N[:, None], self._sum)


class WeightGradient:
    """Makes the gradient of a weight [V, H], some rows at a time.

    `add` has to be called once for each of the first `written` rows; the others start as zeros.
    """

    def __init__(self, weight_VH: Tensor, needed: bool, fused: bool, written: int = 0) -> None:
        self._weight_VH, self._fused = weight_VH, needed and fused
        self._own: Tensor | None = None
        if needed:
            # A gradient that is already in main_grad comes back as zeros, because weights that are
            # tied to another layer's have theirs added to it, and DDP's hook wants one.
            self._own = torch.empty_like(weight_VH)
            self._own[0 if fused else written :].zero_()

    def add(self, rows: slice | Tensor, d_logits_Nv: Tensor, hidden_NH: Tensor) -> None:
        """Write the weight's rows for these columns of the logits; each row once."""
        if self._own is None:
            return
        if self._fused:
            main_grad: Tensor = self._weight_VH.main_grad  # type: ignore[attr-defined]
            if isinstance(rows, slice) and main_grad.dtype == hidden_NH.dtype:
                main_grad[rows].addmm_(d_logits_Nv.t(), hidden_NH)
                return
            product_vH = d_logits_Nv.t() @ hidden_NH
            if isinstance(rows, slice):
                main_grad[rows] += product_vH
            else:
                main_grad.index_add_(0, rows, product_vH.to(main_grad.dtype))
        elif isinstance(rows, slice):
            torch.mm(d_logits_Nv.t(), hidden_NH, out=self._own[rows])
        else:
            self._own[rows] = d_logits_Nv.t() @ hidden_NH

    def done(self) -> Tensor | None:
        """Return the gradient for autograd; zeros if it went into `main_grad`."""
        if self._fused and hasattr(self._weight_VH, "grad_added_to_main_grad"):
            self._weight_VH.grad_added_to_main_grad = True
        return self._own


class SummedWeightGradient:
    """Adds up the gradient of a whole weight [V, H] in float32, a few tokens at a time."""

    def __init__(
        self, weight_VH: Tensor, needed: bool, fused: bool, written: int, parts: int
    ) -> None:
        self._weight_VH, self._fused = weight_VH, needed and fused
        self._sum: Tensor | None = None
        self._into_main_grad = False
        if not needed:
            return
        like = weight_VH
        if fused:
            main_grad: Tensor = weight_VH.main_grad  # type: ignore[attr-defined]
            self._into_main_grad = main_grad.dtype == accumulated(like.dtype)
            if self._into_main_grad:
                self._sum = main_grad[:written]
                return
        # One product is rounded once, straight to what autograd is given.
        dtype = like.dtype if parts <= 1 and not fused else accumulated(like.dtype)
        self._sum = torch.zeros(written, like.shape[1], dtype=dtype, device=like.device)

    def add(self, d_logits_nV: Tensor, hidden_nH: Tensor) -> None:
        """Add the product of these tokens' gradients and hidden states."""
        if self._sum is not None:
            product_into(self._sum, d_logits_nV.t(), hidden_nH, add=True)

    def done(self) -> Tensor | None:
        """Return the gradient for autograd; zeros if it went into `main_grad`."""
        if self._sum is None:
            return None
        written = len(self._sum)
        if not self._fused:
            if written == len(self._weight_VH):
                return self._sum.to(self._weight_VH.dtype)
            own = torch.zeros_like(self._weight_VH)
            own[:written] = self._sum
            return own
        if not self._into_main_grad:
            main_grad: Tensor = self._weight_VH.main_grad  # type: ignore[attr-defined]
            main_grad[:written] += self._sum
        if hasattr(self._weight_VH, "grad_added_to_main_grad"):
            self._weight_VH.grad_added_to_main_grad = True
        # Zeros, because weights that are tied to another layer's have theirs added to it.
        return torch.zeros_like(self._weight_VH)


def product_into(into: Tensor, left: Tensor, right: Tensor, *, add: bool = False) -> Tensor:
    """Write or add `left @ right` to `into`, and return that.

    `into` may be of float32 while the factors have 16 bits.
    """
    beta = int(add)
    if into.dtype == left.dtype:
        return torch.addmm(into, left, right, beta=beta, out=into)
    widened = _widened_product() if into.is_cuda else None
    if widened is not None:
        # The product's own sums are of float32, and are not rounded to half of it in between.
        found: Tensor = widened(into, left, right, into.dtype, beta=beta, out=into)
        return found
    product = left @ right
    return into.add_(product) if add else into.copy_(product)


def _widened_product() -> Any:
    """Return the operator that multiplies into a wider type; None before torch 2.8."""
    # cloudpickle takes `torch.ops` for a module that a function needs, and cannot pickle it.
    from torch._ops import ops

    return getattr(ops.aten.addmm, "dtype_out", None)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Apply torch's decorator at each call, because its wrapper cannot be pickled by value."""

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        return torch.autograd.function.once_differentiable(backward)(ctx, *gradients)

    return once


class SequenceParallel(torch.autograd.Function):
    """Gathers hidden states of which each rank has a piece, cut along the first dimension.

    Each rank's gradient is the share of its columns of the logits. The gradient of a piece is the
    sum of all ranks' shares.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        """Return all pieces; the group's ranks take part in one all-gather."""
        ctx.group = group
        size = dist.get_world_size(group)
        whole = hidden.new_empty(size * hidden.shape[0], *hidden.shape[1:])
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the piece's gradient; the group's ranks take part in one reduce-scatter."""
        size = dist.get_world_size(ctx.group)
        piece = gradient.new_empty(gradient.shape[0] // size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(piece, gradient.contiguous(), group=ctx.group)
        return piece, None
