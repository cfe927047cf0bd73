"""Computes statistics of a rank's columns, and combines them over ranks with one collective.

All ranks get the same bits. `statistics` and `gradient` are single expressions, which
`torch.compile` can fuse.

Legend: N tokens, K targets of a token, P parts of the columns, R ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


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
    if owner_N.dim() == 1:
        parts_RN4 = all_gathered(partial.packed(), group)
        own_RN = owner_N == torch.arange(len(parts_RN4), device=owner_N.device)[:, None]
        return with_target(*_together(parts_RN4, own_RN, temperature), dtype)
    parts_RNX = all_gathered(partial.packed(), group)
    own_RNK = owner_N == torch.arange(len(parts_RNX), device=owner_N.device)[:, None, None]
    found = _together(parts_RNX, own_RNK, temperature)
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


def statistics(
    logits_nV: Tensor, local_n: Tensor, temperature_n: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Partial`, with sums in float64: fused loops do not add in pairs."""
    logits_nV = logits_nV.to(temperature_n.dtype)
    maximum_n = logits_nV.amax(-1).clamp(min=FINITE)
    z_nV = (logits_nV - maximum_n[:, None]) / temperature_n[:, None]
    target_nV = torch.arange(logits_nV.shape[1], device=logits_nV.device) == local_n[:, None]
    exponentials_nV = torch.where(target_nV, 0.0, z_nV.exp())
    moments_n = torch.zeros_like(maximum_n)
    if entropy:
        moments_n = (exponentials_nV * z_nV.clamp(min=FINITE)).sum(-1, dtype=torch.float64)
    target_n = torch.where(target_nV, z_nV, 0.0).sum(-1)
    return maximum_n, exponentials_nV.sum(-1, dtype=torch.float64), moments_n, target_n


def gradient(
    logits_nV: Tensor,
    local_n: Tensor,
    origin_n: Tensor,
    factor_n: Tensor,
    slope_n: Tensor | None,
    of_target_n: Tensor,
    temperature_n: Tensor,
) -> Tensor:
    """Return the gradient that `kernels.write_gradient` writes, rounded to the logits' type."""
    z_nV = (logits_nV.to(temperature_n.dtype) - origin_n[:, None]) / temperature_n[:, None]
    factor_nV = factor_n[:, None]
    if slope_n is not None:
        factor_nV = factor_nV + z_nV.clamp(min=FINITE) * slope_n[:, None]
    target_nV = torch.arange(logits_nV.shape[1], device=logits_nV.device) == local_n[:, None]
    gradient_nV = torch.where(target_nV, of_target_n[:, None], z_nV.exp() * factor_nV)
    return gradient_nV.to(logits_nV.dtype)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for any number of rows and columns."""
    return torch.compile(function, dynamic=True)
