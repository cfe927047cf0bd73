"""Hidden states that ranks have in pieces, on their way into a layer whose columns they share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .differentiable import once_differentiable


class SequenceParallel(torch.autograd.Function):
    """Hidden states of which each rank has a piece, by the first dimension: all of them.

    Each rank's gradient is the share of its columns; a piece's is the sum of all shares.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        """A collective of the group's ranks, one all-gather."""
        ctx.group = group
        size = dist.get_world_size(group)
        whole = hidden.new_empty(size * hidden.shape[0], *hidden.shape[1:])
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """A collective of the group's ranks, one reduce-scatter."""
        size = dist.get_world_size(ctx.group)
        piece = gradient.new_empty(gradient.shape[0] // size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(piece, gradient.contiguous(), group=ctx.group)
        return piece, None
