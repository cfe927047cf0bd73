"""Combines the ranks' statistics of their columns: one collective, the same bits on all."""

from __future__ import annotations

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
