"""Holds the autograd functions of divergences from a teacher's logits.

The student's logits are given, or made from hidden states: some columns of all tokens at a time,
and again in the backward. The teacher's are read where they are, and have no gradient.

Legend: N tokens, H features, V columns of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd import of_all_ranks, zero_others
from .divergence import (
    Coefficients,
    Distillation,
    InPanels,
    InTurn,
    WholeDivergence,
    combined,
    computed_like,
    merged,
    partial_divergence,
    write_divergence_gradient,
)
from .kernels import differentiated, picked
from .request import temperature_of
from .rows import Order, as_matrices, submask
from .sources import (
    HiddenGradient,
    Product,
    ProductParts,
    WeightGradient,
    once_differentiable,
)


def _live(whole: WholeDivergence, given_N: Tensor) -> Tensor:
    """Return the gradients of the divergences, with 0 for infinite ones, which have none."""
    return torch.where(whole.divergence < torch.inf, given_N, 0.0)


class DivergenceFromLogits(torch.autograd.Function):
    """Computes the kept tokens' divergences from logits, [N] in the order of the student's rows."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor, kept_N: Tensor | None, asked: Distillation
    ) -> Tensor:
        """Compute the divergences; `asked` has an entry for each kept token."""
        order = Order(logits)
        rows, of_teacher = as_matrices(order.rows(logits), order.rows(teacher))
        real = asked.columns.real
        partial = partial_divergence(
            InPanels(rows, rows, real),
            [panel[:, :real] for panel in of_teacher],
            kept_N,
            computed_like(logits, asked.tokens),
            asked,
        )
        whole = combined(partial, asked)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, teacher, kept_N, *whole)
        ctx.asked = asked
        return whole.divergence.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given_N: Tensor) -> Any:
        """Compute the gradient of the student's logits, without a collective."""
        logits, teacher, kept_N, *saved = ctx.saved_tensors
        asked: Distillation = ctx.asked
        whole = WholeDivergence(*saved)
        found, _, kept_N, asked = _differentiated(whole, given_N, kept_N, asked)
        order, real = Order(logits), asked.columns.real
        # An alias that shares the version counter: who has saved the logits too is told of it.
        gradient = logits.detach() if asked.consume else torch.empty_like(logits)
        three = (logits.detach(), gradient, teacher)
        rows, into, of_teacher = as_matrices(*(order.rows(each) for each in three))
        zero_others(into, kept_N, real)
        student = InPanels(rows, into, real)
        panels = [panel[:, :real] for panel in of_teacher]
        write_divergence_gradient(student, panels, kept_N, found, asked)
        return gradient, None, None, None


def _differentiated(
    whole: WholeDivergence, given_N: Tensor, kept_N: Tensor | None, asked: Distillation
) -> tuple[Coefficients, Tensor | None, Tensor | None, Distillation]:
    """Return the coefficients of the tokens that have a gradient, and a mask of these, [N].

    The mask is None if all have one. `kept_N` and `asked` come back narrowed to these tokens.
    """
    given_N = _live(whole, given_N)
    found = Coefficients.of(whole, given_N, asked)
    few_N = picked(differentiated(given_N, None))
    if few_N is None:
        return found, None, kept_N, asked
    asked = asked._replace(temperature=temperature_of(asked.temperature, few_N))
    return found.some(few_N), few_N, submask(kept_N, few_N), asked


class DivergenceFromHidden(torch.autograd.Function):
    """Computes the divergences of tokens [N] from their hidden states, [N, H]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        teacher: list[Tensor],
        kept_N: Tensor | None,
        asked: Distillation,
        parts: ProductParts,
    ) -> Tensor:
        """Compute the divergences of logits `hidden_NH @ weight_VH.T`, in the type of both.

        `teacher` holds panels of all tokens' logits; `kept_N` masks the tokens that are computed.
        """
        product, found = Product(), []
        like_N = computed_like(hidden_NH, asked.tokens)
        for part in parts.of_columns(len(hidden_NH), asked.columns.real, hidden_NH.dtype):
            student = InTurn(product(hidden_NH, weight_VH[part].t()))
            panels = [panel[:, part] for panel in teacher]
            found.append(partial_divergence(student, panels, kept_N, like_N, asked))
        whole = combined(merged(found, asked.temperature), asked)
        if any(ctx.needs_input_grad[:2]):
            ctx.save_for_backward(hidden_NH, weight_VH, kept_N, *whole, *teacher)
        ctx.asked, ctx.parts = asked, parts
        ctx.weight = weight_VH  # what is saved may be another object, without its main_grad
        return whole.divergence.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given_N: Tensor) -> Any:
        """Make the same columns of the logits again, and from them both gradients.

        With `parts.reduce` the group's ranks take part in one all-reduce, in float32.
        """
        hidden_NH, weight_VH, kept_N, *saved = ctx.saved_tensors
        fields = len(WholeDivergence._fields)
        whole, teacher = WholeDivergence(*saved[:fields]), saved[fields:]
        asked: Distillation = ctx.asked
        parts: ProductParts = ctx.parts
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        shape, real = hidden_NH.shape, asked.columns.real
        found, few_N, kept_N, asked = _differentiated(whole, given_N, kept_N, asked)
        if few_N is not None:
            hidden_NH = hidden_NH[few_N]
        d_hidden = HiddenGradient(hidden_NH, of_hidden, whole.origin.dtype)
        d_weight = WeightGradient(ctx.weight, of_weight, parts.fused, written=real)
        product = Product()
        for part in parts.of_columns(len(hidden_NH), real, hidden_NH.dtype):
            logits_Nv = product(hidden_NH, weight_VH[part].t())
            panels = [panel[:, part] for panel in teacher]
            write_divergence_gradient(InTurn(logits_Nv), panels, kept_N, found, asked)
            d_hidden.add(logits_Nv, weight_VH[part])
            d_weight.add(part, logits_Nv, hidden_NH)
        d_hidden_NH = of_all_ranks(d_hidden.done(few_N, shape), parts, asked.columns)
        return d_hidden_NH, d_weight.done(), None, None, None, None
