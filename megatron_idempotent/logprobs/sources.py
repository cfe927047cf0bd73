"""Reads logits from a tensor, or computes them from hidden states, and computes their gradients.

From hidden states the logits are computed one part at a time, and again in the backward: some
columns of all tokens, or for Triton's kernels all columns of some tokens. With a sampler only the
few columns that it kept for each token have a gradient, and no logits are computed again.

Triton's kernels need whole rows, and a product needs many rows of hidden states for each reading of
the weight. So one product makes a block of logits, which the kernels read in place. The backward
overwrites the block with its gradient, and multiplies that twice: for rows of the hidden states'
gradient, each rounded once, and for a summand of the weight's, which the product itself adds up in
float32.

For 262,144 tokens of 2,048 features in bfloat16 and 62,080 columns, memory holds, in GB: hidden
states 1.07 and their gradient 1.07, weight 0.25 and its gradient 0.25, its sum in float32 0.51
(none with a `main_grad` of float32), a block of logits 0.53, the tokens' numbers 0.03: 3.7.

Legend: N tokens, n, b some of them, H features, V columns of this rank, K columns of a token, U
columns that some token uses, E kept columns of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels import local_statistics, write_gradient
from .matmul import Product, WeightGradient, product_into
from .rows import Order, as_matrices, blocks_of, flat_indices, rows_of_a_block, submask, zero_others
from .statistics import (
    Columns,
    GradCoefficients,
    OutputGradients,
    Partial,
    TokenBatch,
    accumulated,
    is_local,
    merged,
)

#: Narrower matrices are multiplied at a fraction of the speed.
NARROWEST = 256
#: Rows of a product's tiles on a GPU; the last one of a block may be empty for the most part.
TILE = 128

#: For each input of a source, True if it needs a gradient.
Needed = tuple[bool, ...]
#: For each input of a source, its gradient, or None if it needs none.
Gradients = tuple[Tensor | None, ...]


class Logits:
    """Reads logits [..., V] from a tensor, in the order in which its rows lie in memory.

    It reads the rows of tokens that are computed, in this rank's columns without padding.

    Args:
        logits: the tensor.
        kept_N: a bool mask of the tokens that are computed, in the order of rows; None for all.
        columns: the vocabulary's columns on this rank.
        logits_bytes: the bytes of logits that are read at a time.
        consume: True if the gradient is written into the logits' memory.
    """

    def __init__(
        self,
        logits: Tensor,
        *,
        kept_N: Tensor | None,
        columns: Columns,
        logits_bytes: int,
        consume: bool,
    ) -> None:
        self.dtype, self._columns, self._logits_bytes = logits.dtype, columns, logits_bytes
        self._logits, self._order = logits, Order(logits)
        self._kept_N, self._consume = kept_N, consume

    @functools.cached_property
    def _panels(self) -> list[Tensor]:
        (matrices,) = as_matrices(self._order.rows(self._logits))
        return [matrix[:, : self._columns.real] for matrix in matrices]

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of the tokens, their logits [n, V]), part by part, for all tokens.

        They are views if their rows follow each other, else copies.
        """
        rows = rows_of_a_block(self._columns.real, self._logits_bytes, 2, self.dtype)
        for block in blocks_of(self._panels, self._kept_N, rows):
            yield block.tokens, block.read(self._panels)

    def rows_of(self, token_b: Tensor) -> Tensor:
        """Return the logits of these tokens, [b, V]."""
        logits_bV = token_b.new_empty(len(token_b), self._columns.real, dtype=self.dtype)
        for panel, entry_e, row_e in flat_indices(self._panels, self._kept_N, token_b):
            logits_bV[entry_e] = panel[row_e]
        return logits_bV

    def values_at(self, column_NK: Tensor) -> Tensor:
        """Return the logits at some columns of each token, [N, K]."""
        logits_NK = column_NK.new_empty(column_NK.shape, dtype=self.dtype)
        token_N = torch.arange(len(column_NK), device=column_NK.device)
        for panel, entry_e, row_e in flat_indices(self._panels, self._kept_N, token_N):
            logits_NK[entry_e] = panel[row_e[:, None], column_NK[entry_e]]
        return logits_NK

    def statistics(self, batch: TokenBatch) -> Partial:
        """Return the statistics of each token over this rank's columns."""
        return local_statistics(self._order.rows(self._logits), self._kept_N, batch)

    def saved(self, *, sampled: bool) -> tuple[Tensor, ...]:
        """Return the tensors to save for the backward: the logits, or a meta tensor of their shape.

        The shape is enough if the tokens were sampled from a part of the vocabulary (`sampled`) and
        the gradient is not written into the logits' memory.
        """
        if sampled and not self._consume:
            return (torch.empty_like(self._logits, device="meta"),)
        return (self._logits,)

    def gradients(self, outputs: OutputGradients, needed: Needed) -> Gradients:
        """Return the logits' gradient for all columns, in the logits' memory if they are consumed.

        No collective is needed, because `outputs` has statistics over the columns of all ranks.
        """
        # An alias that shares the version counter: autograd tells others who have saved the logits.
        logits = self._logits.detach()
        gradient = logits if self._consume else torch.empty_like(logits)
        order, kept_N, batch = self._order, self._kept_N, outputs.batch
        panels, into = as_matrices(order.rows(logits), order.rows(gradient))
        if batch.options.backend == "triton":
            from . import on_gpu

            slopes, token_N = on_gpu.grad_coefficients(outputs)
            on_gpu.write_gradient(panels, into, kept_N, token_N, slopes, batch)
        else:
            slopes, batch, few_N = _differentiated(outputs)
            kept_N = kept_N if few_N is None else submask(kept_N, few_N)
            zero_others(into, kept_N, batch.columns.real)
            write_gradient(panels, into, kept_N, slopes, batch)
        return (gradient,)

    def gradients_at(
        self, row_E: Tensor, column_E: Tensor, gradient_E: Tensor, needed: Needed
    ) -> Gradients:
        """Return the logits' gradient: `gradient_E` in these entries, and zero elsewhere."""
        logits, device = self._logits.detach(), row_E.device
        gradient = logits.zero_() if self._consume else torch.zeros_like(logits, device=device)
        (into,) = as_matrices(self._order.rows(gradient))
        for panel, entry_e, row_e in flat_indices(into, self._kept_N, row_E):
            panel[row_e, column_E[entry_e]] = gradient_E[entry_e].to(gradient.dtype)
        return (gradient,)


class Products:
    """Computes logits from hidden states [N, H] and a weight [V, H]; otherwise like `Logits`.

    Args:
        hidden_NH: the hidden states.
        weight_VH: the weight.
        columns: the vocabulary's columns on this rank.
        logits_bytes: the bytes of logits that are computed at a time.
        summed: True if the backward sums the hidden states' gradients over the ranks of the
            vocabulary; False if it returns the gradient from this rank's columns alone.
        fused: the parameter to whose `main_grad` the weight's gradient is added; None to return it.
            `weight_VH` may be another object, without the `main_grad`.
    """

    def __init__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        *,
        columns: Columns,
        logits_bytes: int,
        summed: bool,
        fused: Any,
    ) -> None:
        self.dtype, self._columns, self._logits_bytes = hidden_NH.dtype, columns, logits_bytes
        self._hidden_NH, self._weight_VH = hidden_NH, weight_VH
        self._real_VH = weight_VH[: columns.real]
        self._summed, self._fused = summed, fused

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of the tokens, their logits [n, V]), part by part, for all tokens."""
        product = Product()
        for part in self._of_tokens(len(self._hidden_NH), len(self._real_VH)):
            yield part, product(self._hidden_NH[part], self._real_VH.t())

    def rows_of(self, token_b: Tensor) -> Tensor:
        """Return the logits of these tokens, [b, V]."""
        return self._hidden_NH[token_b] @ self._real_VH.t()

    def values_at(self, column_NK: Tensor) -> Tensor:
        """Return the logits at some columns of each token, [N, K]; compute no other column."""
        used_U, place_NK = torch.unique(column_NK, return_inverse=True)
        logits_NK = self._hidden_NH.new_empty(column_NK.shape)
        if not len(self._real_VH):
            return logits_NK
        weight_HU = self._real_VH[used_U].t()
        for part in self._of_tokens(len(logits_NK), len(used_U)):
            logits_NK[part] = (self._hidden_NH[part] @ weight_HU).gather(1, place_NK[part])
        return logits_NK

    def statistics(self, batch: TokenBatch) -> Partial:
        """Return the statistics of each token over this rank's columns.

        Each row of the weight is read once, except with Triton's kernels, which need whole rows.
        """
        partials: list[Partial] = []
        if batch.options.backend == "triton":
            for tokens, logits_nV in self.parts():
                partials.append(local_statistics(logits_nV, None, batch.select(tokens)))
            if len(partials) == 1:
                return partials[0]
            return Partial(*map(torch.cat, zip(*partials, strict=True)))
        has_target, product = [], Product()
        for part in self._of_columns(len(self._hidden_NH), len(self._real_VH)):
            of_part = batch.in_columns(part)
            logits_Nv = product(self._hidden_NH, self._real_VH[part].t())
            partials.append(local_statistics(logits_Nv, None, of_part))
            has_target.append(is_local(of_part.local, of_part.columns.real))
        return merged(partials, has_target, batch.temperature)

    def saved(self, *, sampled: bool) -> tuple[Tensor, ...]:
        """Return the inputs that the backward needs: the hidden states and the weight, with or
        without a sampler.
        """
        return self._hidden_NH, self._weight_VH

    def gradients(self, outputs: OutputGradients, needed: Needed) -> Gradients:
        """Compute the logits again, part by part, and from them the gradients of the hidden states
        and the weight; None for one that is not needed.

        If the hidden states' gradients are summed, the group's ranks take part in one all-reduce,
        in float32.
        """
        by_tokens = outputs.batch.options.backend == "triton"
        gradients = self._gradients_by_tokens if by_tokens else self._gradients_by_columns
        return self._over_ranks(*gradients(outputs, needed))

    def gradients_at(
        self, row_E: Tensor, column_E: Tensor, gradient_E: Tensor, needed: Needed
    ) -> Gradients:
        """Return both gradients if the logits' gradient is `gradient_E` in these entries and zero
        elsewhere.

        If the hidden states' gradients are summed, the group's ranks take part in one all-reduce.
        """
        hidden_NH, (of_hidden, of_weight) = self._hidden_NH, needed
        d_hidden_NH = torch.zeros_like(hidden_NH, dtype=gradient_E.dtype) if of_hidden else None
        d_weight = WeightGradient(self._weight_VH, of_weight, self._fused)
        used_U, place_E = torch.unique(column_E, return_inverse=True)
        by_place_E = place_E.argsort(stable=True)
        place_E, row_E, gradient_E = place_E[by_place_E], row_E[by_place_E], gradient_E[by_place_E]
        columns = list(self._of_columns(len(hidden_NH), len(used_U)))
        ends = torch.tensor([part.stop for part in columns], device=place_E.device)
        counts = torch.searchsorted(place_E, ends).tolist()
        for part, start, stop in zip(columns, [0, *counts], counts, strict=False):
            d_logits_Nu = hidden_NH.new_zeros(len(hidden_NH), part.stop - part.start)
            values_e = gradient_E[start:stop].to(d_logits_Nu.dtype)
            d_logits_Nu[row_E[start:stop], place_E[start:stop] - part.start] = values_e
            if d_hidden_NH is not None:
                d_hidden_NH += d_logits_Nu @ self._weight_VH[used_U[part]]
            d_weight.add(used_U[part], d_logits_Nu, hidden_NH)
        return self._over_ranks(d_hidden_NH, d_weight.finish())

    def _gradients_by_columns(self, outputs: OutputGradients, needed: Needed) -> Gradients:
        """Return the gradients of the hidden states and of the weight. Compute the logits again for
        them, a part of the vocabulary at a time, not a part of the tokens.

        The hidden states' gradient is added up in the type of the statistics.
        """
        of_hidden, of_weight = needed
        hidden_NH, dtype = self._hidden_NH, outputs.total.origin.dtype
        shape, product = hidden_NH.shape, Product()
        slopes, batch, few_N = _differentiated(outputs)
        if few_N is not None:
            hidden_NH = hidden_NH[few_N]
        sum_NH = torch.zeros_like(hidden_NH, dtype=dtype) if of_hidden else None
        real = len(self._real_VH)
        d_weight = WeightGradient(self._weight_VH, of_weight, self._fused, written=real)
        for part in self._of_columns(len(hidden_NH), real):
            weight_vH = self._real_VH[part]
            logits_Nv = product(hidden_NH, weight_vH.t())
            write_gradient([logits_Nv], [logits_Nv], None, slopes, batch.in_columns(part))
            if sum_NH is not None and dtype == logits_Nv.dtype:
                sum_NH.addmm_(logits_Nv, weight_vH)
            elif sum_NH is not None:
                sum_NH += logits_Nv @ weight_vH
            d_weight.add(part, logits_Nv, hidden_NH)
        if sum_NH is not None and few_N is not None:
            sum_NH = sum_NH.new_zeros(shape).masked_scatter_(few_N[:, None], sum_NH)
        return sum_NH, d_weight.finish()

    def _gradients_by_tokens(self, outputs: OutputGradients, needed: Needed) -> Gradients:
        """Return the gradients of the hidden states and of the weight, None for one that is not
        needed. The logits are computed again, all columns of some tokens at a time; Triton's
        kernels turn them into the gradient of the logits.

        The hidden states' gradient is in float32 if it is summed over several ranks.
        """
        from . import on_gpu

        of_hidden, of_weight = needed
        hidden_NH, real_VH = self._hidden_NH, self._real_VH
        slopes, token_N = on_gpu.grad_coefficients(outputs)
        token_L = (token_N >= 0).nonzero().squeeze(1)
        all_live, rows = len(token_L) == len(hidden_NH), slice(len(real_VH))
        computes = len(token_L) > 0 and len(real_VH) > 0
        blocks = list(self._of_tokens(len(token_L), len(real_VH))) if computes else []
        d_hidden_NH: Any = None
        if of_hidden:
            allocate = torch.empty_like if all_live and computes else torch.zeros_like
            dtype = slopes.factor.dtype if self._summed else hidden_NH.dtype
            d_hidden_NH = allocate(hidden_NH, dtype=dtype)
        counts = {"written": len(real_VH), "parts": len(blocks)}
        d_weight = WeightGradient(self._weight_VH, of_weight, self._fused, **counts)
        product = Product()
        for block in blocks:
            token_n: Any = block if all_live else token_L[block]
            hidden_nH = hidden_NH[token_n]
            logits_nV = product(hidden_nH, real_VH.t())
            of_tokens = slopes.select(token_n), outputs.batch.select(token_n)
            on_gpu.write_gradient([logits_nV], [logits_nV], None, None, *of_tokens)
            if all_live and d_hidden_NH is not None:
                product_into(d_hidden_NH[block], logits_nV, real_VH)
            elif d_hidden_NH is not None:
                d_hidden_nH = d_hidden_NH.new_empty(hidden_nH.shape)
                d_hidden_NH[token_n] = product_into(d_hidden_nH, logits_nV, real_VH)
            d_weight.add(rows, logits_nV, hidden_nH)
        return d_hidden_NH, d_weight.finish()

    def _over_ranks(self, d_hidden_NH: Tensor | None, d_weight_VH: Tensor | None) -> Gradients:
        if d_hidden_NH is not None and self._summed:
            dist.all_reduce(d_hidden_NH, group=self._columns.group)
        return d_hidden_NH, d_weight_VH

    def _of_tokens(self, tokens: int, columns: int) -> Iterator[slice]:
        """Cut 0 to `tokens` into slices, so small that the logits of one slice, in `columns`
        columns, fit into `logits_bytes`; yield them.
        """
        rows = rows_of_a_block(columns, self._logits_bytes, 1, self.dtype)
        return _slices(tokens, rows // TILE * TILE or rows)

    def _of_columns(self, tokens: int, columns: int) -> Iterator[slice]:
        """Cut 0 to `columns` into slices, so small that the logits of one slice, of `tokens`
        tokens, fit into `logits_bytes`; yield them.

        A part fits `logits_bytes` in the type in which it is computed, which may be wider.
        """
        width = rows_of_a_block(tokens, self._logits_bytes, 1, accumulated(self.dtype))
        return _slices(columns, max(NARROWEST, width))


def _slices(stop: int, step: int) -> Iterator[slice]:
    """Cut the range 0 to `stop` into slices of `step`; yield one empty slice if `stop` is 0."""
    return (slice(start, min(start + step, stop)) for start in range(0, stop or 1, step))


Source = Logits | Products


#: If more than this fraction of tokens has a gradient, selecting them costs more than it saves.
_FEW = 0.9


def _differentiated(
    outputs: OutputGradients,
) -> tuple[GradCoefficients, TokenBatch, Tensor | None]:
    """Return the gradient's coefficients, and the `TokenBatch`, of tokens with a nonzero gradient.
    Also return a mask [N] of these tokens; None if all tokens are returned.

    Clipped tokens have no gradient, and neither have those of a group with equal rewards. If nearly
    all tokens have one, all are returned, and None as the mask. The host waits for their number.
    """
    slopes, batch = GradCoefficients.from_outputs(outputs), outputs.batch
    gradients = outputs.d_logprob, outputs.d_entropy
    live = [gradient != 0 for gradient in gradients if gradient is not None]
    live_N, *more = (mask if mask.dim() == 1 else mask.any(-1) for mask in live)
    live_N = live_N | more[0] if more else live_N
    if not len(live_N) or int(live_N.sum()) > _FEW * len(live_N):
        return slopes, batch, None
    return slopes.select(live_N), batch.select(live_N), live_N
