"""What ranks know of their columns, put together: one collective, and the same bits on all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Partial(NamedTuple):
    """Of a rank's columns z = logits / temperature, relative to their maximum; each [N]."""

    maximum: Tensor
    """Of the logits, before the temperature; -inf where no column is finite."""
    exponentials: Tensor
    """Σ exp(z - max z)."""
    moments: Tensor
    """Σ exp(z - max z)·(z - max z); zeros where no entropy is wanted."""
    target: Tensor
    """z - max z of the target; zeros on ranks that do not have its column."""


class Whole(NamedTuple):
    """Of all columns; each [N]."""

    maximum: Tensor
    """Of the logits, before the temperature."""
    log_sum: Tensor
    """log Σ exp(z - max z)."""
    logprob: Tensor
    entropy: Tensor


def combine(partial: Partial, owner_N: Tensor, temperature: Tensor | float, group: Any) -> Whole:
    """Statistics over the whole vocabulary. A collective of the group's ranks, one all-gather.

    Sums of the ranks' sums are taken in float64 and in the order of ranks, so that all of them find
    the same bits. `owner_N` is the rank in the group that has the target's column.
    """
    parts_N4 = torch.stack(partial, dim=-1)
    if group is None or dist.get_world_size(group) == 1:
        parts_RN4 = parts_N4[None]
    else:
        size = dist.get_world_size(group)
        parts_RN4 = parts_N4.new_empty(size, *parts_N4.shape)
        dist.all_gather_into_tensor(parts_RN4.view(-1, 4), parts_N4, group=group)
    maximum_RN, sums_RN, moments_RN, target_RN = parts_RN4.double().unbind(-1)
    maximum_N = maximum_RN.amax(0)
    behind_RN = (maximum_RN - maximum_N) / temperature
    # A rank whose columns are all -inf adds nothing; 0·(-inf) would be NaN.
    behind_RN = torch.where(sums_RN == 0, 0.0, behind_RN)
    weights_RN = behind_RN.exp()
    sum_N = (weights_RN * sums_RN).sum(0)
    moment_N = (weights_RN * (moments_RN + behind_RN * sums_RN)).sum(0)
    log_sum_N = sum_N.log()
    own = owner_N[None]
    target_N = (target_RN.gather(0, own) + behind_RN.gather(0, own)).squeeze(0)
    found = (maximum_N, log_sum_N, target_N - log_sum_N, log_sum_N - moment_N / sum_N)
    return Whole(*(each.to(partial.maximum.dtype) for each in found))
