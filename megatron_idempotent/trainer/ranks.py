"""Data-parallel ranks outside of Megatron: shares of a list, and sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

Item = TypeVar("Item")


def share(items: Sequence[Item]) -> tuple[Item, ...]:
    """This rank's items: every world-size-th, starting at its rank."""
    return tuple(items[dist.get_rank() :: dist.get_world_size()])


def sums(values: Sequence[float]) -> list[float]:
    """Each value summed over all ranks, in float64. Collective: all ranks give as many values."""
    total = torch.tensor(values, dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(total)
    result: list[float] = total.tolist()
    return result
