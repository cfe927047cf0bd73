"""Holds the autograd functions of log-probs and entropies, from logits or from hidden states.

Those from hidden states make the logits a part at a time, and again in the backward: some columns
of all tokens, or for Triton's kernels all columns of some tokens. Those with a sampler compute only
the few columns of each token that it kept, and only these have a gradient.

Legend: H features, E kept columns of this rank.

Triton's kernels need whole rows, and a product needs many rows of hidden states for each reading of
the weight. So one product makes a block of logits, which the kernels read in place. The backward
overwrites the block with its gradient, and multiplies that twice: for rows of the hidden states'
gradient, each rounded once, and for a summand of the weight's, which the product itself adds up in
float32.

For 262,144 tokens of 2,048 features in bfloat16 and 62,080 columns, memory holds, in GB: hidden
states 1.07 and their gradient 1.07, weight 0.25 and its gradient 0.25, its sum in float32 0.51
(none with a `main_grad` of float32), a block of logits 0.53, the tokens' numbers 0.03: 3.7.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels import (
    GradCoefficients,
    differentiated,
    global_statistics,
    local_statistics,
    picked,
    write_gradient,
)
from .request import Columns, TokenBatch, is_ours, temperature_of
from .rows import Order, as_matrices, flat_indices, submask
from .sources import (
    HiddenGradient,
    Logits,
    Product,
    ProductParts,
    Products,
    Source,
    SummedWeightGradient,
    WeightGradient,
    once_differentiable,
    product_into,
)
from .statistics import Partial, Whole, merged
from .truncated_vocab import Kept, choose, named


class LogprobsFromLogits(torch.autograd.Function):
    """Computes `(logprob, entropy, lse)` from logits, each [N] in the order of `Order`.

    The N tokens are those that are kept: neither masked nor ignored.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        kept_N: Tensor | None,
        asked: TokenBatch,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the statistics; `asked` has an entry for each kept token."""
        rows = Order(logits).rows(logits)
        temperature, columns, wanted = asked.temperature, asked.columns, asked.wanted
        partial = local_statistics(rows, asked.local, kept_N, temperature, columns, wanted)
        whole = global_statistics(partial, asked)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, kept_N, *whole)
        ctx.asked = asked
        return wanted.returned(ctx, whole, temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """Compute the logits' gradient, without a collective: all ranks' sums have been saved."""
        logits, kept_N, *whole = ctx.saved_tensors
        asked: TokenBatch = ctx.asked
        columns, wanted, temperature = asked.columns, asked.wanted, asked.temperature
        nothing = (None,) * 2
        if of_logprob_N is None and of_entropy_N is None:
            return None, *nothing
        order = Order(logits)
        # An alias that shares the version counter: who has saved the logits too is told of it.
        gradient = logits.detach() if wanted.consume else torch.empty_like(logits)
        rows, into = as_matrices(order.rows(logits.detach()), order.rows(gradient))
        if wanted.backend == "triton":
            from . import on_gpu

            found, token_N = on_gpu.grad_coefficients(
                asked, Whole(*whole), of_logprob_N, of_entropy_N
            )
            on_gpu.write_gradient(rows, into, kept_N, token_N, found, temperature, columns)
            return gradient, *nothing
        slopes = GradCoefficients.from_outputs(
            asked.local, Whole(*whole), of_logprob_N, of_entropy_N, temperature
        )
        live_N = differentiated(of_logprob_N, of_entropy_N)
        few_N = picked(live_N)
        if few_N is not None:
            slopes, temperature = slopes.of(few_N), temperature_of(temperature, few_N)
            kept_N = submask(kept_N, few_N)
        zero_others(into, kept_N, columns.real)
        write_gradient(rows, into, kept_N, slopes, temperature, columns, wanted)
        return gradient, *nothing


def zero_others(into: list[Tensor], kept_N: Tensor | None, columns: int) -> None:
    """Zero the parts without a gradient: padding, and tokens that are not kept."""
    masks = [None] * len(into) if kept_N is None else torch.split(kept_N, [len(p) for p in into])
    for panel, mask in zip(into, masks, strict=True):
        panel[:, columns:] = 0
        if mask is not None:
            panel.index_fill_(0, mask.logical_not().nonzero().squeeze(1), 0)


def partial_by_tokens(
    hidden_NH: Tensor, weight_VH: Tensor, asked: TokenBatch, parts: ProductParts
) -> Partial:
    """Compute statistics of this rank's columns, with one product for each block of tokens."""
    columns, product = asked.columns, Product()
    weight_HV = weight_VH[: columns.real].t()
    found = []
    for tokens in parts.of_tokens(len(hidden_NH), columns.real, hidden_NH.dtype):
        logits_nV = product(hidden_NH[tokens], weight_HV)
        temperature = temperature_of(asked.temperature, tokens)
        arguments = (asked.local[tokens], None, temperature, columns, asked.wanted)
        found.append(local_statistics(logits_nV, *arguments))
    return found[0] if len(found) == 1 else Partial(*map(torch.cat, zip(*found, strict=True)))


def gradients_by_tokens(
    weight: Tensor,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    asked: TokenBatch,
    parts: ProductParts,
    *,
    given: tuple[Whole, Tensor | None, Tensor | None],
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute this rank's share of the hidden states' gradient, and the weight's gradient.

    `weight` is the parameter with the `main_grad`; autograd may have saved another object,
    `weight_VH`. `given` holds the statistics, and the gradients of log-probs and entropies;
    `needed` says which of the two results are. The hidden states' gradient is in float32 if shares
    of several ranks are added up.
    """
    from . import on_gpu

    of_hidden, of_weight = needed
    columns, dtype = asked.columns, hidden_NH.dtype
    slopes, token_N = on_gpu.grad_coefficients(asked, *given)
    token_L = (token_N >= 0).nonzero().squeeze(1)
    every = len(token_L) == len(hidden_NH)
    real_VH = weight_VH[: columns.real]
    blocks = list(parts.of_tokens(len(token_L), columns.real, dtype)) if len(token_L) else []
    d_hidden_NH: Any = None
    if of_hidden:
        made = torch.empty_like if every and columns.real else torch.zeros_like
        summed = slopes.factor.dtype if parts.reduce else dtype
        d_hidden_NH = made(hidden_NH, dtype=summed)
    d_weight = SummedWeightGradient(weight, of_weight, parts.fused, columns.real, len(blocks))
    product = Product()
    for block in blocks if columns.real else ():
        chosen: Any = block if every else token_L[block]
        hidden_nH, some = hidden_NH[chosen], slopes.of(chosen)
        logits_nV = product(hidden_nH, real_VH.t())
        temperature, rows = temperature_of(asked.temperature, chosen), [logits_nV]
        on_gpu.write_gradient(rows, rows, None, None, some, temperature, columns)
        if isinstance(chosen, slice) and d_hidden_NH is not None:
            product_into(d_hidden_NH[chosen], logits_nV, real_VH)
        elif d_hidden_NH is not None:
            d_hidden_nH = d_hidden_NH.new_empty(hidden_nH.shape)
            d_hidden_NH[chosen] = product_into(d_hidden_nH, logits_nV, real_VH)
        d_weight.add(logits_nV, hidden_nH)
    return d_hidden_NH, d_weight.done()


class LogprobsFromHidden(torch.autograd.Function):
    """Computes `(logprob, entropy, lse)` of tokens [N] from their hidden states, [N, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        asked: TokenBatch,
        parts: ProductParts,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the statistics of logits `hidden_NH @ weight_VH.T`, in the type of both.

        It makes some columns of all tokens at a time, so that each row of the weight is read once;
        with Triton's kernels all columns of some tokens.
        """
        by_tokens = asked.wanted.backend == "triton"
        of_these = partial_by_tokens if by_tokens else _partial_by_columns
        partial = of_these(hidden_NH, weight_VH, asked, parts)
        whole = global_statistics(partial, asked)
        if any(ctx.needs_input_grad[:2]):
            ctx.save_for_backward(hidden_NH, weight_VH, *whole)
        ctx.asked, ctx.parts = asked, parts
        ctx.weight = weight_VH  # what is saved may be another object, without its main_grad
        return asked.wanted.returned(ctx, whole, asked.temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """Make the same parts of the logits again, and from them both gradients.

        With `parts.reduce` the group's ranks take part in one all-reduce, in float32.
        """
        nothing = (None,) * 2
        if of_logprob_N is None and of_entropy_N is None:
            return None, None, *nothing
        asked: TokenBatch = ctx.asked
        hidden_NH, weight_VH, *saved = ctx.saved_tensors
        whole = Whole(*saved)
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        # Many parts add up here, and ranks' shares after it.
        temperature, shape = asked.temperature, hidden_NH.shape
        if asked.wanted.backend == "triton":
            arguments = (ctx.weight, hidden_NH, weight_VH, asked, ctx.parts)
            given = (whole, of_logprob_N, of_entropy_N)
            found = gradients_by_tokens(*arguments, given=given, needed=(of_hidden, of_weight))
            return of_all_ranks(found[0], ctx.parts, asked.columns), found[1], *nothing
        slopes = GradCoefficients.from_outputs(
            asked.local, whole, of_logprob_N, of_entropy_N, temperature
        )
        live_N = differentiated(of_logprob_N, of_entropy_N)
        few_N = picked(live_N)
        if few_N is not None:
            slopes, temperature = slopes.of(few_N), temperature_of(temperature, few_N)
            hidden_NH = hidden_NH[few_N]
        d_hidden = HiddenGradient(hidden_NH, of_hidden, whole.origin.dtype)
        real, fused = asked.columns.real, ctx.parts.fused
        d_weight = WeightGradient(ctx.weight, of_weight, fused, written=real)
        product = Product()
        for part in ctx.parts.of_columns(len(hidden_NH), real, hidden_NH.dtype):
            logits_Nv = product(hidden_NH, weight_VH[part].t())
            here = slopes._replace(local=slopes.local - part.start)
            columns = asked.columns._replace(real=part.stop - part.start)
            rows = [logits_Nv]
            write_gradient(rows, rows, None, here, temperature, columns, asked.wanted)
            d_hidden.add(logits_Nv, weight_VH[part])
            d_weight.add(part, logits_Nv, hidden_NH)
        d_hidden_NH = of_all_ranks(d_hidden.done(few_N, shape), ctx.parts, asked.columns)
        return d_hidden_NH, d_weight.done(), *nothing


def _partial_by_columns(
    hidden_NH: Tensor, weight_VH: Tensor, asked: TokenBatch, parts: ProductParts
) -> Partial:
    """Compute statistics of this rank's columns, some columns of all tokens at a time."""
    found, own, product = [], [], Product()
    for part in parts.of_columns(len(hidden_NH), asked.columns.real, hidden_NH.dtype):
        logits_Nv = product(hidden_NH, weight_VH[part].t())
        here = asked.columns._replace(real=part.stop - part.start)
        local_n = asked.local - part.start
        found.append(
            local_statistics(logits_Nv, local_n, None, asked.temperature, here, asked.wanted)
        )
        own.append(is_ours(local_n, here.real))
    return merged(found, own, asked.temperature)


def of_all_ranks(
    d_hidden_NH: Tensor | None, parts: ProductParts, columns: Columns
) -> Tensor | None:
    """Return the hidden states' gradient; with `parts.reduce` its sum over the group's ranks.

    All of them then take part in one all-reduce, which changes `d_hidden_NH` in place.
    """
    if d_hidden_NH is not None and parts.reduce:
        dist.all_reduce(d_hidden_NH, group=columns.group)
    return d_hidden_NH


def _forward(
    ctx: Any, source: Source, asked: TokenBatch, *inputs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    kept, whole = (choose if asked.keep is None else named)(source, asked)
    if any(ctx.needs_input_grad):
        ctx.save_for_backward(*kept, *whole, *inputs)
    ctx.asked = asked
    return asked.wanted.returned(ctx, whole, asked.temperature)


def _gradient(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None) -> Any:
    """Return the kept columns' tokens, numbers and gradients, each [E], and the saved inputs."""
    asked: TokenBatch = ctx.asked
    saved = ctx.saved_tensors
    kept, whole, inputs = Kept(*saved[:3]), Whole(*saved[3:9]), saved[9:]
    if of_logprob_N is not None:  # one of -inf does not move
        of_logprob_N = torch.where(whole.logprob > -torch.inf, of_logprob_N, 0.0)
    slopes = GradCoefficients.from_outputs(
        asked.local, whole, of_logprob_N, of_entropy_N, asked.temperature
    )
    gradient_E = kept.gradient(slopes, asked.temperature)
    return kept.row.long(), kept.column.long(), gradient_E, *inputs


class KeptFromLogits(torch.autograd.Function):
    """Computes `(logprob, entropy, lse)` over what a sampler kept, from logits.

    Each is [N] in the order of `Order`, of the tokens that are computed. The logits are not needed
    after the forward, unless their memory is consumed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        kept_N: Tensor | None,
        asked: TokenBatch,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the statistics; `asked` has an entry for each kept token."""
        wanted = asked.wanted
        rows = Order(logits).rows(logits)
        source = Logits(rows, kept_N, asked.columns, wanted.workspace_bytes)
        ctx.like = torch.empty_like(logits, device="meta")
        ctx.device = logits.device
        inputs = (kept_N, logits if wanted.consume else None)
        return _forward(ctx, source, asked, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """Write the gradients of kept columns, and zeros elsewhere, without a collective."""
        nothing = (None,) * 2
        if of_logprob_N is None and of_entropy_N is None:
            return None, *nothing
        row_E, column_E, gradient_E, kept_N, logits = _gradient(ctx, of_logprob_N, of_entropy_N)
        if logits is None:
            gradient = torch.zeros_like(ctx.like, device=ctx.device)
        else:
            # An alias that shares the version counter: who has saved the logits too is told of it.
            gradient = logits.detach().zero_()
        (into,) = as_matrices(Order(gradient).rows(gradient))
        for panel, chosen, row_e in flat_indices([len(each) for each in into], kept_N, row_E):
            into[panel][row_e, column_E[chosen]] = gradient_E[chosen].to(gradient.dtype)
        return gradient, *nothing


class KeptFromHidden(torch.autograd.Function):
    """Computes `(logprob, entropy, lse)` over what a sampler kept, from hidden states [N, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        asked: TokenBatch,
        parts: ProductParts,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the statistics of logits `hidden_NH @ weight_VH.T`, in the type of both."""
        ctx.parts, ctx.weight = parts, weight_VH
        source = Products(hidden_NH, weight_VH, asked.columns, parts)
        inputs = (hidden_NH, weight_VH)
        return _forward(ctx, source, asked, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """Compute both gradients with the columns that some token kept, and make no logits.

        With `parts.reduce` the group's ranks take part in one all-reduce, in float32.
        """
        nothing = (None,) * 2
        if of_logprob_N is None and of_entropy_N is None:
            return None, None, *nothing
        row_E, column_E, gradient_E, hidden_NH, weight_VH = _gradient(
            ctx, of_logprob_N, of_entropy_N
        )
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        d_hidden_NH = torch.zeros_like(hidden_NH, dtype=gradient_E.dtype) if of_hidden else None
        d_weight = WeightGradient(ctx.weight, of_weight, ctx.parts.fused)
        used_U, place_E = torch.unique(column_E, return_inverse=True)
        by_place_E = place_E.argsort(stable=True)
        place_E, row_E, gradient_E = place_E[by_place_E], row_E[by_place_E], gradient_E[by_place_E]
        columns = list(ctx.parts.of_columns(len(hidden_NH), len(used_U), hidden_NH.dtype))
        ends = torch.tensor([part.stop for part in columns], device=place_E.device)
        counts = torch.searchsorted(place_E, ends).tolist()
        for part, start, stop in zip(columns, [0, *counts], counts, strict=False):
            d_logits_Nu = hidden_NH.new_zeros(len(hidden_NH), part.stop - part.start)
            values_e = gradient_E[start:stop].to(d_logits_Nu.dtype)
            d_logits_Nu[row_E[start:stop], place_E[start:stop] - part.start] = values_e
            if d_hidden_NH is not None:
                d_hidden_NH += d_logits_Nu @ weight_VH[used_U[part]]
            d_weight.add(used_U[part], d_logits_Nu, hidden_NH)
        return of_all_ranks(d_hidden_NH, ctx.parts, ctx.asked.columns), d_weight.done(), *nothing
