"""Finds the tokens that a sampler kept, the same on all ranks that share the vocabulary.

A rank's highest logits are its candidates. One all-gather gives all candidates to all ranks, which
compute the same boundary. If columns that were not sent may be above it, more are sent.

Legend: n, s some of N tokens, R ranks, C candidates of a rank, W those of all ranks, X numbers that
a rank sends, E kept columns of this rank, K ids for a token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .errors import misfit, one_of, within
from .kernels import local_statistics
from .rows import rows_of_a_block
from .sources import Source
from .statistics import (
    FINITE,
    ID_DTYPES,
    Columns,
    GradCoefficients,
    Partial,
    TokenBatch,
    VocabStatistics,
    accumulated,
    all_gathered,
    combine,
    is_local,
    per_row,
    place_of,
    with_target,
)

#: The number of extra columns that are sent because they may have the same logit as the k-th.
_TIES = 32
_CANDIDATES = 128


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampling:
    """Describes the set of tokens from which each token was sampled, by top-k, top-p or the ids in
    the set.

    The set is made as engines make it: logits are divided by the temperature, the `top_k` most
    probable tokens are kept, and of those the fewest that together have `top_p` of the probability
    that was kept. Tokens with the same logit as the last of them are kept too. Or `keep` names the
    set, as an engine reports it: then no boundary is computed, on which engine and trainer could
    differ.

    Example: `Sampling(top_p=0.95, target="-inf")`.
    """

    top_k: int | None = 0
    """The number of tokens to keep, 1 or more; 0, -1 or None for all."""
    top_p: float = 1.0
    """The probability to keep, in (0, 1]; 1 for all."""
    keep: Tensor | None = None
    """[..., K] of int64 or int32: the ids that are kept for each token, in any order; negative
    entries fill up tokens that keep fewer."""
    target: Literal["keep", "-inf"] = "keep"
    """The treatment of a target that is not kept: "keep" adds it to those that are, "-inf" gives it
    that log-prob and no gradient."""
    candidates: int | None = None
    """The number of columns that each rank sends; None for 32 more than `top_k`, or 128. If they do
    not suffice for a token, eight times as many are sent, and so on."""

    def __post_init__(self) -> None:
        caller, unbounded = "Sampling", math.inf
        if self.top_k is not None:
            remedy = "pass a number of tokens; 0, -1 or None for all"
            within(caller, "top_k", self.top_k, int, (-1, unbounded), remedy)
        remedy = "pass a probability above 0; 1 for all"
        within(caller, "top_p", self.top_p, (int, float), (math.ulp(0.0), 1), remedy)
        one_of(caller, "target", self.target, ("keep", "-inf"))
        if self.candidates is not None:
            remedy = "pass at least 1, or None"
            within(caller, "candidates", self.candidates, int, (1, unbounded), remedy)
        keep = self.keep
        if keep is None:
            return
        if not isinstance(keep, Tensor) or keep.dtype not in ID_DTYPES or not keep.dim():
            kind = getattr(keep, "dtype", type(keep).__name__)
            remedy = "pass a tensor of int64 or int32, [..., ids]"
            raise misfit(caller, f"keep of {kind}", remedy)
        if self.limit > 0 or self.top_p < 1:
            remedy = "keep has what they left already, so leave them out"
            raise misfit(caller, f"keep, top_k={self.top_k} and top_p={self.top_p}", remedy)

    @property
    def limit(self) -> int:
        """The number of most likely tokens to keep (top-k), or 0 to keep all."""
        return max(self.top_k or 0, 0)

    def cuts(self, vocabulary: int) -> bool:
        """Return whether the sampling leaves out any token of a vocabulary of that size."""
        return self.keep is not None or self.top_p < 1 or 0 < self.limit < vocabulary

    def width(self) -> int:
        """Return the number of columns that each rank sends as candidates."""
        if self.candidates is not None:
            return self.candidates
        return self.limit + _TIES if self.limit else _CANDIDATES

    def thresholds(
        self,
        logits_nW: Tensor,
        mass_n: Tensor,
        beyond_n: Tensor | None,
        temperature: Tensor | float,
    ) -> tuple[Tensor, Tensor]:
        """Return for each token the lowest logit that top-k and top-p keep, and whether it is
        certain: no column that is not a candidate could change it; both [n].

        `logits_nW` are all ranks' candidates. `mass_n`, which is used without top-k only, is
        Σ exp((logit - max) / temperature) over the whole vocabulary, in float64. No logit that is
        not a candidate is above `beyond_n`, which is None if all are candidates.
        """
        ordered_nW = logits_nW.sort(-1, descending=True).values
        lowest_n = ordered_nW.new_full((len(ordered_nW),), -torch.inf)
        sure_n = torch.ones_like(lowest_n, dtype=torch.bool)
        if self.limit:
            lowest_n = ordered_nW[:, min(self.limit, ordered_nW.shape[1]) - 1]
            sure_n = _nothing_beyond(lowest_n, beyond_n)
        if self.top_p >= 1:
            return lowest_n, sure_n
        z_nW = (ordered_nW.double() - ordered_nW[:, :1].clamp(min=FINITE)) / per_row(temperature)
        mass_nW = z_nW.exp().masked_fill_(ordered_nW < lowest_n[:, None], 0)
        if self.limit:
            mass_n = mass_nW.sum(-1)
        mass_before_nW = mass_nW.cumsum(-1) - mass_nW
        count_n = (mass_before_nW < self.top_p * mass_n[:, None]).sum(-1).clamp(min=1)
        last_n = ordered_nW.gather(1, count_n[:, None] - 1).squeeze(1)
        return torch.maximum(lowest_n, last_n), sure_n & _nothing_beyond(last_n, beyond_n)


def _nothing_beyond(lowest_n: Tensor, beyond_n: Tensor | None) -> Tensor:
    """Return, for each token, whether all columns with a logit from `lowest_n` on are candidates.
    That is certain if no other column can have such a logit.
    """
    if beyond_n is None:
        return torch.ones_like(lowest_n, dtype=torch.bool)
    return (lowest_n > beyond_n) | (beyond_n == -torch.inf)


class KeptColumns(NamedTuple):
    """Holds this rank's columns that a sampler kept, with one entry for each token and column; each
    field is [E].
    """

    row: Tensor
    """The token that keeps the column."""
    column: Tensor
    """The number of the column on this rank, not in the vocabulary."""
    logit: Tensor

    @staticmethod
    def joined(parts: list[KeptColumns], like_N: Tensor) -> KeptColumns:
        """Join several `KeptColumns` into one, with indices of int32 and logits of the type of
        `like_N`.
        """
        none = like_N.new_empty(0)
        parts = [KeptColumns(none.int(), none.int(), none), *parts]
        row, column, logit = map(torch.cat, zip(*parts, strict=True))
        return KeptColumns(row.int(), column.int(), logit.to(like_N.dtype))

    def gradient(self, slopes: GradCoefficients, batch: TokenBatch) -> Tensor:
        """Return the gradient of these columns' logits, [E]."""
        row_E = self.row.long()
        slopes_E, batch_E = slopes.select(row_E), batch.select(row_E)
        z_E = self.logit if slopes_E.origin is None else self.logit - slopes_E.origin
        z_E = z_E / batch_E.temperature
        factor_E = slopes_E.factor
        if slopes_E.slope is not None:
            factor_E = factor_E + slopes_E.slope * z_E.clamp(min=FINITE)
        is_target_E = self.column == batch_E.local
        return torch.where(is_target_E, slopes_E.of_target, z_E.exp() * factor_E)


def columns_of_ids(
    source: Source, batch: TokenBatch, sampling: Sampling, keep_NK: Tensor
) -> tuple[KeptColumns, VocabStatistics]:
    """Return this rank's columns among the ids of `keep_NK`, and statistics over all of these ids.

    The group's ranks take part in one all-gather of 16 bytes per token and rank.
    """
    columns, local_N = batch.columns, batch.local
    target_N1 = batch.targets[:, None]
    keep_NK = keep_NK.sort(-1).values
    repeated_NK = torch.zeros_like(keep_NK, dtype=torch.bool)
    repeated_NK[:, 1:] = keep_NK[:, 1:] == keep_NK[:, :-1]
    kept_N = (keep_NK == target_N1).any(-1) | (sampling.target == "keep")
    # The target is always the last entry, kept or not, and is removed from the others.
    local_NK = torch.cat([keep_NK - columns.first, local_N[:, None]], 1)
    kept_NK = (keep_NK >= 0) & ~repeated_NK & (keep_NK != target_N1)
    kept_NK = torch.cat([kept_NK, kept_N[:, None]], 1)
    kept_NK &= is_local(local_NK, columns.real)
    column_NK = torch.where(kept_NK, local_NK, 0)
    logits_NK = source.values_at(column_NK) if columns.real else column_NK
    logits_NK = logits_NK.to(accumulated(source.dtype))
    target_is_local_N = is_local(local_N, columns.real)
    logits_NK = torch.where(kept_NK, logits_NK, -torch.inf)
    maximum_N = logits_NK.amax(-1).clamp(min=FINITE)
    z_NK = (logits_NK - maximum_N[:, None]) / per_row(batch.temperature)
    mass_NK = z_NK[:, :-1].exp()  # the sums leave the target out
    partial = Partial(
        origin=maximum_N,
        exponentials=mass_NK.sum(-1),
        moments=(mass_NK * z_NK[:, :-1].clamp(min=FINITE)).sum(-1),
        target=torch.where(target_is_local_N, z_NK[:, -1], 0.0),
    )
    total = combine(partial, batch.owner, batch.temperature, columns.group)
    total = total._replace(logprob=torch.where(kept_N, total.logprob, -torch.inf))
    row_E, slot_E = kept_NK.nonzero().unbind(1)
    columns_E = KeptColumns(row_E, column_NK[row_E, slot_E], logits_NK[row_E, slot_E])
    return KeptColumns.joined([columns_E], maximum_N), total


#: Memory for computing with all ranks' candidates, which takes some six float64 for each.
_CHUNK_BYTES = 16 << 20
_AT_A_TIME = 6
#: The numbers that a rank sends besides candidates: the highest logit, the mass of all columns, and
#: the target's logit.
_BESIDES = 3
#: Tokens whose candidates did not suffice send this many times as many.
_MORE = 8


def columns_above_boundary(
    source: Source, batch: TokenBatch, sampling: Sampling
) -> tuple[KeptColumns, VocabStatistics]:
    """Return this rank's columns that top-k and top-p keep, and statistics over all kept ones.

    The group's ranks take part in one all-gather of 4 · (3 + C) bytes per token and rank. For
    tokens whose boundary may lie below what was sent there are further all-gathers, each with eight
    times as many candidates, in the end all columns.
    """
    columns, dtype = batch.columns, accumulated(source.dtype)
    token_N = torch.arange(len(batch.targets), device=batch.targets.device)
    like_N = torch.zeros(len(token_N), dtype=dtype, device=token_N.device)
    total = VocabStatistics(*(like_N.clone() for _ in VocabStatistics._fields))
    kept_columns: list[KeptColumns] = []

    def settle(token_s: Tensor, parts: Iterator[tuple[slice, Tensor]], width: int) -> Tensor:
        """Gather `width` candidates of these tokens from each rank, and store the statistics and
        kept columns of the tokens for which so many suffice. Return the tokens that need more
        candidates.
        """
        sent_sX, column_sC = _candidates(batch.select(token_s), sampling, parts, width, dtype)
        sent_RsX = all_gathered(sent_sX, columns.group)
        unsent = [columns.real_of(rank) > width for rank in range(columns.ranks)]
        step, short = _fit(columns, width), [token_s[:0]]
        for start in range(0, len(token_s), step):
            rows = slice(start, start + step)
            token_n = token_s[rows]
            batch_n = batch.select(token_n)
            temperature, local_n = batch_n.temperature, batch_n.local
            maximum_Rn, mass_Rn, target_Rn = sent_RsX[:, rows, :_BESIDES].double().unbind(-1)
            z_Rn = (maximum_Rn - maximum_Rn.amax(0).clamp(min=FINITE)) / temperature
            logits_nW = sent_RsX[:, rows, _BESIDES:].transpose(0, 1).flatten(1)
            target_n = target_Rn.gather(0, batch_n.owner[None]).squeeze(0)
            mass_n = torch.where(mass_Rn == 0, 0.0, mass_Rn * z_Rn.exp()).sum(0)
            beyond_n = sent_RsX[unsent][:, rows, -1].amax(0) if any(unsent) else None
            threshold_n, enough_n = sampling.thresholds(logits_nW, mass_n, beyond_n, temperature)
            added_n = target_n < threshold_n
            if sampling.target != "keep":
                added_n.zero_()
            fields = _statistics(logits_nW, target_n, threshold_n, added_n, temperature, dtype)
            for into_N, values_n in zip(total, fields, strict=True):
                into_N[token_n] = values_n
            logits_nC = sent_sX[rows, _BESIDES : _BESIDES + column_sC.shape[1]]
            kept_nC = (logits_nC >= threshold_n[:, None]) & (logits_nC > -torch.inf)
            row_e, slot_e = (kept_nC & enough_n[:, None]).nonzero().unbind(1)
            column_e = column_sC[rows][row_e, slot_e]
            kept_columns.append(KeptColumns(token_n[row_e], column_e, logits_nC[row_e, slot_e]))
            row_e = (is_local(local_n, columns.real) & added_n & enough_n).nonzero().squeeze(1)
            logit_e = target_n[row_e].to(dtype)
            kept_columns.append(KeptColumns(token_n[row_e], local_n[row_e], logit_e))
            short.append(token_n[~enough_n])
        return torch.cat(short)

    width = min(sampling.width(), columns.per_rank)
    token_s = settle(token_N, source.parts(), width)
    while len(token_s):
        width = min(width * _MORE, columns.per_rank)
        short = []
        for token_n in torch.split(token_s, _fit(columns, width)):
            parts = iter([(slice(None), source.rows_of(token_n))])
            short.append(settle(token_n, parts, width))
        token_s = torch.cat(short)
    return KeptColumns.joined(kept_columns, like_N), total


def _candidates(
    batch: TokenBatch,
    sampling: Sampling,
    parts: Iterator[tuple[slice, Tensor]],
    width: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the tensor [s, 3 + width] that this rank sends for s tokens, and candidates' columns.
    A row has the largest logit, the mass, the target's logit, and the candidates' logits.

    The logits come in parts. The mass counts without top-k only, and is 0 with it.
    """
    columns, tokens = batch.columns, len(batch.targets)
    batch = batch._replace(options=batch.options._replace(entropy=False))
    count = min(width, columns.real)
    sent_sX = batch.targets.new_full((tokens, _BESIDES + width), -torch.inf, dtype=dtype)
    sent_sX[:, 1] = 0
    column_sC = batch.targets.new_zeros(tokens, count)
    for part, logits_nV in parts if count else ():
        values_nC, column_sC[part] = logits_nV.topk(count, -1)
        sent_nX, batch_n = sent_sX[part], batch.select(part)
        sent_nX[:, 0] = values_nC[:, 0]
        column_n1, is_local_n1 = place_of(batch_n.local, columns.real)
        target_n1 = torch.where(is_local_n1, logits_nV.gather(1, column_n1), -torch.inf)
        sent_nX[:, 2] = target_n1.squeeze(1)
        sent_nX[:, _BESIDES : _BESIDES + count] = values_nC
        if not sampling.limit:
            partial = local_statistics(logits_nV, None, batch_n)
            of_target_n = torch.where(is_local_n1.squeeze(1), partial.target.exp(), 0.0)
            below_n = partial.origin.double() - sent_nX[:, 0].clamp(min=FINITE)
            below_n = below_n / batch_n.temperature
            sent_nX[:, 1] = (partial.exponentials + of_target_n) * below_n.exp()
    return sent_sX, column_sC


def _fit(columns: Columns, width: int) -> int:
    """Return how many tokens are computed at a time if each rank sends `width` candidates."""
    return rows_of_a_block(columns.ranks * width, _CHUNK_BYTES, _AT_A_TIME, torch.float64)


def _statistics(
    logits_nW: Tensor,
    target_n: Tensor,
    threshold_n: Tensor,
    added_n: Tensor,
    temperature: Tensor | float,
    dtype: torch.dtype,
) -> VocabStatistics:
    """Compute each token's `VocabStatistics` over the columns that the sampler kept for the token.
    The bits are equal on all ranks.

    It computes in float64, from values that are equal on all ranks.
    """
    maximum_n = logits_nW.amax(-1).clamp(min=FINITE).double()
    z_nW = (logits_nW - maximum_n[:, None]) / per_row(temperature)
    kept_nW = (logits_nW >= threshold_n[:, None]) & (logits_nW > -torch.inf)
    mass_nW = torch.where(kept_nW, z_nW.exp(), 0.0)
    target_z_n = (target_n - maximum_n) / temperature
    inside_n = target_n >= threshold_n
    # In float64 the target can be taken out again.
    target_mass_n = torch.where(inside_n, target_z_n.exp(), 0.0)
    others_n = (mass_nW.sum(-1) - target_mass_n).clamp(min=0)
    moment_n = torch.where(kept_nW, mass_nW * z_nW, 0.0).sum(-1)
    moment_n -= torch.where(target_mass_n > 0, target_mass_n * target_z_n, 0.0)
    z_n = torch.where(inside_n | added_n, target_z_n, -torch.inf)
    return with_target(maximum_n, others_n, moment_n, z_n, dtype)
