"""`vocab_topk` finds a teacher's likeliest tokens; `topk_kl` a student's divergence from them.

Legend: N tokens, n some of them, V columns of the vocabulary on this rank, R ranks, K requested
tokens, C candidates of a rank, W candidates of all ranks.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .api import TokenStats
from .arguments import Call
from .errors import dense, misfit, one_of, within
from .kernels import local_statistics
from .statistics import Partial, TokenBatch, accumulated, all_gathered, per_row


class TopK(NamedTuple):
    """Holds the K most likely tokens of each distribution, the most likely first.

    Of equally likely tokens the one with the lowest id is first. Masked tokens have zeros, and
    `ignore_index` for ids.
    """

    logprob: Tensor
    """[..., K], over the whole vocabulary; float32, or float64 for such logits."""
    ids: Tensor
    """[..., K] of int64, in the whole vocabulary."""
    rest: Tensor
    """[...], the log-prob of all other tokens together; -inf if there is no other token."""
    lse: Tensor
    """[...], log Σ exp(logits / temperature)."""


def vocab_topk(
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    weight: Tensor | None = None,
    k: int,
    tp_group: Any = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    token_mask: Tensor | None = None,
    ignore_index: int = -100,
    hidden_layout: Literal["replicated", "sequence_parallel"] = "replicated",
    workspace_bytes: int | None = None,
) -> TopK:
    """Find the K most likely tokens and their log-probs, which a student learns from a teacher.

    It reads the logits once, a few rows at a time, or makes them from hidden states some tokens at
    a time; it takes O(tokens · K) memory and the workspace. The result has no gradient: the student
    calls `token_logprobs` for its own log-probs of `ids`, and `topk_kl` for the divergence.

    With a `tp_group` of several ranks all of them take part in one all-gather of 12 + 8 · K bytes
    per token and rank, and find the same bits.

    Args:
        logits: [..., V / tp], or `hidden` and `weight`, as of `token_logprobs`; so are `tp_group`,
            `vocab_size`, `temperature`, `token_mask`, `hidden_layout` and `workspace_bytes`.
        k: the number of tokens, from 1 to the size of the vocabulary.
        ignore_index: the value of `ids` for masked tokens.

    Returns:
        TopK, [..., K] and [...].

    Raises:
        ValueError: more tokens than the vocabulary has, or what `token_logprobs` refuses.

    Example:
        teacher = vocab_topk(logits=logits, k=64, tp_group=group, vocab_size=vocab_size)
    """
    # `Call` has a field for each argument of this function.
    call = Call(caller="vocab_topk", **locals())
    columns = call.columns
    source = call.source_of()(*call.inputs())
    with torch.no_grad():
        width, count = min(k, columns.per_rank), min(k, columns.real)
        ids_NC = torch.zeros(call.count, width, dtype=torch.int64, device=call.input.device)
        like_N = ids_NC.new_zeros(call.count, dtype=accumulated(source.dtype))
        sums = Partial.empty(like_N, like_N.new_full((call.count, width), -torch.inf))
        batch = call.batch(ids_NC)
        for part, logits_nV in source.parts() if count and call.count else ():
            # The sums leave these columns out, so that the log-prob of all other tokens is exact.
            ids_nC = largest(logits_nV, count) + columns.first
            partial = local_statistics(logits_nV, None, batch.select(part)._replace(targets=ids_nC))
            for into_N, values_n in zip(sums[:3], partial[:3], strict=True):
                into_N[part] = values_n
            sums.target[part, :count], ids_NC[part, :count] = partial.target, ids_nC
        topk = _of_all_ranks(sums, k, batch)
    ids = call.shaped(topk.ids, fill=ignore_index)
    return TopK(*map(call.shaped, topk))._replace(ids=ids)


def largest(logits_nV: Tensor, count: int) -> Tensor:
    """Return the columns of the C = `count` largest logits in each row, [n, C], the largest logit
    first.

    Of equal logits those in the lowest columns are chosen, and come first.
    """
    count_and_next = min(count + 1, logits_nV.shape[1])
    values_nX, column_nX = logits_nV.topk(count_and_next, -1)
    column_nC = column_nX[:, :count]
    if count_and_next > count:
        # Among logits equal to the last one, the choice of `topk` is arbitrary.
        tied_b = (values_nX[:, -1] == values_nX[:, -2]).nonzero().squeeze(1)
        if len(tied_b):
            lowest_bC = _lowest_of_equal(
                logits_nV[tied_b], values_nX[tied_b, :count], column_nC[tied_b]
            )
            column_nC = column_nC.index_copy(0, tied_b, lowest_bC)
    column_nC = column_nC.sort(-1).values
    by_value_nC = logits_nV.gather(1, column_nC).sort(dim=-1, descending=True, stable=True).indices
    return column_nC.gather(1, by_value_nC)


def _lowest_of_equal(logits_bV: Tensor, values_bC: Tensor, column_bC: Tensor) -> Tensor:
    """Return `column_bC`, the columns of each row's C largest logits, with ties resolved: of all
    columns whose logit equals the smallest chosen one, the lowest are chosen. Columns with larger
    logits stay.
    """
    last_b1 = values_bC[:, -1:]
    above_b = (values_bC > last_b1).sum(-1)
    row_e, column_e = (logits_bV == last_b1).nonzero().unbind(1)
    entry_e = torch.arange(len(row_e), device=row_e.device)
    token_b = torch.arange(len(logits_bV), device=row_e.device)
    slot_e = above_b[row_e] + entry_e - torch.searchsorted(row_e, token_b)[row_e]
    is_chosen_e = slot_e < values_bC.shape[1]
    return column_bC.index_put((row_e[is_chosen_e], slot_e[is_chosen_e]), column_e[is_chosen_e])


def _of_all_ranks(sums: Partial, k: int, batch: TokenBatch) -> TopK:
    """Gather all ranks' candidates and sums; return the `TopK` of the whole vocabulary.
    All ranks return an equal `TopK`.

    The group's ranks take part in one all-gather.
    """
    dtype, ids_NC, temperature = sums.origin.dtype, batch.targets, batch.temperature
    # As bits: float32 does not have every id.
    bits = torch.int32 if dtype == torch.float32 else torch.int64
    sent_NX = torch.cat([sums.packed(), ids_NC.to(bits).view(dtype)], -1)
    gathered_RNX = all_gathered(sent_NX, batch.columns.group)
    width = ids_NC.shape[1]
    sums_RN3, logits_RNC, bits_RNC = torch.split(gathered_RNX, [3, width, width], -1)
    # Ranks have their columns in order, so of equal logits the lowest id comes first.
    logits_NW = logits_RNC.transpose(0, 1).flatten(1)
    ids_NW = bits_RNC.contiguous().view(bits).long().transpose(0, 1).flatten(1)
    ordered_NW, place_NW = logits_NW.sort(dim=-1, descending=True, stable=True)
    ordered_NW = ordered_NW.double()
    origin_RN, mass_RN, _ = sums_RN3.double().unbind(-1)
    top_N = torch.maximum(origin_RN.amax(0), ordered_NW[:, 0])
    z_NW = (ordered_NW - top_N[:, None]) / per_row(temperature)
    others_N = (mass_RN * ((origin_RN - top_N) / temperature).exp()).sum(0)
    # Other columns are summed separately: beside a probability near 1 they would be rounded off.
    others_RN = (origin_RN - top_N) / temperature + mass_RN.log()
    others_NX = torch.cat([others_RN.t(), z_NW[:, k:]], -1)
    rest_N = others_NX.logsumexp(-1)
    log_sum_N = (others_N + z_NW.exp().sum(-1)).log()
    return TopK(
        logprob=(z_NW[:, :k] - log_sum_N[:, None]).to(dtype),
        ids=ids_NW.gather(1, place_NW[:, :k]),
        rest=(rest_N - log_sum_N).to(dtype),
        lse=(top_N / temperature + log_sum_N).to(dtype),
    )


class TokenKL(NamedTuple):
    """Holds the student's divergence from the teacher for each token, [...], in nats; float32, or
    float64 for such logits.

    It is zero for tokens that are masked.
    """

    kl: Tensor
    student_mass: Tensor
    """The probability that the student gives the teacher's K tokens; not differentiable."""
    teacher_mass: Tensor
    """The probability that the teacher gives its K tokens."""


def topk_kl(
    stats: TokenStats,
    teacher_logprobs: Tensor,
    *,
    teacher_rest: Tensor | None = None,
    valid: Tensor | None = None,
    direction: Literal["forward", "reverse", "mixed"] = "forward",
    mix: float = 0.5,
    tail: Literal["bucket", "ignore", "renormalize"] = "bucket",
) -> TokenKL:
    """Compute the student's divergence from a teacher's K tokens, differentiable in the student.

    With t and s the probabilities of the K tokens over the whole vocabularies, and t_rest and
    s_rest those of all other tokens together,

    - "bucket" gives both distributions K + 1 outcomes, of which the last is any other token:
      forward Σ t·(log t - log s) + t_rest·(log t_rest - log s_rest). This is never more than the
      divergence of the whole vocabulary, and never below 0 but for rounding.
    - "ignore" takes the K summands alone, Σ t·(log t - log s). This is no divergence: it may be
      below 0.
    - "renormalize" divides s and t by their sums over the K tokens, so that the probability that
      the student gives other tokens does not count.

    The forward direction is KL(teacher ‖ student); the reverse one swaps s and t. Summands whose
    first factor is 0 are 0. Nothing is averaged, and nothing is multiplied by the square of the
    temperature.

    Args:
        stats: what `token_logprobs` or `model_logprobs` returned for the teacher's ids as targets.
        teacher_logprobs: [..., K], over the teacher's whole vocabulary; taken as they are, because
            they have the teacher's temperature already.
        teacher_rest: [...], the teacher's log-prob of all other tokens; None for what
            `teacher_logprobs` leave of 1, and no less than the rounding of their type.
        valid: [..., K] of bool, False for entries whose ids were `ignore_index`; None if all are
            ids. Tokens that were masked are known from the stats.
        direction: "forward", "reverse", or "mixed": mix · forward + (1 - mix) · reverse.
        mix: the forward direction's share in "mixed".
        tail: "bucket", "ignore" or "renormalize".

    Returns:
        TokenKL, [...], without gradient where the divergence is infinite.

    Raises:
        ValueError: stats of one target per token, or shapes that do not fit.

    Example:
        stats = model_logprobs(model, *inputs, targets=teacher.ids)
        kl = topk_kl(stats, teacher.logprob, teacher_rest=teacher.rest).kl
    """
    caller = "topk_kl"
    one_of(caller, "direction", direction, ("forward", "reverse", "mixed"))
    one_of(caller, "tail", tail, ("bucket", "ignore", "renormalize"))
    remedy = "pass the forward direction's share, from 0 to 1"
    within(caller, "mix", mix, (int, float), (0, 1), remedy)
    if stats.rest is None:
        argument = f"stats of targets of shape {tuple(stats.logprob.shape)}, one for each token"
        raise misfit(caller, argument, "compute them with the teacher's ids as targets, [..., K]")
    for name, value, like in (
        ("teacher_logprobs", teacher_logprobs, stats.logprob),
        ("teacher_rest", teacher_rest, stats.rest),
        ("valid", valid, stats.logprob),
    ):
        if value is not None:
            dense(caller, name, value)
        if value is not None and value.shape != like.shape:
            argument = f"{name} of shape {tuple(value.shape)} for a student's of"
            raise misfit(caller, f"{argument} {tuple(stats.logprob.shape)}", f"{tuple(like.shape)}")
    # Zeros for all of them are a token that was not computed: no probabilities add up to K + 1.
    computed = (stats.rest != 0) | (stats.logprob != 0).any(-1)
    valid_K = computed[..., None] if valid is None else valid & computed[..., None]
    student_K = stats.logprob.double().masked_fill(~valid_K, -torch.inf)
    teacher_K = teacher_logprobs.detach().double().masked_fill(~valid_K, -torch.inf)
    student_mass, teacher_mass = student_K.detach().exp().sum(-1), teacher_K.exp().sum(-1)
    if tail == "bucket":
        student_rest = stats.rest.double()
        if teacher_rest is None:
            teacher_rest = _unnamed_logprob(
                teacher_K, teacher_mass, student_rest, teacher_logprobs.dtype
            )
        # Tokens without any entry have no outcomes at all.
        rests = torch.stack([student_rest, teacher_rest.detach().double()])[..., None]
        rests = rests.masked_fill(~valid_K.any(-1, keepdim=True), -torch.inf)
        student_K = torch.cat([student_K, rests[0]], -1)
        teacher_K = torch.cat([teacher_K, rests[1]], -1)
    elif tail == "renormalize":
        student_K, teacher_K = _renormalized(student_K), _renormalized(teacher_K)
    forward = {"forward": 1.0, "reverse": 0.0, "mixed": mix}[direction]
    kl = torch.zeros_like(teacher_mass)
    if forward:
        kl = kl + forward * _kl(teacher_K, student_K)
    if forward < 1:
        kl = kl + (1.0 - forward) * _kl(student_K, teacher_K)
    # In a mix the finite direction would have a gradient.
    kl = kl.masked_fill(kl == torch.inf, torch.inf)
    dtype = stats.logprob.dtype
    return TokenKL(kl.to(dtype), student_mass.to(dtype), teacher_mass.to(dtype))


def _unnamed_logprob(
    teacher_K: Tensor, mass: Tensor, student_rest: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the log-prob of all tokens other than the teacher's K together.
    Their probability is 1 minus the probabilities of the K.

    It is at least the rounding error of the K, because less is not significant. It is -inf if no
    more is left and the student has no other token.
    """
    size_K = torch.where(teacher_K > -torch.inf, 1 - teacher_K, 0.0)
    rounding = torch.finfo(dtype).eps * (teacher_K.exp() * size_K).sum(-1)
    remainder = 1 - mass
    nothing = (remainder <= rounding) & (student_rest == -torch.inf)
    return torch.maximum(remainder, rounding).log().masked_fill(nothing, -torch.inf)


def _renormalized(logprob_K: Tensor) -> Tensor:
    """Normalize a token's log-probs, so that their probabilities add up to 1. A token whose
    probabilities are all 0 keeps its log-probs.
    """
    total = logprob_K.logsumexp(-1, keepdim=True)
    return logprob_K - torch.where(total > -torch.inf, total, 0.0)


def _kl(first_K: Tensor, second_K: Tensor) -> Tensor:
    """Sum p·(log p - log q), given log p and log q; infinite, without gradient, if q is 0 where p
    is not.
    """
    takes_part_K = first_K > -torch.inf
    infinite = (takes_part_K & (second_K == -torch.inf)).any(-1)
    used_K = takes_part_K & ~infinite[..., None]
    # Not -inf · 0, whose gradient would be NaN.
    first_K = torch.where(used_K, first_K, 0.0)
    second_K = torch.where(used_K, second_K, 0.0)
    summands_K = torch.where(used_K, first_K.exp() * (first_K - second_K), 0.0)
    return summands_K.sum(-1).masked_fill(infinite, torch.inf)
