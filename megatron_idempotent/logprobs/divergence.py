"""Computes divergences between two softmaxes over a vocabulary that ranks share, and gradients.

No softmax is kept. Forward and backward each read some rows of both logits at a time; between the
two, six numbers per token are kept. The student's logits are given, or made from hidden states:
some columns of all tokens at a time, and again in the backward. The teacher's are read where they
are, and have no gradient.

Legend: N tokens, n some of them, H features, V columns of the vocabulary on this rank, P parts of
the columns (of a rank's, or ranks), s the student's probabilities and t the teacher's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kernels import Scratch, columns_of_blocks, differentiated, divisors, picked, scaled_logits
from .sources import (
    Order,
    Product,
    ProductParts,
    RowBlock,
    as_matrices,
    blocks,
    gradients_by_columns,
    once_differentiable,
    split_like,
    submask,
    zero_others,
)
from .statistics import FINITE, Columns, accumulated, all_gathered, temperature_of

#: Scratch of a block: what is made of the student's logits, of the teacher's, and exponentials.
_BUFFERS = 3


class DirectionWeights(NamedTuple):
    """Holds the shares that the two directions have in a divergence."""

    forward: float
    """The share of KL(teacher ‖ student) = Σ t·(log t - log s)."""
    reverse: float
    """The share of KL(student ‖ teacher) = Σ s·(log s - log t)."""


class Distillation(NamedTuple):
    """Holds the inputs and options of the tokens that are computed, except for both logits."""

    weights: DirectionWeights
    tokens: int
    """The number of tokens that are computed, N."""
    temperature: Tensor | float
    """The temperature of all tokens, or [N]."""
    columns: Columns
    consume: bool
    workspace_bytes: int
    compact: bool = False
    """True if the student's logits are a matrix of the computed tokens alone, made from hidden
    states; False if they have the rows of the teacher's."""


class PartialDivergence(NamedTuple):
    """Holds sums over some columns, each [N].

    z = (student's logit - origin) / temperature, and y is the same of the teacher.
    """

    origin: Tensor
    """The student's largest logit; `FINITE` if there is none."""
    exponentials: Tensor
    """Σ exp(z)"""
    teacher_origin: Tensor
    teacher_exponentials: Tensor
    """Σ exp(y)"""
    forward: Tensor
    """Σ exp(y)·(y - z); zeros if the forward direction has no share."""
    reverse: Tensor
    """Σ exp(z)·(z - y); zeros if the reverse direction has no share."""


class WholeDivergence(NamedTuple):
    """Holds statistics of all columns, each [N], which the backward needs."""

    origin: Tensor
    log_sum: Tensor
    """log Σ exp(z)"""
    teacher_origin: Tensor
    teacher_log_sum: Tensor
    reverse: Tensor
    """KL(student ‖ teacher), which its own gradient subtracts."""
    divergence: Tensor


def partial_divergence(
    student: list[Tensor],
    teacher: list[Tensor],
    kept_N: Tensor | None,
    like_N: Tensor,
    asked: Distillation,
) -> PartialDivergence:
    """Return sums over the columns of `teacher`, whose panels have all tokens' rows.

    So have those of `student`; or with `asked.compact` it is one matrix of the kept tokens.

    A summand p·(log p - log q) is 0 if p is 0, or too small for the type. It is infinite if q is 0
    and p is not.
    """
    found = PartialDivergence(*(like_N.clone() for _ in PartialDivergence._fields))
    found.origin.fill_(FINITE)
    found.teacher_origin.fill_(FINITE)
    if not teacher or not teacher[0].shape[-1]:
        return found
    scratch = _scratch(teacher, like_N, asked)
    cut = list(blocks([len(panel) for panel in teacher], kept_N, scratch.rows))
    columns_of = (split_like(cut, each[:, None]) for each in (found.origin, found.teacher_origin))
    sums_of = (split_like(cut, each) for each in (*found[1:2], *found[3:]))
    each_block = zip(cut, divisors(asked.temperature, cut), *columns_of, *sums_of, strict=True)
    for block, divisor, origin_n1, of_teacher_n1, sum_n, teacher_sum_n, *kl_n in each_block:
        logits_nV = scratch.read(_student_of(block, asked).read(student))
        teacher_nV = scratch.read(block.read(teacher), 1)
        torch.amax(logits_nV, -1, keepdim=True, out=origin_n1).clamp_(min=FINITE)
        torch.amax(teacher_nV, -1, keepdim=True, out=of_teacher_n1).clamp_(min=FINITE)
        z_nV, y_nV, exp_nV = (scratch(number, len(logits_nV))[0] for number in range(_BUFFERS))
        scaled_logits(logits_nV, origin_n1, divisor, z_nV)
        scaled_logits(teacher_nV, of_teacher_n1, divisor, y_nV)
        torch.sum(torch.exp(z_nV, out=exp_nV), -1, out=sum_n)
        apart_nV = z_nV.sub_(y_nV)
        torch.sum(y_nV.exp_(), -1, out=teacher_sum_n)
        # 0·inf is NaN, which is no summand here; NaN of a logit is in the sums above.
        if asked.weights.forward:
            kl_n[0].copy_(-y_nV.mul_(apart_nV).nansum(-1))
        if asked.weights.reverse:
            kl_n[1].copy_(exp_nV.mul_(apart_nV).nansum(-1))
    return found


def _scratch(panels: list[Tensor], like_N: Tensor, asked: Distillation) -> Scratch:
    return Scratch(
        [len(panel) for panel in panels],
        panels[0].shape[-1],
        like_N,
        asked.workspace_bytes,
        buffers=_BUFFERS,
    )


def _student_of(block: RowBlock, asked: Distillation) -> RowBlock:
    """Return the block of the student's logits, which may be a matrix of the kept tokens alone."""
    return RowBlock(0, block.kept, block.kept) if asked.compact else block


def combined(partial: PartialDivergence, asked: Distillation) -> WholeDivergence:
    """Combine the ranks' sums into divergences over the whole vocabulary.

    The group's ranks take part in one all-gather, of 24 bytes per token and rank. Sums are taken in
    float64 and in the order of ranks, so that all ranks find the same bits. No divergence is
    negative.
    """
    dtype = partial.origin.dtype
    parts_RN6 = all_gathered(torch.stack(partial, dim=-1), asked.columns.group)
    origin_N, sum_N, teacher_origin_N, teacher_sum_N, forward_N, reverse_N = _together(
        parts_RN6, asked.temperature
    )
    log_sum_N, teacher_log_sum_N = sum_N.log(), teacher_sum_N.log()
    of_sums_N = log_sum_N - teacher_log_sum_N
    forward_N = (forward_N / teacher_sum_N + of_sums_N).clamp(min=0)
    reverse_N = (reverse_N / sum_N - of_sums_N).clamp(min=0)
    shares = zip(asked.weights, (forward_N, reverse_N), strict=True)
    parts = [share * divergence_N for share, divergence_N in shares if share]
    found = (origin_N, log_sum_N, teacher_origin_N, teacher_log_sum_N, reverse_N, sum(parts))
    return WholeDivergence(*(torch.as_tensor(each).to(dtype) for each in found))


def merged(parts: list[PartialDivergence], temperature: Tensor | float) -> PartialDivergence:
    """Merge sums over parts of a rank's columns; without a collective."""
    if len(parts) == 1:
        return parts[0]
    parts_PN6 = torch.stack([torch.stack(part, dim=-1) for part in parts])
    found = _together(parts_PN6, temperature)
    return PartialDivergence(*(each.to(parts_PN6.dtype) for each in found))


def _together(parts_PN6: Tensor, temperature: Tensor | float) -> tuple[Tensor, ...]:
    """Return the fields of `PartialDivergence` over all parts together, in float64."""
    origin_PN, sum_PN, teacher_origin_PN, teacher_sum_PN, forward_PN, reverse_PN = (
        parts_PN6.double().unbind(-1)
    )
    origin_N, teacher_origin_N = origin_PN.amax(0), teacher_origin_PN.amax(0)
    below_PN = (origin_PN - origin_N) / temperature
    teacher_below_PN = (teacher_origin_PN - teacher_origin_N) / temperature
    apart_PN = below_PN - teacher_below_PN

    def sum_of(weight_PN: Tensor, values_PN: Tensor) -> Tensor:
        return torch.where(weight_PN == 0, 0.0, weight_PN * values_PN).sum(0)

    weight_PN, teacher_weight_PN = below_PN.exp(), teacher_below_PN.exp()
    return (
        origin_N,
        (weight_PN * sum_PN).sum(0),
        teacher_origin_N,
        (teacher_weight_PN * teacher_sum_PN).sum(0),
        sum_of(teacher_weight_PN, forward_PN - apart_PN * teacher_sum_PN),
        sum_of(weight_PN, reverse_PN + apart_PN * sum_PN),
    )


class Coefficients(NamedTuple):
    """Holds the numbers of each token's gradient, each [N].

    The gradient is exp(z)·(factor + slope·(z - y)) - of_teacher·exp(y).
    """

    origin: Tensor
    teacher_origin: Tensor
    factor: Tensor
    slope: Tensor | None
    of_teacher: Tensor | None

    @staticmethod
    def of(whole: WholeDivergence, given_N: Tensor, asked: Distillation) -> Coefficients:
        """Return the numbers with which the gradient's formula gives the divergence's gradient.

        That is g·(forward·(s - t) + reverse·s·(log s - log t - KL(s ‖ t))) / temperature, where g
        is `given_N`.
        """
        like_N = whole.origin
        _, log_sum_N, _, teacher_log_sum_N, reverse_N, _ = (each.double() for each in whole)
        given_N = given_N.double() / asked.temperature
        forward, reverse = asked.weights
        of_student_N = given_N * (-log_sum_N).exp()
        factor_N = forward * of_student_N
        slope = of_teacher = None
        if forward:
            of_teacher = (forward * given_N * (-teacher_log_sum_N).exp()).to(like_N)
        if reverse:
            slope_N = reverse * of_student_N
            centre_N = teacher_log_sum_N - log_sum_N - reverse_N
            factor_N = factor_N + torch.where(slope_N == 0, 0.0, slope_N * centre_N)
            slope = slope_N.to(like_N)
        return Coefficients(
            whole.origin, whole.teacher_origin, factor_N.to(like_N), slope, of_teacher
        )

    def some(self, tokens: Tensor) -> Coefficients:
        """Return the numbers of some tokens."""
        chosen: list[Any] = [None if each is None else each[tokens] for each in self]
        return Coefficients(*chosen)


def write_divergence_gradient(
    student: list[Tensor],
    into: list[Tensor],
    teacher: list[Tensor],
    kept_N: Tensor | None,
    found: Coefficients,
    asked: Distillation,
) -> None:
    """Write the kept tokens' gradient into panels as the student's, or into these themselves."""
    if not teacher or not teacher[0].shape[-1]:
        return
    scratch = _scratch(teacher, found.origin, asked)
    cut = list(blocks([len(panel) for panel in teacher], kept_N, scratch.rows))
    if not cut:
        return
    per_token = (columns_of_blocks(cut, each) for each in found)
    each_block = zip(cut, divisors(asked.temperature, cut), *per_token, strict=True)
    for block, divisor, origin_n1, of_teacher_n1, factor_n1, slope_n1, teacher_n1 in each_block:
        own = _student_of(block, asked)
        read_nV = own.read(student)
        z_nV, y_nV, exp_nV = (scratch(number, len(read_nV))[0] for number in range(_BUFFERS))
        # Where there is nothing to convert or to spread, it is computed where it belongs.
        place_nV = own.view(into)
        in_place = place_nV is not None and place_nV.dtype == z_nV.dtype
        out_nV = place_nV if place_nV is not None and in_place else z_nV
        scaled_logits(scratch.read(read_nV), origin_n1, divisor, out_nV)
        teacher_nV = scratch.read(block.read(teacher), 1)
        scaled_logits(teacher_nV, of_teacher_n1, divisor, y_nV)
        if slope_n1 is None:
            out_nV.exp_().mul_(factor_n1)
        else:
            torch.exp(out_nV, out=exp_nV)
            # -inf - -inf would be NaN, and so would 0·inf.
            out_nV.clamp_(min=FINITE).sub_(y_nV.clamp_(min=FINITE))
            out_nV.mul_(slope_n1).add_(factor_n1).mul_(exp_nV)
        if teacher_n1 is not None:
            out_nV.sub_(y_nV.exp_().mul_(teacher_n1))
        if not in_place:
            own.write(into, out_nV)


def computed_like(logits: Tensor, tokens: int) -> Tensor:
    """Return zeros [N] of the type in which logits of this type are computed."""
    return torch.zeros(tokens, dtype=accumulated(logits.dtype), device=logits.device)


class DivergenceFromLogits(torch.autograd.Function):
    """Computes the kept tokens' divergences from logits, [N] in the order of the student's rows."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor, kept_N: Tensor | None, asked: Distillation
    ) -> Tensor:
        """Compute the divergences; `asked` has an entry for each kept token."""
        student, of_teacher = _panels(asked, logits, logits, teacher)
        like_N = computed_like(logits, asked.tokens)
        whole = combined(partial_divergence(student, of_teacher, kept_N, like_N, asked), asked)
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
        found, _, kept_N, asked = _differentiated(WholeDivergence(*saved), given_N, kept_N, asked)
        # An alias that shares the version counter: who has saved the logits too is told of it.
        gradient = logits.detach() if asked.consume else torch.empty_like(logits)
        (all_of_it,) = as_matrices(Order(logits).rows(gradient))
        zero_others(all_of_it, kept_N, asked.columns.real)
        student, into, of_teacher = _panels(asked, logits, logits.detach(), gradient, teacher)
        write_divergence_gradient(student, into, of_teacher, kept_N, found, asked)
        return gradient, None, None, None


def _panels(asked: Distillation, like: Tensor, *tensors: Tensor) -> tuple[list[Tensor], ...]:
    """Return the real columns of each tensor as panels, in the order of the rows of `like`."""
    order, real = Order(like), asked.columns.real
    return tuple(
        [panel[:, :real] for panel in each]
        for each in as_matrices(*(order.rows(tensor) for tensor in tensors))
    )


def _differentiated(
    whole: WholeDivergence, given_N: Tensor, kept_N: Tensor | None, asked: Distillation
) -> tuple[Coefficients, Tensor | None, Tensor | None, Distillation]:
    """Return the coefficients of the tokens that have a gradient, and a mask of these, [N].

    The mask is None if all have one. `kept_N` and `asked` come back narrowed to these tokens.
    Infinite divergences have none.
    """
    given_N = torch.where(whole.divergence < torch.inf, given_N, 0.0)
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
            student = [product(hidden_NH, weight_VH[part].t())]
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
        found, few_N, kept_N, asked = _differentiated(whole, given_N, kept_N, ctx.asked)

        def write(part: slice, logits_Nv: Tensor) -> None:
            panels = [panel[:, part] for panel in teacher]
            student = [logits_Nv]
            write_divergence_gradient(student, student, panels, kept_N, found, asked)

        inputs = ctx.weight, hidden_NH, weight_VH
        of_these = asked.columns, ctx.parts, few_N
        needed, dtype = ctx.needs_input_grad[:2], whole.origin.dtype
        gradients = gradients_by_columns(
            *inputs, *of_these, needed=needed, dtype=dtype, write=write
        )
        return *gradients, None, None, None, None
