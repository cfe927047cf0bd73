"""`token_kl` computes a student's divergence from a teacher's logits, or its K likeliest tokens.

Legend: V columns of the vocabulary on a rank, K tokens of the teacher.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .api import TokenStats, token_logprobs
from .arguments import (
    Inputs,
    ResultLayout,
    dense,
    floating,
    integer,
    masked_tokens,
    one_of,
    positive,
)
from .divergence import DirectionWeights, Distillation, DivergenceFromHidden, DivergenceFromLogits
from .sources import as_matrices

_NAME = "token_kl"
Direction = Literal["forward", "reverse", "mixed"]
Tail = Literal["bucket", "ignore", "renormalize"]
_DIRECTIONS = ("forward", "reverse", "mixed")
_TAILS = ("bucket", "ignore", "renormalize")


class TokenKL(NamedTuple):
    """Holds the divergence of each token, [...], in nats; float32, or float64 for such logits.

    It is zero for tokens that are masked.
    """

    kl: Tensor
    student_mass: Tensor | None = None
    """The probability that the student gives the teacher's K tokens; not differentiable. None
    if the teacher gives logits."""
    teacher_mass: Tensor | None = None
    """The probability that the teacher gives its K tokens; None if it gives logits."""


def weights_of(who: str, direction: str, mix: float) -> DirectionWeights:
    """Return the shares of the two directions, or raise `ValueError`."""
    one_of(who, "direction", direction, _DIRECTIONS)
    if isinstance(mix, bool) or not isinstance(mix, (int, float)) or not 0 <= mix <= 1:
        raise ValueError(
            f"{who}() got mix={mix!r}: pass the forward direction's share, from 0 to 1"
        )
    if direction == "mixed":
        return DirectionWeights(float(mix), 1.0 - mix)
    return DirectionWeights(1.0, 0.0) if direction == "forward" else DirectionWeights(0.0, 1.0)


def token_kl(
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    weight: Tensor | None = None,
    teacher_logits: Tensor | None = None,
    teacher_ids: Tensor | None = None,
    teacher_logprobs: Tensor | None = None,
    teacher_rest: Tensor | None = None,
    direction: Direction = "forward",
    mix: float = 0.5,
    tail: Tail = "bucket",
    tp_group: Any = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    token_mask: Tensor | None = None,
    ignore_index: int = -100,
    ownership: Literal["borrow", "consume"] = "borrow",
    hidden_layout: Literal["replicated", "sequence_parallel"] = "replicated",
    gradient_accumulation_fusion: bool = False,
    workspace_bytes: int | None = None,
) -> TokenKL:
    """Compute each token's divergence from a teacher, differentiable in the student.

    With s and t the probabilities of student and teacher, the forward direction is
    KL(teacher ‖ student) = Σ t·(log t - log s), the reverse one KL(student ‖ teacher) =
    Σ s·(log s - log t), and "mixed" is mix · forward + (1 - mix) · reverse. Nothing is averaged,
    and nothing multiplied by the square of the temperature.

    Given a teacher's logits, it reads both logits once, and once more in the backward. It keeps no
    softmax, so besides the gradient it takes O(tokens) memory and the workspace. TP ranks make one
    all-gather in the forward, of 24 bytes per token and rank, and find the same bits. The backward
    makes no collective, except for the one of `token_logprobs` if hidden states were given. A
    divergence Σ p·(log p - log q) is infinite, and has no gradient, if q is 0 where p is not.

    Given a teacher's K most likely tokens, as `vocab_topk` or an engine reports them, it computes
    the student's log-probs over the whole vocabulary with one `token_logprobs` call. `topk_kl` says
    how the divergence is made from them, and what becomes of the tail: all other tokens.

    Args:
        logits: the student's, or `hidden` and `weight`, as of `token_logprobs`; so are `tp_group`,
            `vocab_size`, `token_mask`, `ownership`, `hidden_layout`,
            `gradient_accumulation_fusion` and `workspace_bytes`.
        teacher_logits: [..., V / tp], floating point of any type: the teacher's columns of this
            rank, in the student's layout. They are not changed, and are kept for the backward.
        teacher_ids: [..., K] of int64 or int32, in place of `teacher_logits`: ids in the whole
            vocabulary, each once; `ignore_index` fills up tokens that have fewer.
        teacher_logprobs: [..., K], the ids' log-probs over the teacher's whole vocabulary.
        teacher_rest: [...], the teacher's log-prob of all other tokens together, as `vocab_topk`
            reports it; None to take what `teacher_logprobs` leave of 1.
        direction: "forward", "reverse" or "mixed".
        mix: the forward direction's share in "mixed".
        tail: "bucket", "ignore" or "renormalize", as of `topk_kl`; for a teacher's K tokens only.
        temperature: the number that both logits are divided by, or [...] with one for each token.
            `teacher_logprobs` are taken as they are: they have the teacher's temperature already.
        ignore_index: stands in `teacher_ids` for entries that are no tokens.

    Returns:
        TokenKL, [...].

    Raises:
        ValueError: what `token_logprobs` refuses, a teacher that gives both or neither, shapes that
            do not fit, a teacher that requires a gradient, or an id that is named twice.

    Example:
        found = token_kl(logits=logits, teacher_logits=teacher_logits, direction="reverse")
        loss = (found.kl * loss_mask).sum() / loss_mask.sum()
    """
    weights = weights_of(_NAME, direction, mix)
    one_of(_NAME, "tail", tail, _TAILS)
    of_teacher = {
        "teacher_logits": teacher_logits,
        "teacher_ids": teacher_ids,
        "teacher_logprobs": teacher_logprobs,
        "teacher_rest": teacher_rest,
    }
    given = [name for name, value in of_teacher.items() if value is not None]
    if given not in (["teacher_logits"], [*of_teacher][1:3], [*of_teacher][1:]):
        raise ValueError(
            f"{_NAME}() got {', '.join(given) or 'no teacher'}: teacher_logits, or teacher_ids "
            "and teacher_logprobs"
        )
    integer(_NAME, "ignore_index", ignore_index)
    for name in given:
        dense(_NAME, name, of_teacher[name])
        if of_teacher[name].requires_grad:  # type: ignore[union-attr]
            raise ValueError(f"{_NAME}() does not differentiate by {name}: detach() it")
    common: dict[str, Any] = {
        "logits": logits,
        "hidden": hidden,
        "weight": weight,
        "tp_group": tp_group,
        "vocab_size": vocab_size,
        "ownership": ownership,
        "hidden_layout": hidden_layout,
        "workspace_bytes": workspace_bytes,
    }
    if teacher_logits is not None:
        inputs = Inputs.accepted(_NAME, **common, fused=gradient_accumulation_fusion)
        return _of_logits(inputs, teacher_logits, weights, temperature, token_mask)
    assert teacher_ids is not None
    assert teacher_logprobs is not None
    shape, of_ids = teacher_ids.shape[:-1], teacher_ids.shape
    rest_shape = shape if teacher_rest is None else teacher_rest.shape
    if not teacher_ids.dim() or (teacher_logprobs.shape, rest_shape) != (of_ids, shape):
        rests = "" if teacher_rest is None else f" and teacher_rest of shape {tuple(rest_shape)}"
        raise ValueError(
            f"{_NAME}() got teacher_ids of shape {tuple(of_ids)}, teacher_logprobs of shape "
            f"{tuple(teacher_logprobs.shape)}{rests}: [..., K], [..., K] and [...]"
        )
    floating(_NAME, "teacher_logprobs", teacher_logprobs)
    valid = teacher_ids != ignore_index
    _refuse_repeats(teacher_ids, valid, token_mask)
    stats = token_logprobs(
        targets=teacher_ids,
        temperature=temperature,
        token_mask=token_mask,
        ignore_index=ignore_index,
        gradient_accumulation_fusion=gradient_accumulation_fusion,
        **common,
    )
    return _topk_kl(stats, teacher_logprobs, teacher_rest, valid, weights, tail)


def _of_logits(
    inputs: Inputs,
    teacher: Tensor,
    weights: DirectionWeights,
    temperature: float | Tensor,
    token_mask: Tensor | None,
) -> TokenKL:
    columns = inputs.columns
    floating(_NAME, "teacher_logits", teacher)
    wanted = torch.Size([*inputs.shape, columns.per_rank])
    if teacher.shape != wanted:
        raise ValueError(
            f"{_NAME}() got teacher_logits of shape {tuple(teacher.shape)} for a student of "
            f"{tuple(wanted)}: the columns that this rank has of the student"
        )
    tokens = masked_tokens(_NAME, inputs.shape, token_mask)
    positive(_NAME, temperature, inputs.shape, tokens)
    rows = inputs.rows()
    layout = ResultLayout(rows, tokens)
    from_logits = inputs.logits is not None
    asked = Distillation(
        weights,
        tokens.computed,
        layout.chosen(temperature),
        columns,
        inputs.consumes(layout.order, stacklevel=4),
        inputs.workspace(),
        compact=not from_logits,
    )
    if from_logits:
        of_logits: Any = DivergenceFromLogits.apply
        found = of_logits(rows, teacher, layout.kept_N, asked)
    else:
        (panels,) = as_matrices(layout.order.rows(teacher)[..., : columns.real])
        of_hidden: Any = DivergenceFromHidden.apply
        of_teacher = panels, layout.kept_N
        found = of_hidden(layout.chosen(rows), inputs.weight, *of_teacher, asked, inputs.parts())
    return TokenKL(layout.shaped(found))


def _refuse_repeats(ids_K: Tensor, valid_K: Tensor, token_mask: Tensor | None) -> None:
    """Raise `ValueError` if an id is named twice, so that its probability would count twice.

    The host reads the answer from the device.
    """
    if token_mask is not None and token_mask.shape == ids_K.shape[:-1]:
        valid_K = valid_K & token_mask[..., None]
    # Entries that are none differ from each other, and from all ids.
    places_K = -1 - torch.arange(ids_K.shape[-1], device=ids_K.device)
    sorted_K = torch.where(valid_K, ids_K.long(), places_K).sort(-1).values
    again_K = sorted_K[..., 1:] == sorted_K[..., :-1]
    if again_K.any():
        raise ValueError(
            f"{_NAME}() got id {int(sorted_K[..., 1:][again_K][0])} twice for a token in "
            "teacher_ids: name each once, and fill what is left with ignore_index"
        )


def topk_kl(
    stats: TokenStats,
    teacher_logprobs: Tensor,
    *,
    teacher_rest: Tensor | None = None,
    valid: Tensor | None = None,
    direction: Direction = "forward",
    mix: float = 0.5,
    tail: Tail = "bucket",
) -> TokenKL:
    """Compute the student's divergence from a teacher's K tokens, given the student's log-probs.

    It does what `token_kl` does with a teacher's ids, for log-probs that a model has made
    already: `model_logprobs(..., targets=teacher_ids)`. With t and s the probabilities of the K
    tokens over the whole vocabularies, and t_rest and s_rest those of all other tokens together,

    - "bucket" gives both distributions K + 1 outcomes, of which the last is any other token:
      forward Σ t·(log t - log s) + t_rest·(log t_rest - log s_rest). This is never more than the
      divergence of the whole vocabulary, and never below 0 but for rounding.
    - "ignore" takes the K summands alone, Σ t·(log t - log s). This is no divergence: it may be
      below 0.
    - "renormalize" divides s and t by their sums over the K tokens, so that the probability that
      the student gives other tokens does not count.

    The reverse direction swaps s and t. Summands whose first factor is 0 are 0.

    Args:
        stats: what `token_logprobs` or `model_logprobs` returned for the teacher's ids as targets.
        teacher_logprobs: [..., K], over the teacher's whole vocabulary.
        teacher_rest: [...], the teacher's log-prob of all other tokens; None for what
            `teacher_logprobs` leave of 1, and no less than the rounding of their type.
        valid: [..., K] of bool, False for entries whose ids were `ignore_index`; None if all are
            ids. Tokens that were masked are known from the stats.
        direction, mix: as of `token_kl`.
        tail: "bucket", "ignore" or "renormalize".

    Returns:
        TokenKL, [...], without gradient where the divergence is infinite.

    Raises:
        ValueError: stats of one target per token, or shapes that do not fit.

    Example:
        stats = model_logprobs(model, *inputs, targets=teacher.ids)
        kl = topk_kl(stats, teacher.logprob, teacher_rest=teacher.rest).kl
    """
    who = "topk_kl"
    weights = weights_of(who, direction, mix)
    one_of(who, "tail", tail, _TAILS)
    if stats.rest is None:
        raise ValueError(
            f"{who}() got stats of targets of shape {tuple(stats.logprob.shape)}, one for each "
            "token: compute them with the teacher's ids as targets, [..., K]"
        )
    shapes = {
        "teacher_logprobs": (teacher_logprobs, stats.logprob.shape),
        "teacher_rest": (teacher_rest, stats.rest.shape),
        "valid": (valid, stats.logprob.shape),
    }
    for name, (value, shape) in shapes.items():
        if value is not None:
            dense(who, name, value)
        if value is not None and value.shape != shape:
            raise ValueError(
                f"{who}() got {name} of shape {tuple(value.shape)} for a student's of "
                f"{tuple(stats.logprob.shape)}: {tuple(shape)}"
            )
    if valid is None:
        valid = torch.ones_like(teacher_logprobs, dtype=torch.bool)
    return _topk_kl(stats, teacher_logprobs, teacher_rest, valid, weights, tail)


def _topk_kl(
    stats: TokenStats,
    teacher_logprobs: Tensor,
    teacher_rest: Tensor | None,
    valid_K: Tensor,
    weights: DirectionWeights,
    tail: Tail,
) -> TokenKL:
    """Compute the divergence in float64 from the log-probs of K tokens and of the rest."""
    assert stats.rest is not None
    none = -torch.inf
    # Zeros for all of them are a token that was not computed: no probabilities add up to K + 1.
    nothing = (stats.rest == 0) & (stats.logprob == 0).all(-1)
    valid_K = valid_K & ~nothing[..., None]
    student_K = stats.logprob.double().masked_fill(~valid_K, none)
    teacher_K = teacher_logprobs.detach().double().masked_fill(~valid_K, none)
    student_mass, teacher_mass = student_K.detach().exp().sum(-1), teacher_K.exp().sum(-1)
    if tail == "bucket":
        rest = stats.rest.double()
        if teacher_rest is None:
            left = _left(teacher_K, teacher_mass, rest, teacher_logprobs.dtype)
        else:
            left = teacher_rest.detach().double()
        # Tokens without any entry have no outcomes at all.
        nothing = ~valid_K.any(-1)
        rest, left = rest.masked_fill(nothing, none), left.masked_fill(nothing, none)
        student_K = torch.cat([student_K, rest[..., None]], -1)
        teacher_K = torch.cat([teacher_K, left[..., None]], -1)
    elif tail == "renormalize":
        student_K = _renormalized(student_K)
        teacher_K = _renormalized(teacher_K)
    kl = torch.zeros_like(teacher_mass)
    if weights.forward:
        kl = kl + weights.forward * _kl(teacher_K, student_K)
    if weights.reverse:
        kl = kl + weights.reverse * _kl(student_K, teacher_K)
    dtype = stats.logprob.dtype
    return TokenKL(kl.to(dtype), student_mass.to(dtype), teacher_mass.to(dtype))


def _left(teacher_K: Tensor, mass: Tensor, rest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the log-prob that the teacher's K log-probs leave for all other tokens.

    It is at least the rounding of the K, because less cannot be told from nothing. It is -inf if no
    more is left and the student has no other token.
    """
    size_K = torch.where(teacher_K > -torch.inf, 1 - teacher_K, 0.0)
    rounding = torch.finfo(dtype).eps * (teacher_K.exp() * size_K).sum(-1)
    left = 1 - mass
    nothing = (left <= rounding) & (rest == -torch.inf)
    return torch.maximum(left, rounding).log().masked_fill(nothing, -torch.inf)


def _renormalized(logprob_K: Tensor) -> Tensor:
    """Divide a token's probabilities by their sum; leave a token without any as it is."""
    total = logprob_K.logsumexp(-1, keepdim=True)
    return logprob_K - torch.where(total > -torch.inf, total, 0.0)


def _kl(first_K: Tensor, second_K: Tensor) -> Tensor:
    """Sum p·(log p - log q), given the logarithms; infinite, without gradient, if only q is 0."""
    takes_part_K = first_K > -torch.inf
    infinite = (takes_part_K & (second_K == -torch.inf)).any(-1)
    used_K = takes_part_K & ~infinite[..., None]
    # Not -inf · 0, whose gradient would be NaN.
    first_K = torch.where(used_K, first_K, 0.0)
    second_K = torch.where(used_K, second_K, 0.0)
    summands_K = torch.where(used_K, first_K.exp() * (first_K - second_K), 0.0)
    return summands_K.sum(-1).masked_fill(infinite, torch.inf)
