"""Holds a call's records, and combines statistics of the ranks' columns with one collective.

All ranks get the same bits.

Legend: N tokens, K targets of a token, P parts of the columns, R ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from .truncated_vocab import Sampling

#: Types of ids that callers may have; they are computed as int64.
ID_DTYPES = (torch.int64, torch.int32)

Backend = Literal["eager", "triton"]


class Columns(NamedTuple):
    """Describes the vocabulary, and this rank's part of it."""

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
        """Return the number of columns of that rank that are tokens."""
        return min(self.per_rank, max(0, self.vocabulary - rank * self.per_rank))


class ComputeOptions(NamedTuple):
    """Holds the options of a computation."""

    entropy: bool
    entropy_gradient: bool
    consume: bool
    backend: Backend
    workspace_bytes: int

    def returned(
        self, ctx: Any, whole: Whole, temperature: Tensor | float
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return `(logprob, entropy, lse)`, and mark those that have no gradient for autograd."""
        lse_N = whole.origin / temperature + whole.log_sum
        # Copies, because callers may change in place what the backward has saved.
        entropy_N = whole.entropy.clone() if self.entropy else None
        constant = [lse_N]
        if entropy_N is not None and not self.entropy_gradient:
            constant.append(entropy_N)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return whole.logprob.clone(), entropy_N, lse_N


class TokenBatch(NamedTuple):
    """Holds the inputs of the tokens that are computed, in the order of their rows."""

    targets: Tensor
    """Ids in the vocabulary, [N]; or [N, K] of K targets, each once, -1 where there are fewer."""
    temperature: Tensor | float
    """The temperature of all tokens, or [N]."""
    columns: Columns
    wanted: ComputeOptions
    sampling: Sampling | None = None
    """The sampler, if it leaves something out."""
    keep: Tensor | None = None
    """`Sampling.keep` of these tokens, [N, K]."""

    @property
    def local(self) -> Tensor:
        """The targets' columns on this rank, in the targets' shape.

        If another rank has the target, the number is below 0 or not below that of the columns.
        """
        return self.targets - self.columns.first

    @property
    def owner(self) -> Tensor:
        """The ranks in the group that have the targets' columns, in the targets' shape."""
        return self.targets // self.columns.per_rank


def temperature_of(temperature: Tensor | float, tokens: slice | Tensor) -> Tensor | float:
    """Return the temperature of some tokens, if each token has its own."""
    return temperature[tokens] if isinstance(temperature, Tensor) else temperature


def is_unit_temperature(temperature: Tensor | float) -> bool:
    """Return whether the temperature is 1, so that logits need no division."""
    return not isinstance(temperature, Tensor) and temperature == 1


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which logits of this type are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_ours(local: Tensor, columns: int) -> Tensor:
    """Return a mask of the columns that are among the first `columns`, those of this rank."""
    return (local >= 0) & (local < columns)


def place_of(local_n: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the targets' columns on this rank, and a mask of targets that this rank has.

    Both are [n, 1], or [n, K] for K targets. The column is 0 if another rank has the target.
    """
    local_nK = local_n if local_n.dim() == 2 else local_n[:, None]
    ours_nK = is_ours(local_nK, columns)
    return torch.where(ours_nK, local_nK, 0), ours_nK


class Partial(NamedTuple):
    """Holds statistics of a rank's columns, with z = (logit - origin) / temperature; each [N].

    Sums leave the targets out. If a target is all but certain, its summand of 1 would swallow the
    rest, and with it 1 - p, which is the target's gradient.
    """

    origin: Tensor
    """The columns' largest logit, or 0 where exponentials need none. It is `FINITE` if there are no
    columns: unlike -inf that can be subtracted. With K targets it is the largest logit beside them,
    so that sums of the others are numbers however far below the targets they are."""
    exponentials: Tensor
    """Σ exp(z)"""
    moments: Tensor
    """Σ exp(z)·z; zeros if no entropy is wanted."""
    target: Tensor
    """The target's z; 0 on ranks without its column. With K targets their logits, [N, K]."""

    def packed(self) -> Tensor:
        """Return what a rank sends, [N, 3 + K]."""
        if self.target.dim() == 1:
            return torch.stack(self, dim=-1)
        return torch.cat([torch.stack(self[:3], dim=-1), self.target], dim=-1)


class Whole(NamedTuple):
    """Holds statistics of all columns, with z = (logit - origin) / temperature; each [N]."""

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


def combine(partial: Partial, owner_N: Tensor, temperature: Tensor | float, group: Any) -> Whole:
    """Combine the ranks' statistics into those of the whole vocabulary.

    The group's ranks take part in one all-gather. Sums of the ranks' sums are taken in float64 and
    in the order of ranks, so that all of them find the same bits. `owner_N` is the rank in the
    group that has the target's column; for K targets it is [N, K], negative where a token has
    fewer.
    """
    dtype = partial.origin.dtype
    parts_RNX = all_gathered(partial.packed(), group)
    rank_R = torch.arange(len(parts_RNX), device=owner_N.device)
    own_RN = owner_N == rank_R.view(-1, *(1 for _ in owner_N.shape))  # [R, N, K] for K targets
    found = _together(parts_RNX, own_RN, temperature)
    if owner_N.dim() == 1:
        return with_target(*found, dtype)
    return with_targets(*found, owner_N >= 0, temperature, dtype)


def all_gathered(sent_NX: Tensor, group: Any) -> Tensor:
    """Gather [N, X] of each of the group's ranks as [R, N, X]; one rank alone sends nothing."""
    if group is None or dist.get_world_size(group) == 1:
        return sent_NX[None]
    found_RNX = sent_NX.new_empty(dist.get_world_size(group), *sent_NX.shape)
    dist.all_gather_into_tensor(found_RNX.view(-1, sent_NX.shape[-1]), sent_NX, group=group)
    return found_RNX


def merged(parts: list[Partial], own: list[Tensor], temperature: Tensor | float) -> Partial:
    """Merge statistics of parts of a rank's columns, without a collective.

    `own` has a mask for each part, [N] or [N, K]: True for targets that are among its columns.
    """
    if len(parts) == 1:
        return parts[0]
    parts_PNX = torch.stack([part.packed() for part in parts])
    found = _together(parts_PNX, torch.stack(own), temperature)
    return Partial(*(each.to(parts_PNX.dtype) for each in found))


def _together(
    parts_PNX: Tensor, own_PN: Tensor, temperature: Tensor | float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Partial` over all parts together, in float64.

    `own_PN` says which part has each target; for K targets it is [P, N, K].
    """
    parts_PNX = parts_PNX.double()
    origin_PN, sums_PN, moments_PN = parts_PNX[..., :3].unbind(-1)
    origin_N = origin_PN.amax(0)
    behind_PN = (origin_PN - origin_N) / temperature
    weights_PN = behind_PN.exp()
    if own_PN.dim() == 2:
        target_N = torch.where(own_PN, parts_PNX[..., 3] + behind_PN, 0.0).sum(0)
    else:
        target_N = torch.where(own_PN, parts_PNX[..., 3:], 0.0).sum(0)
    return (
        origin_N,
        (weights_PN * sums_PN).sum(0),
        (weights_PN * (moments_PN + behind_PN * sums_PN)).sum(0),
        target_N,
    )


def with_target(
    origin_N: Tensor, others_N: Tensor, moment_N: Tensor, z_N: Tensor, dtype: torch.dtype
) -> Whole:
    """Compute the statistics of all columns from the target's z and the others' sums.

    All are given in float64, and rounded to `dtype` at the end.
    """
    target_N = z_N.exp()
    sum_N = others_N + target_N
    moment_N = moment_N + torch.where(target_N == 0, 0.0, target_N * z_N)
    log_sum_N = sum_N.log()
    mean_N = moment_N / sum_N
    found = (origin_N, sum_N, mean_N, log_sum_N, z_N - log_sum_N, log_sum_N - mean_N)
    return Whole(*(each.to(dtype) for each in found))


def with_targets(
    origin_N: Tensor,
    others_N: Tensor,
    moment_N: Tensor,
    logit_NK: Tensor,
    counted_NK: Tensor,
    temperature: Tensor | float,
    dtype: torch.dtype,
) -> Whole:
    """Compute the statistics of all columns from K targets' logits and the others' sums.

    All are given in float64, and rounded to `dtype` at the end. Targets that `counted_NK` leaves
    out have no part in them; no token is a target twice.
    """
    logit_NK = torch.where(counted_NK, logit_NK, -torch.inf)
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
    logprob_NK = torch.where(counted_NK, z_NK - log_sum_N[:, None], 0.0)
    # Not the logarithm of a product: however unlikely all others are, this one is a number.
    rest_N = others_N.log() + below_N - log_sum_N
    logprob_NX = torch.cat([logprob_NK, rest_N[:, None]], -1)
    found = (top_N, sum_N, mean_N, log_sum_N, logprob_NX, log_sum_N - mean_N)
    return Whole(*(each.to(dtype) for each in found))


def per_row(temperature: Tensor | float) -> Tensor | float:
    """Return the temperature in a shape that divides rows: a number, or [n, 1]."""
    return temperature[:, None] if isinstance(temperature, Tensor) else temperature


#: Stands for -inf where it is multiplied by a probability of 0: the product is then 0, not NaN.
FINITE = -1e30
