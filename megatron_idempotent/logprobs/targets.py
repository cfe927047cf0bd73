"""Finds each position's target, in padded and packed batches, and cuts batches for CP ranks.

Nothing here loops over sequences or waits for the device.

Legend: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import integer, misfit, one_of, typed
from .statistics import ID_DTYPES


def shift_targets(
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return the next token of the same sequence at each position [..., T], or `ignore_index`.

    It needs whole sequences: under context parallelism shift first, and then take each rank's
    part, with `context_parallel_part`.

    Args:
        tokens: [..., T] of int64 or int32, padded on either side, or packed sequences one after the
            other. Targets are of the same type.
        mask: [..., T], true or above 0 where there is a token; None where all are.
        cu_seqlens: [n + 1] of integers, the positions where packed sequences begin and where the
            last one ends, padding between them included. Positions after that have no target.
        ignore_index: the target of positions that predict nothing; `token_logprobs` computes
            nothing there.

    Raises:
        ValueError: shapes or types that do not fit.

    Example:
        stats = token_logprobs(logits=logits, targets=shift_targets(tokens, mask=attention_mask))
    """
    integer("shift_targets", "ignore_index", ignore_index)
    if tokens.dtype not in ID_DTYPES or tokens.dim() < 1:
        remedy = "torch.int64 or int32, [..., positions]"
        raise misfit("shift_targets", f"tokens of {typed(tokens)}", remedy)
    if mask is not None and mask.shape != tokens.shape:
        raise misfit(
            "shift_targets", f"mask of shape {tuple(mask.shape)}", f"{tuple(tokens.shape)}"
        )
    targets = torch.full_like(tokens, ignore_index)
    if not tokens.shape[-1]:
        return targets
    following = torch.ones_like(tokens[..., 1:], dtype=torch.bool)
    if mask is not None:
        real = mask > 0
        following = following & real[..., :-1] & real[..., 1:]
    if cu_seqlens is not None:
        _check_lengths("shift_targets", cu_seqlens)
        # The index of each position's sequence; n after the last sequence.
        position_T = torch.arange(tokens.shape[-1], device=tokens.device)
        ends = cu_seqlens[1:].to(position_T)
        number_T = torch.searchsorted(ends, position_T, right=True)
        following = following & (number_T[:-1] == number_T[1:]) & (number_T[1:] < len(ends))
    targets[..., :-1] = torch.where(following, tokens[..., 1:], ignore_index)
    return targets


def context_parallel_part(
    values: Tensor, *, rank: int, size: int, cu_seqlens: Tensor | None = None, dim: int = -1
) -> Tensor:
    """Return the part of `values` at the positions that Megatron's context parallelism gives to
    rank `rank`.

    Each sequence is cut into 2 · size pieces, of which rank r has the r-th from the front and the
    r-th from the back, so that causal attention costs all ranks alike.

    Args:
        values: [..., T, ...], whole sequences along `dim`.
        rank: this rank's number in the context-parallel group.
        size: the number of ranks in that group.
        cu_seqlens: [n + 1] of integers, the positions where packed sequences begin and where the
            last one ends, which is T; each length is a multiple of 2 · size. None for one sequence
            per row.
        dim: the dimension of positions.

    Returns:
        [..., T / size, ...]

    Raises:
        ValueError: the group does not have the rank, positions cannot be divided evenly, or shapes
            or types do not fit.
    """
    caller = "context_parallel_part"
    if not 0 <= rank < size:
        raise misfit(caller, f"rank {rank} of {size}", f"pass a rank from 0 to {size - 1}")
    if size == 1:
        return values
    positions = values.shape[dim]
    if positions % (2 * size):
        argument, remedy = f"{positions} positions for {size} ranks", "pad them to a multiple of"
        raise misfit(caller, argument, f"{remedy} {2 * size}")
    return values.index_select(
        dim, _positions_of(caller, rank, size, positions, cu_seqlens, values.device)
    )


def context_parallel_whole(
    parts: Tensor | Sequence[Tensor],
    *,
    group: Any = None,
    cu_seqlens: Tensor | None = None,
    dim: int = -1,
    losses: Literal["same", "parts"] = "same",
) -> Tensor:
    """Join the parts of context-parallel ranks: the exact inverse of `context_parallel_part`.

    It is differentiable. With a group all of its ranks take part in one all-gather in the forward,
    and with `losses="parts"` in one all-reduce in the backward too.

    Args:
        parts: [size, ..., T / size, ...] or one tensor per rank, of all ranks in order; with a
            group this rank's alone, [..., T / size, ...].
        group: the context-parallel group to gather over; None if `parts` are those of all ranks.
        cu_seqlens: [n + 1] of integers, the same as for `context_parallel_part`.
        dim: the dimension of positions in one rank's part.
        losses: with a group, the loss that ranks compute from the whole. "same": each computes the
            same loss, which counts once, so a rank keeps its own part of the gradient. "parts":
            each computes another part of the loss, so the gradients of all ranks are summed.

    Returns:
        [..., T, ...]

    Raises:
        ValueError: parts of differing shapes, an odd number of positions per rank, or shapes and
            types that do not fit.

    Example:
        parts = [context_parallel_part(tokens, rank=rank, size=2) for rank in range(2)]
        assert torch.equal(context_parallel_whole(parts), tokens)
    """
    caller = "context_parallel_whole"
    one_of(caller, "losses", losses, ("same", "parts"))
    if group is not None:
        if not isinstance(parts, Tensor):
            remedy = "this rank's part alone, a tensor"
            raise misfit(caller, f"a group and a {type(parts).__name__}", remedy)
        parts = _GatheredParts.apply(parts, group, losses == "parts")
    tensors = list(parts.unbind() if isinstance(parts, Tensor) else parts)
    shapes, size = sorted({tuple(part.shape) for part in tensors}), len(tensors)
    if len(shapes) != 1 or not shapes[0]:
        remedy = "those of all ranks, of one shape"
        raise misfit(caller, f"{size} parts of shapes {shapes}", remedy)
    if size == 1:
        return tensors[0]
    joined = torch.cat(tensors, dim)
    positions = joined.shape[dim]
    if positions % (2 * size):
        argument = f"{positions // size} positions from each of {size} ranks"
        remedy = "pass parts that context_parallel_part made, which have an even number"
        raise misfit(caller, argument, remedy)
    rank_R1 = torch.arange(size, device=joined.device)[:, None]
    position_RT = _positions_of(caller, rank_R1, size, positions, cu_seqlens, joined.device)
    return joined.index_select(dim, position_RT.flatten().argsort())


def _positions_of(
    caller: str, rank: Any, size: int, positions: int, cu_seqlens: Tensor | None, device: Any
) -> Tensor:
    """Return the indices [T / size] of the T positions that context-parallel rank `rank` has.
    For a tensor of ranks [R, 1] return a row of indices for each rank.
    """
    share_T = torch.arange(positions // size, device=device)
    start: Any = 0
    half: Any = positions // (2 * size)
    if cu_seqlens is not None:
        _check_lengths(caller, cu_seqlens)
        starts = cu_seqlens.to(share_T)
        # A rank has 1 / size of each sequence, so its parts begin at starts / size.
        number_T = torch.searchsorted(starts[1:] // size, share_T, right=True)
        number_T = number_T.clamp(max=len(starts) - 2)
        start = starts[number_T]
        half = (starts[number_T + 1] - start) // (2 * size)
    offset_T = share_T - start // size
    behind_T = (2 * size - 1 - rank) * half + (offset_T - half)
    position: Tensor = start + torch.where(offset_T < half, rank * half + offset_T, behind_T)
    return position


class _GatheredParts(torch.autograd.Function):
    """Autograd function: gathers the tensors of all ranks as [size, ...]. Its backward returns the
    slice of the gradient for this rank's tensor; if `adds_up`, summed over the gradients of all
    ranks.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, adds_up: bool) -> Tensor:
        ctx.group, ctx.adds_up = group, adds_up
        parts = part.new_empty((dist.get_world_size(group), *part.shape))
        dist.all_gather(list(parts.unbind()), part.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.adds_up:
            # A copy, because autograd may have passed the tensor to other functions. Not a
            # reduce-scatter, which gloo has in newer releases of torch only.
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None, None


def _check_lengths(caller: str, cu_seqlens: Tensor) -> None:
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise misfit(caller, f"cu_seqlens of {typed(cu_seqlens)}", "integers, [sequences + 1]")
