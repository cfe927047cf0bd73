"""Cuts rows and packs to one context-parallel rank's positions, and gathers those of all ranks.

Upstream has a function that cuts a batch of rows (`get_batch_on_this_cp_rank`); a loss needs its
targets and masks cut in the same way, or the log-probs of whole sequences gathered.
"""

from __future__ import annotations

from megatron.core import parallel_state
from torch import Tensor

from megatron_idempotent.logprobs.targets import context_parallel_part, context_parallel_whole


def context_parallel_ranks() -> tuple[int, int]:
    """Returns this rank's place in its context-parallel group, and its size; (0, 1) without one."""
    if not parallel_state.model_parallel_is_initialized():
        return 0, 1
    return (
        int(parallel_state.get_context_parallel_rank()),
        int(parallel_state.get_context_parallel_world_size()),
    )


def own_positions(values: Tensor, *, dim: int = 1, cu_seqlens: Tensor | None = None) -> Tensor:
    """Cut whole rows, or a whole pack, down to the positions that this rank computes.

    Without context parallelism these are all. Shift targets before you cut them: the position after
    a part's last one is on another rank.

    Args:
        values: [B, T, …], the same on all context-parallel ranks.
        dim: the dimension of positions.
        cu_seqlens: [n + 1], the borders of a pack's n sequences, padding included; None for rows.

    Returns:
        [B, T / ranks, …]

    Raises:
        ValueError: the positions are no multiple of 2 * ranks.

    Example:
        stats = token_logprobs(logits=output, targets=own_positions(shift_targets(tokens_BT)))
    """
    rank, size = context_parallel_ranks()
    return context_parallel_part(values, rank=rank, size=size, dim=dim, cu_seqlens=cu_seqlens)


def all_positions(part: Tensor, *, dim: int = 1, cu_seqlens: Tensor | None = None) -> Tensor:
    """Gather what `own_positions` has cut, for a loss over whole sequences. A collective.

    All ranks of a context-parallel group take part. In the backward each rank keeps the gradient of
    its own positions, without a collective: all of these ranks compute the same loss of whole
    sequences, and the model's gradients are summed over them.

    Args:
        part: [B, T / ranks, …], this rank's positions.
        dim: the dimension of positions.
        cu_seqlens: as for `own_positions`.

    Returns:
        [B, T, …], the same on all context-parallel ranks.

    Example:
        logprob_BT = all_positions(stats.logprob)  # and the loss says context_parallel = "whole"
    """
    if context_parallel_ranks()[1] == 1:
        return part
    group = parallel_state.get_context_parallel_group()
    return context_parallel_whole(part, group=group, cu_seqlens=cu_seqlens, dim=dim)
