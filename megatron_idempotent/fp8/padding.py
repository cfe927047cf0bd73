"""Takes padding on the left out of batches, and puts a model's results back where it was.

Legend: B rows, T positions as given, W positions without padding on the left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_idempotent.logprobs.sources import once_differentiable

from .packing import TokenAlignment


class RightPadded(NamedTuple):
    """Holds rows that begin with their first token: all padding is on the right."""

    tokens: Tensor
    """[B, W, ...]"""
    mask: Tensor
    """[B, W], in the type of the mask as it was given."""
    position_ids: Tensor
    """[B, W], of int64 unless given in another type; 0 in padding."""


def remove_left_padding(
    tokens: Tensor,
    mask: Tensor,
    *,
    position_ids: Tensor | None = None,
    alignment: TokenAlignment | None = None,
    pad_id: int = 0,
) -> RightPadded:
    """Move each row's tokens to its beginning, and cut the batch to its longest row.

    The host reads two numbers, the width and whether there are holes.

    Args:
        tokens: [B, T, ...]
        mask: [B, T], true or above 0 where there is a token: on one run of positions in each row,
            or on none.
        position_ids: [B, T]; None to count the tokens of each row from 0.
        alignment: the multiples that `token_alignment` returns; W is a multiple of its `pack`. None
            for the longest row as it is.
        pad_id: the value of padding.

    Raises:
        ValueError: shapes that do not fit, or a row with a hole in its mask.
    """
    _one_shape("remove_left_padding", tokens, mask)
    if position_ids is not None and position_ids.shape != mask.shape:
        raise ValueError(
            f"remove_left_padding() got position_ids of shape {tuple(position_ids.shape)} with "
            f"mask of shape {tuple(mask.shape)}: one for each position of the mask"
        )
    first_B, length_B, width = _runs("remove_left_padding", mask)
    if alignment is not None:
        width = alignment.of_pack([width])
    place_W = torch.arange(width, device=mask.device)
    real_BW = place_W < length_B[:, None]
    from_BW = first_B[:, None] + place_W
    if position_ids is None:
        moved_BW = torch.where(real_BW, place_W, 0)
    else:
        moved_BW = _taken(position_ids, from_BW, real_BW, 0)
    return RightPadded(_taken(tokens, from_BW, real_BW, pad_id), real_BW.to(mask.dtype), moved_BW)


def recover_left_padding(
    values: Tensor, mask: Tensor, *, fill: float = 0, tp_group: Any = None
) -> Tensor:
    """Put a model's results for `remove_left_padding`'s rows back to where the tokens were.

    It is differentiable; padding has no gradient, whatever its values. The host reads two numbers.

    Args:
        values: [B, W, ...]; with a `tp_group` [B, W / tp, ...], the piece that the rank has under
            sequence parallelism.
        mask: [B, T], as it was given to `remove_left_padding`.
        fill: the value of padding.
        tp_group: the ranks that share the positions. All of them take part in one all-gather in the
            forward; the backward makes no collective. All have to compute the same with the result,
            as `token_logprobs` with hidden_layout="replicated" does: each rank cuts its piece's
            gradient out of the whole one that it has.

    Returns:
        [B, T, ...]

    Raises:
        ValueError: shapes that do not fit, a hole in the mask, or rows longer than `values`.
    """
    if tp_group is not None and dist.get_world_size(tp_group) > 1:
        values = _Gathered.apply(values, tp_group)
    first_B, _, longest = _runs("recover_left_padding", mask)
    if values.dim() < 2 or len(values) != len(mask) or values.shape[1] < longest:
        raise ValueError(
            f"recover_left_padding() got values of shape {tuple(values.shape)} for {len(mask)} "
            f"rows of up to {longest} tokens: [rows, tokens, ...]. Has each rank a piece of them? "
            "Then give tp_group"
        )
    from_BT = torch.arange(mask.shape[1], device=mask.device) - first_B[:, None]
    return _taken(values, from_BT, mask > 0, fill)


class _Gathered(torch.autograd.Function):
    """Gathers pieces along the second dimension, on any device.

    Megatron's `gather_from_sequence_parallel_region(tensor_parallel_output_grad=False)` does the
    same along the first.
    """

    @staticmethod
    def forward(ctx: Any, piece: Tensor, group: Any) -> Tensor:
        """Gather the pieces of the group's ranks; all of them take part."""
        ctx.group, ctx.size = group, piece.shape[1]
        piece = piece.transpose(0, 1).contiguous()
        whole = piece.new_empty(dist.get_world_size(group) * len(piece), *piece.shape[1:])
        dist.all_gather_into_tensor(whole, piece, group=group)
        return whole.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Cut this rank's piece out of the gradient, which all ranks have: no collective."""
        return gradient.narrow(1, dist.get_rank(ctx.group) * ctx.size, ctx.size), None


def _one_shape(what: str, values: Tensor, mask: Tensor) -> None:
    if mask.dim() != 2 or values.shape[:2] != mask.shape:
        raise ValueError(
            f"{what}() got tokens of shape {tuple(values.shape)} with mask of shape "
            f"{tuple(mask.shape)}: [rows, positions, ...] and [rows, positions]"
        )


def _runs(what: str, mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the first token of each row [B], the number of its tokens [B], and the largest."""
    if mask.dim() != 2:
        raise ValueError(f"{what}() got mask of shape {tuple(mask.shape)}: [rows, positions]")
    real_BT = mask > 0
    length_B = real_BT.sum(-1)
    if not mask.numel():
        return length_B, length_B, 0
    first_B = real_BT.int().argmax(-1)
    place_T = torch.arange(mask.shape[1], device=mask.device)
    run_BT = (place_T >= first_B[:, None]) & (place_T < (first_B + length_B)[:, None])
    holed_B = (real_BT != run_BT).any(-1)
    # One read for both; the row is looked for only when it is known that there is one.
    longest, holed = torch.stack([length_B.max(), holed_B.any().to(length_B)]).tolist()
    if holed:
        row = int(holed_B.int().argmax())
        raise ValueError(
            f"{what}() got a mask whose row {row} has {int(length_B[row])} tokens from position "
            f"{int(first_B[row])} on with holes between them, and a row's tokens have to be "
            "consecutive; mask single tokens in the loss instead"
        )
    return first_B, length_B, longest


def _taken(values: Tensor, from_BX: Tensor, real_BX: Tensor, fill: float) -> Tensor:
    """Return each row's values at these positions, [B, X, ...], and `fill` in padding."""
    rows, width = values.shape[:2]
    trailing = values.shape[2:]
    if not from_BX.numel() or not width:
        nothing = values.new_full((*from_BX.shape, *trailing), fill)
        # In the graph all the same, so that a backward gives a gradient of zeros.
        return nothing + values.sum() * 0 if values.requires_grad else nothing
    row_B = torch.arange(rows, device=values.device) * width
    index = (row_B[:, None] + from_BX.clamp(0, width - 1)).flatten()
    found = values.flatten(0, 1).index_select(0, index).view(*from_BX.shape, *trailing)
    real = real_BX.view(*real_BX.shape, *(1 for _ in trailing))
    return torch.where(real, found, torch.full((), fill, dtype=values.dtype, device=values.device))
