"""Log-probs and entropies over what a sampler kept, out of logits or of hidden states.

Of each token a few columns are kept, and only they have a gradient. Legend: E kept columns here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .asked import Asked
from .candidates import choose
from .combine import Whole
from .differentiable import once_differentiable
from .from_hidden import of_all_ranks
from .kept import Kept, named
from .parts import Parts
from .rows import Order, panels, places
from .slopes import Slopes
from .sources import Logits, Products, Source
from .weight_gradient import WeightGradient


def _forward(
    ctx: Any, source: Source, asked: Asked, *inputs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    kept, whole = (choose if asked.keep is None else named)(source, asked)
    if any(ctx.needs_input_grad):
        ctx.save_for_backward(*kept, *whole, *inputs)
    ctx.asked = asked
    return asked.wanted.returned(ctx, whole, asked.temperature)


def _gradient(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None) -> Any:
    """Returns the tokens and columns, their gradients [E], and the inputs that were saved."""
    asked: Asked = ctx.asked
    saved = ctx.saved_tensors
    kept, whole, inputs = Kept(*saved[:3]), Whole(*saved[3:9]), saved[9:]
    if of_logprob_N is not None:  # one of -inf does not move
        of_logprob_N = torch.where(whole.logprob > -torch.inf, of_logprob_N, 0.0)
    slopes = Slopes.made(asked.local, whole, of_logprob_N, of_entropy_N, asked.temperature)
    gradient_E = kept.gradient(slopes, asked.temperature)
    return kept.row.long(), kept.column.long(), gradient_E, *inputs


class KeptFromLogits(torch.autograd.Function):
    """`(logprob, entropy, lse)` of the tokens that are computed, each [N] in the order of `Order`.

    The logits are not needed after the forward, unless their memory is consumed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        kept_N: Tensor | None,
        asked: Asked,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Computes statistics; `asked` is indexed by kept token."""
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
        """No collective."""
        nothing = (None,) * 2
        if of_logprob_N is None and of_entropy_N is None:
            return None, *nothing
        row_E, column_E, gradient_E, kept_N, logits = _gradient(ctx, of_logprob_N, of_entropy_N)
        if logits is None:
            gradient = torch.zeros_like(ctx.like, device=ctx.device)
        else:
            # An alias that shares the version counter: who has saved the logits too is told of it.
            gradient = logits.detach().zero_()
        (into,) = panels(Order(gradient).rows(gradient))
        for panel, chosen, row_e in places([len(each) for each in into], kept_N, row_E):
            into[panel][row_e, column_E[chosen]] = gradient_E[chosen].to(gradient.dtype)
        return gradient, *nothing


class KeptFromHidden(torch.autograd.Function):
    """`(logprob, entropy, lse)` of tokens [N] whose hidden states are [N, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        asked: Asked,
        parts: Parts,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Computes the statistics of logits `hidden_NH @ weight_VH.T`, in the type of both."""
        ctx.parts, ctx.weight = parts, weight_VH
        source = Products(hidden_NH, weight_VH, asked.columns, parts)
        inputs = (hidden_NH, weight_VH)
        return _forward(ctx, source, asked, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """Only columns that some token has kept are multiplied, and no logits are made again.

        With `reduce` a collective of the group's ranks: one all-reduce, in float32.
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
