"""Log-probs and entropies out of hidden states and the output layer's weight.

The logits are made a part at a time, and again in the backward. Legend: H features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .asked import Asked, Columns, is_ours, temperature_of
from .combine import Partial, Whole, merged
from .differentiable import once_differentiable
from .hidden_by_tokens import gradients_by_tokens, partial_by_tokens
from .kernels import partial_of, whole_of, write_gradient
from .parts import Parts, Product
from .slopes import Slopes, differentiated, picked
from .weight_gradient import WeightGradient


class LogprobsFromHidden(torch.autograd.Function):
    """`(logprob, entropy, lse)` of tokens [N] whose hidden states are [N, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        asked: Asked,
        parts: Parts,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Computes the statistics of logits `hidden_NH @ weight_VH.T`, in the type of both.

        Some columns of all tokens at a time, so that each row of the weight is read once; with
        Triton's kernels all columns of some tokens.
        """
        by_tokens = asked.wanted.backend == "triton"
        of_these = partial_by_tokens if by_tokens else _partial_by_columns
        partial = of_these(hidden_NH, weight_VH, asked, parts)
        whole = whole_of(partial, asked)
        if any(ctx.needs_input_grad[:2]):
            ctx.save_for_backward(hidden_NH, weight_VH, *whole)
        ctx.asked, ctx.parts = asked, parts
        ctx.weight = weight_VH  # what is saved may be another object, without its main_grad
        return asked.wanted.returned(ctx, whole, asked.temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """The same columns, or tokens, at a time.

        With `reduce` a collective of the group's ranks: one all-reduce, in float32.
        """
        nothing = (None,) * 2
        if of_logprob_N is None and of_entropy_N is None:
            return None, None, *nothing
        asked: Asked = ctx.asked
        hidden_NH, weight_VH, *saved = ctx.saved_tensors
        whole = Whole(*saved)
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        # Many parts add up here, and ranks' shares behind it.
        temperature, shape = asked.temperature, hidden_NH.shape
        if asked.wanted.backend == "triton":
            arguments = (ctx.weight, hidden_NH, weight_VH, asked, ctx.parts)
            given = (whole, of_logprob_N, of_entropy_N)
            found = gradients_by_tokens(*arguments, given=given, needed=(of_hidden, of_weight))
            return of_all_ranks(found[0], ctx.parts, asked.columns), found[1], *nothing
        slopes = Slopes.made(asked.local, whole, of_logprob_N, of_entropy_N, temperature)
        live_N = differentiated(of_logprob_N, of_entropy_N)
        few_N = picked(live_N)
        if few_N is not None:
            slopes, temperature = slopes.of(few_N), temperature_of(temperature, few_N)
            hidden_NH = hidden_NH[few_N]
        d_hidden_NH = torch.zeros_like(hidden_NH, dtype=whole.origin.dtype) if of_hidden else None
        real, fused = asked.columns.real, ctx.parts.fused
        d_weight = WeightGradient(ctx.weight, of_weight, fused, written=real)
        product = Product()
        for part in ctx.parts.of_columns(len(hidden_NH), real, hidden_NH.dtype):
            logits_Nv = product(hidden_NH, weight_VH[part].t())
            here = slopes._replace(local=slopes.local - part.start)
            columns = asked.columns._replace(real=part.stop - part.start)
            rows = [logits_Nv]
            write_gradient(rows, rows, None, here, temperature, columns, asked.wanted)
            if d_hidden_NH is not None:
                if d_hidden_NH.dtype == logits_Nv.dtype:
                    d_hidden_NH.addmm_(logits_Nv, weight_VH[part])
                else:
                    d_hidden_NH += logits_Nv @ weight_VH[part]
            d_weight.add(part, logits_Nv, hidden_NH)
        if few_N is not None and d_hidden_NH is not None:
            d_hidden_NH = d_hidden_NH.new_zeros(shape).masked_scatter_(few_N[:, None], d_hidden_NH)
        return of_all_ranks(d_hidden_NH, ctx.parts, asked.columns), d_weight.done(), *nothing


def _partial_by_columns(
    hidden_NH: Tensor, weight_VH: Tensor, asked: Asked, parts: Parts
) -> Partial:
    """Statistics of this rank's columns."""
    found, own, product = [], [], Product()
    for part in parts.of_columns(len(hidden_NH), asked.columns.real, hidden_NH.dtype):
        logits_Nv = product(hidden_NH, weight_VH[part].t())
        here = asked.columns._replace(real=part.stop - part.start)
        local_n = asked.local - part.start
        found.append(partial_of(logits_Nv, local_n, None, asked.temperature, here, asked.wanted))
        own.append(is_ours(local_n, here.real))
    return merged(found, own, asked.temperature)


def of_all_ranks(d_hidden_NH: Tensor | None, parts: Parts, columns: Columns) -> Tensor | None:
    """The hidden states' gradient. With `reduce` a collective of the group's ranks."""
    if d_hidden_NH is not None and parts.reduce:
        dist.all_reduce(d_hidden_NH, group=columns.group)
    return d_hidden_NH
