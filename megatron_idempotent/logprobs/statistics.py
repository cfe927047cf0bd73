"""Defines a call's records, and combines statistics of the ranks' columns with one collective.

All ranks get the same bits.

Legend: N tokens, K targets of a token, X numbers of a token, P parts of the columns, R ranks.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

#: Types of ids that callers may pass; ids are converted to int64.
ID_DTYPES = (torch.int64, torch.int32)
#: Replaces -inf in products with a probability of 0, which are then 0 and not NaN.
FINITE = -1e30

Backend = Literal["eager", "triton"]


class Columns(NamedTuple):
    """Describes the vocabulary's size, and which of its columns this rank has."""

    first: int
    """The id of this rank's first column."""
    real: int
    """The number of this rank's columns that are tokens; columns after them are padding."""
    per_rank: int
    """The number of columns on each rank, padding included."""
    vocabulary: int
    """The number of tokens on all ranks."""
    group: Any
    """The ranks that share the vocabulary; None for one rank alone."""
    ranks: int
    """The number of ranks that share the vocabulary."""

    def real_of(self, rank: int) -> int:
        """Count the vocabulary columns of `rank` that stand for tokens; the others are padding."""
        return min(self.per_rank, max(0, self.vocabulary - rank * self.per_rank))


class ComputeOptions(NamedTuple):
    """Holds a call's options: entropy, its gradient, backend, scratch memory."""

    entropy: bool = False
    entropy_gradient: bool = False
    backend: Backend = "eager"
    workspace_bytes: int = 0


class TokenBatch(NamedTuple):
    """Holds targets, temperature and options of the computed tokens, in the order of rows."""

    targets: Tensor
    """Ids in the vocabulary, [N]; or [N, K] of K targets, each once, -1 where there are fewer."""
    temperature: Tensor | float
    """The temperature of all tokens, or [N]."""
    columns: Columns
    options: ComputeOptions

    @property
    def local(self) -> Tensor:
        """The numbers of the targets' columns, counted from this rank's first column; in the
        targets' shape.

        If another rank has the target, the number is below 0 or not below that of the columns.
        """
        return self.targets - self.columns.first

    @property
    def owner(self) -> Tensor:
        """The number in the group of the rank with each target's column; in the targets' shape."""
        return self.targets // self.columns.per_rank

    def select(self, tokens: slice | Tensor) -> TokenBatch:
        """Return the batch reduced to these tokens: their targets and temperatures."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[tokens]
        return self._replace(targets=self.targets[tokens], temperature=temperature)

    def in_columns(self, part: slice) -> TokenBatch:
        """Return the batch as if this rank had only the part `part` of its vocabulary columns."""
        first, real = self.columns.first + part.start, part.stop - part.start
        return self._replace(columns=self.columns._replace(first=first, real=real))


def per_row(temperature: Tensor | float) -> Tensor | float:
    """Return the temperature in a shape that divides rows: a number, or [n, 1]."""
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature


def is_unit_temperature(temperature: Tensor | float) -> bool:
    """Return whether the temperature is 1, so that logits need no division."""
    return not isinstance(temperature, Tensor) and temperature == 1


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics of logits of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_local(local: Tensor, columns: int) -> Tensor:
    """Return a mask of the column numbers that this rank has, which are 0 to `columns` - 1."""
    return (local >= 0) & (local < columns)


def place_of(local_n: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the targets' columns on this rank, and a mask of targets that this rank has.

    Both are [n, 1], or [n, K] for K targets. The column is 0 if another rank has the target.
    """
    local_nK = local_n if local_n.dim() == 2 else local_n[:, None]
    is_local_nK = is_local(local_nK, columns)
    return torch.where(is_local_nK, local_nK, 0), is_local_nK


class Partial(NamedTuple):
    """Holds each token's statistics over the columns of one rank, with z = (logit - origin) /
    temperature; each [N].

    Sums leave the targets out. If a target's probability is nearly 1, other summands would be lost
    beside it by rounding, and so would 1 - p, which is the target's gradient.
    """

    origin: Tensor
    """The columns' largest logit, or 0 where exponentials need none. It is `FINITE` if there are no
    columns: unlike -inf that can be subtracted. With K targets it is the largest logit beside them,
    so that sums of the others are numbers however far below the targets they are."""
    exponentials: Tensor
    """Σ exp(z)"""
    moments: Tensor
    """Σ exp(z)·z; zeros if no entropy is computed."""
    target: Tensor
    """The target's z; 0 on ranks without its column. With K targets their logits, [N, K]."""

    @staticmethod
    def empty(like_N: Tensor, target: Tensor) -> Partial:
        """Return statistics of no columns, of the type of `like_N`, with these targets."""
        zeros_N = torch.zeros_like(like_N)
        return Partial(torch.full_like(like_N, FINITE), zeros_N, zeros_N.clone(), target)

    def packed(self) -> Tensor:
        """Return the fields as one tensor, [N, 3 + K], which a rank sends to the others."""
        if self.target.dim() == 1:
            return torch.stack(self, dim=-1)
        return torch.cat([torch.stack(self[:3], dim=-1), self.target], dim=-1)


class VocabStatistics(NamedTuple):
    """Holds each token's statistics over all columns of the vocabulary, with z = (logit - origin) /
    temperature; each [N].
    """

    origin: Tensor
    """The largest of the ranks' origins, and with K targets of their logits."""
    exponentials: Tensor
    """Σ exp(z)"""
    mean: Tensor
    """The mean of z."""
    log_sum: Tensor
    """log Σ exp(z)"""
    logprob: Tensor
    """The targets' log-probs, [N]. With K targets [N, K + 1], the last of all other tokens."""
    entropy: Tensor


def combine(
    partial: Partial, owner_N: Tensor, temperature: Tensor | float, group: Any
) -> VocabStatistics:
    """Combine the ranks' statistics into those of the whole vocabulary.

    The group's ranks take part in one all-gather. Sums of the ranks' sums are taken in float64 and
    in the order of ranks, so that all of them find the same bits. `owner_N` is the rank in the
    group that has the target's column; for K targets it is [N, K], negative where a token has
    fewer.
    """
    dtype = partial.origin.dtype
    parts_RNX = all_gathered(partial.packed(), group)
    rank_R = torch.arange(len(parts_RNX), device=owner_N.device)
    has_target_RN = owner_N == rank_R.view(-1, *(1 for _ in owner_N.shape))  # K targets: [R, N, K]
    sums = _summed(parts_RNX, has_target_RN, temperature)
    if owner_N.dim() == 1:
        return with_target(*sums, dtype)
    return _with_targets(*sums, owner_N >= 0, temperature, dtype)


def all_gathered(sent_NX: Tensor, group: Any) -> Tensor:
    """Gather [N, X] from the group's ranks as [R, N, X]; without a collective for one rank."""
    if group is None or dist.get_world_size(group) == 1:
        return sent_NX[None]
    gathered_RNX = sent_NX.new_empty(dist.get_world_size(group), *sent_NX.shape)
    dist.all_gather_into_tensor(gathered_RNX.view(-1, sent_NX.shape[-1]), sent_NX, group=group)
    return gathered_RNX


def merged(parts: list[Partial], has_target: list[Tensor], temperature: Tensor | float) -> Partial:
    """Merge the statistics of several parts of this rank's columns into one `Partial`.
    No collective is needed.

    `has_target` has a mask for each part, [N] or [N, K]: True for targets among its columns.
    """
    if len(parts) == 1:
        return parts[0]
    parts_PNX = torch.stack([part.packed() for part in parts])
    sums = _summed(parts_PNX, torch.stack(has_target), temperature)
    return Partial(*(sum_N.to(parts_PNX.dtype) for sum_N in sums))


def _summed(
    parts_PNX: Tensor, has_target_PN: Tensor, temperature: Tensor | float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine each token's statistics of P parts of the vocabulary into those of all parts.
    The parts are packed `Partial`s. Return the fields of the combined `Partial` in float64.

    `has_target_PN` says which part has each target; for K targets it is [P, N, K].
    """
    parts_PNX = parts_PNX.double()
    origin_PN, sums_PN, moments_PN = parts_PNX[..., :3].unbind(-1)
    origin_N = origin_PN.amax(0)
    below_PN = (origin_PN - origin_N) / temperature
    weights_PN = below_PN.exp()
    target_PN = parts_PNX[..., 3] + below_PN if has_target_PN.dim() == 2 else parts_PNX[..., 3:]
    return (
        origin_N,
        (weights_PN * sums_PN).sum(0),
        (weights_PN * (moments_PN + below_PN * sums_PN)).sum(0),
        torch.where(has_target_PN, target_PN, 0.0).sum(0),
    )


def with_target(
    origin_N: Tensor, others_N: Tensor, moment_N: Tensor, z_N: Tensor, dtype: torch.dtype
) -> VocabStatistics:
    """Compute each token's `VocabStatistics` from the target's z and sums over all other columns.

    All are given in float64, and rounded to `dtype` at the end.
    """
    target_N = z_N.exp()
    sum_N = others_N + target_N
    moment_N = moment_N + torch.where(target_N == 0, 0.0, target_N * z_N)
    log_sum_N = sum_N.log()
    mean_N = moment_N / sum_N
    fields = (origin_N, sum_N, mean_N, log_sum_N, z_N - log_sum_N, log_sum_N - mean_N)
    return VocabStatistics(*(field.to(dtype) for field in fields))


def _with_targets(
    origin_N: Tensor,
    others_N: Tensor,
    moment_N: Tensor,
    logit_NK: Tensor,
    valid_NK: Tensor,
    temperature: Tensor | float,
    dtype: torch.dtype,
) -> VocabStatistics:
    """Compute each token's `VocabStatistics` from K targets' logits and sums over other columns.
    The sums are over all columns but the targets'.

    All are given in float64, and rounded to `dtype` at the end. Targets that `valid_NK` leaves out
    have no part in them; no token is a target twice.
    """
    logit_NK = torch.where(valid_NK, logit_NK, -torch.inf)
    top_N = torch.maximum(origin_N, logit_NK.amax(-1))
    z_NK = (logit_NK - top_N[:, None]) / per_row(temperature)
    mass_NK = z_NK.exp()
    below_N = (origin_N - top_N) / temperature
    weight_N = below_N.exp()
    sum_N = weight_N * others_N + mass_NK.sum(-1)
    moment_N = weight_N * (moment_N + below_N * others_N)
    moment_N = moment_N + torch.where(mass_NK == 0, 0.0, mass_NK * z_NK).sum(-1)
    log_sum_N = sum_N.log()
    mean_N = moment_N / sum_N
    logprob_NK = torch.where(valid_NK, z_NK - log_sum_N[:, None], 0.0)
    # Not the logarithm of a product, which could be 0 if all other tokens are very unlikely.
    rest_N = others_N.log() + below_N - log_sum_N
    logprob_NX = torch.cat([logprob_NK, rest_N[:, None]], -1)
    fields = (top_N, sum_N, mean_N, log_sum_N, logprob_NX, log_sum_N - mean_N)
    return VocabStatistics(*(field.to(dtype) for field in fields))


class OutputGradients(NamedTuple):
    """Holds the values from which the logits' gradient is computed: a forward's statistics, and the
    gradients of its outputs, of which at least one is not None.
    """

    batch: TokenBatch
    total: VocabStatistics
    d_logprob: Tensor | None
    """The gradient of the log-probs, in their shape; None if they have none."""
    d_entropy: Tensor | None
    """The gradient of the entropies, [N]; None if they have none."""


#: Between these values of log Σ exp(logits) the gradient uses exp(logit) as it is. Below them
#: exponentials lose bits that the probabilities have; above them the factor of exp(logit) does.
_LEAST_LOG, _MOST_LOG = -15.0, 40.0


class GradCoefficients(NamedTuple):
    """Holds the coefficients of the logits' gradient of each kept token, each [N].

    The gradient is exp(z)·(factor + slope·z), with z = (logit - origin) / temperature, and
    `of_target` at the target's column.
    """

    origin: Tensor | None
    """The number that z subtracts from each logit; None if it is 0 for all tokens."""
    factor: Tensor
    slope: Tensor | None
    """The factor of z; None if entropies have no gradient."""
    of_target: Tensor
    """The gradient at the targets' columns, [N] or [N, K]."""

    @staticmethod
    def from_outputs(outputs: OutputGradients) -> GradCoefficients:
        """Return the coefficients of the logits' gradient, p·(-g_logprob - g_entropy·(H + log p)) +
        [is target]·g_logprob, from the gradients g of the outputs.

        It takes H + log p as z - mean, so that nothing cancels, and the target's 1 - p from its
        log-prob.
        """
        batch, total, d_logprob_N, d_entropy_N = outputs
        if d_logprob_N is None:
            d_logprob_N = torch.zeros_like(total.logprob)
        if batch.targets.dim() == 2:
            return GradCoefficients._of_targets(batch, total, d_logprob_N, d_entropy_N)
        temperature, like_N = batch.temperature, total.origin
        origin_N, sum_N, mean_N, _, logprob_N, entropy_N = (field.double() for field in total)
        d_logprob_N = d_logprob_N / temperature
        factor_N, slope_N = -d_logprob_N / sum_N, None
        of_target_N = -d_logprob_N * logprob_N.expm1()
        if d_entropy_N is not None:
            d_entropy_N = d_entropy_N / temperature
            factor_N = factor_N + d_entropy_N * mean_N / sum_N
            slope_N = (-d_entropy_N / sum_N).to(like_N)
            inner_N = (logprob_N + entropy_N).clamp(min=FINITE)
            of_target_N = of_target_N - d_entropy_N * logprob_N.exp() * inner_N
        elif is_unit_temperature(temperature):
            # exp(logit), or if that or its factor might not be a normal number, exp(logit - lse).
            lse_N = origin_N + sum_N.log()
            near_N = (lse_N > _LEAST_LOG) & (lse_N < _MOST_LOG)
            origin_N = torch.where(near_N, 0.0, lse_N.to(like_N)).double()
            factor_N = -d_logprob_N * (origin_N - lse_N).exp()
        origin = origin_N.to(like_N) if bool(origin_N.any()) else None
        return GradCoefficients(origin, factor_N.to(like_N), slope_N, of_target_N.to(like_N))

    @staticmethod
    def _of_targets(
        batch: TokenBatch,
        total: VocabStatistics,
        d_logprob_NX: Tensor,
        d_entropy_N: Tensor | None,
    ) -> GradCoefficients:
        """Return the coefficients of the logits' gradient if each token has K targets.
        The log-prob of the rest (all other columns of the vocabulary together) has a gradient, too.

        The other columns' gradient is written with q = p / rest, which is a number however small
        both are: q·(g_rest·(1 - rest) - rest·Σ g_target), and for the entropy
        -q·rest·g_entropy·(H + log p).
        """
        temperature, like_N = batch.temperature, total.origin
        top_N, _, _, log_sum_N, logprob_NX, entropy_N = (field.double() for field in total)
        logprob_NK, rest_N = logprob_NX[:, :-1], logprob_NX[:, -1]
        d_logprob_NX = d_logprob_NX.double() / per_row(temperature)
        # A log-prob of -inf has no gradient.
        d_logprob_NX = torch.where(logprob_NX > -torch.inf, d_logprob_NX, 0.0)
        d_target_NK, d_rest_N = d_logprob_NX[:, :-1], d_logprob_NX[:, -1]
        d_targets_N = d_target_NK.sum(-1)
        # z = (logit - origin) / temperature + shift = log q
        of_others_N = torch.where(rest_N > -torch.inf, log_sum_N + rest_N, 0.0)
        exact_N = top_N + of_others_N * temperature
        origin_N = exact_N.to(like_N)
        shift_N = (origin_N.double() - exact_N) / temperature
        factor_N = -d_rest_N * rest_N.expm1() - rest_N.exp() * d_targets_N
        slope_N = None
        p_NK = logprob_NK.exp()
        d_others_NK = (d_targets_N + d_rest_N)[:, None] - d_target_NK
        of_target_NK = -d_target_NK * logprob_NK.expm1() - p_NK * d_others_NK
        if d_entropy_N is not None:
            d_entropy_N = d_entropy_N.double() / temperature
            inner_N = (rest_N + entropy_N).clamp(min=FINITE)
            scaled_N = d_entropy_N * rest_N.exp()
            factor_N = factor_N - scaled_N * (inner_N + shift_N)
            slope_N = (-scaled_N * shift_N.exp()).to(like_N)
            inner_NK = (logprob_NK + entropy_N[:, None]).clamp(min=FINITE)
            of_target_NK = of_target_NK - d_entropy_N[:, None] * p_NK * inner_NK
        factor_N = factor_N * shift_N.exp()
        return GradCoefficients(origin_N, factor_N.to(like_N), slope_N, of_target_NK.to(like_N))

    def select(self, tokens: slice | Tensor) -> GradCoefficients:
        """Return the coefficients of these tokens only, given as a slice, indices or a mask."""
        fields: list[Any] = [None if field is None else field[tokens] for field in self]
        return GradCoefficients(*fields)
