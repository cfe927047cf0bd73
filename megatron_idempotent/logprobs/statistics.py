"""Statistics of a rank's columns, and their combination over ranks by one collective.

All ranks get the same bits. The computations are one expression each, for `torch.compile` to fuse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Partial(NamedTuple):
    """Statistics of a rank's columns, with z = (logit - origin) / temperature; each [N].

    Sums leave the target out: beside the 1 of a token that is all but certain, the rest would be
    lost, and with it 1 - p, which is its gradient.
    """

    origin: Tensor
    """Their largest logit, or 0; `FINITE` where there is none, which -inf can be told from, and
    which can be subtracted."""
    exponentials: Tensor
    """Σ exp(z)"""
    moments: Tensor
    """Σ exp(z)·z; zeros where no entropy is wanted."""
    target: Tensor
    """Its z; zeros on ranks that do not have its column."""


class Whole(NamedTuple):
    """Statistics of all columns, with z = (logit - origin) / temperature; each [N]."""

    origin: Tensor
    """The largest of the ranks'."""
    exponentials: Tensor
    """Σ exp(z)"""
    mean: Tensor
    """The mean of z."""
    log_sum: Tensor
    """log Σ exp(z)"""
    logprob: Tensor
    entropy: Tensor


def combine(partial: Partial, owner_N: Tensor, temperature: Tensor | float, group: Any) -> Whole:
    """Statistics over the whole vocabulary. A collective of the group's ranks, one all-gather.

    Sums of the ranks' sums are taken in float64 and in the order of ranks, so that all of them find
    the same bits. `owner_N` is the rank in the group that has the target's column.
    """
    parts_RN4 = all_gathered(torch.stack(partial, dim=-1), group)
    own_RN = owner_N == torch.arange(len(parts_RN4), device=owner_N.device)[:, None]
    found = _together(parts_RN4, own_RN, temperature)
    return with_target(*found, partial.origin.dtype)


def all_gathered(sent_NX: Tensor, group: Any) -> Tensor:
    """[R, N, X]. A collective of the group's ranks; none where it is one rank."""
    if group is None or dist.get_world_size(group) == 1:
        return sent_NX[None]
    found_RNX = sent_NX.new_empty(dist.get_world_size(group), *sent_NX.shape)
    dist.all_gather_into_tensor(found_RNX.view(-1, sent_NX.shape[-1]), sent_NX, group=group)
    return found_RNX


def merged(parts: list[Partial], own: list[Tensor], temperature: Tensor | float) -> Partial:
    """Merges statistics of parts of a rank's columns; without a collective.

    `own` has a mask for each part: the tokens whose targets are among its columns; each [N].
    """
    if len(parts) == 1:
        return parts[0]
    parts_PN4 = torch.stack([torch.stack(part, dim=-1) for part in parts])
    found = _together(parts_PN4, torch.stack(own), temperature)
    return Partial(*(each.to(parts_PN4.dtype) for each in found))


def _together(
    parts_PN4: Tensor, own_PN: Tensor, temperature: Tensor | float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Partial`, of all parts, in float64."""
    origin_PN, sums_PN, moments_PN, target_PN = parts_PN4.double().unbind(-1)
    origin_N = origin_PN.amax(0)
    behind_PN = (origin_PN - origin_N) / temperature
    weights_PN = behind_PN.exp()
    return (
        origin_N,
        (weights_PN * sums_PN).sum(0),
        (weights_PN * (moments_PN + behind_PN * sums_PN)).sum(0),
        torch.where(own_PN, target_PN + behind_PN, 0.0).sum(0),
    )


def with_target(
    origin_N: Tensor, others_N: Tensor, moment_N: Tensor, z_N: Tensor, dtype: torch.dtype
) -> Whole:
    """The target, whose z it is, beside the sums over all others; in float64."""
    target_N = z_N.exp()
    sum_N = others_N + target_N
    moment_N = moment_N + torch.where(target_N == 0, 0.0, target_N * z_N)
    log_sum_N = sum_N.log()
    mean_N = moment_N / sum_N
    found = (origin_N, sum_N, mean_N, log_sum_N, z_N - log_sum_N, log_sum_N - mean_N)
    return Whole(*(each.to(dtype) for each in found))


#: In place of -inf where it meets a probability of 0, whose product is 0 then and not NaN.
FINITE = -1e30


def statistics(
    logits_nV: Tensor, local_n: Tensor, temperature_n: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the fields of `Partial`; sums in float64, since fused loops do not add in pairs."""
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
    """Returns what `write_gradient` writes, rounded to the logits' type."""
    z_nV = (logits_nV.to(temperature_n.dtype) - origin_n[:, None]) / temperature_n[:, None]
    factor_nV = factor_n[:, None]
    if slope_n is not None:
        factor_nV = factor_nV + z_nV.clamp(min=FINITE) * slope_n[:, None]
    target_nV = torch.arange(logits_nV.shape[1], device=logits_nV.device) == local_n[:, None]
    gradient_nV = torch.where(target_nV, of_target_n[:, None], z_nV.exp() * factor_nV)
    return gradient_nV.to(logits_nV.dtype)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function for any number of rows and columns."""
    return torch.compile(function, dynamic=True)
