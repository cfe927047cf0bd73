"""Under context parallelism MTP layers predict the wrong tokens at the end of a rank's part.

Symptom:
    With multi-token prediction (MTP) and context parallelism, a model learns to predict wrong
    tokens from the last position of each piece of a sequence. With two ranks and 32 positions the
    gradient of a small model is off by 11 % of its norm. No error.

Cause:
    `roll_tensor` shifts tokens, labels and masks by one position. It shifts each rank's part
    separately, though a part is two pieces from different ends of the sequence, and the position
    after a piece is on another rank. So the last token of the first piece is followed by the first
    token of the second piece, and the last token of the second piece by none.

Affects:
    0.12 and 0.13. What the patch does: all context-parallel ranks gather the complete row, shift
    it, and take their parts of the result. This costs one all-gather of integers per shift.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.14.0/megatron/core/transformer/multi_token_prediction.py,
    where `roll_tensor` exchanges the first and last positions of pieces with neighbouring ranks.

Remove when:
    0.13 is no longer supported.
"""

from __future__ import annotations

import inspect
from typing import Any

from ._case import Fault, Original, Patch, a_body_has, address, bench, target


def roll(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap `roll_tensor`, the shift of MTP tokens: shift whole rows, and return this rank's part.
    The second result is the whole row's sum divided by the number of context-parallel ranks. A
    collective over context-parallel ranks.
    """
    from megatron.core import parallel_state

    if parallel_state.get_context_parallel_world_size() == 1:
        return original(*args, **kwargs)
    return _roll_whole(original, *args, **kwargs)


def _roll_whole(
    original: Original, tensor: Any, shifts: int = -1, dims: int = -1
) -> tuple[Any, Any]:
    from megatron.core import parallel_state

    from megatron_idempotent.step import all_positions, own_positions

    rolled, total = original(all_positions(tensor, dim=dims), shifts=shifts, dims=dims)
    ranks = parallel_state.get_context_parallel_world_size()
    return own_positions(rolled, dim=dims), total / ranks


def reproduce() -> None:
    """Shift a row of numbers of which each of two context-parallel ranks has two parts.
    On stock Megatron the last number of a part is not followed by the next.
    """
    import torch
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from megatron_idempotent.step import own_positions

    bench(cp=2, overlap_grad_reduce=False, distributed_optimizer=False)
    row = torch.arange(1, 9, device="cuda")[None]
    rolled, _ = roll_tensor(own_positions(row), shifts=-1, dims=-1, **_context_group())
    right = own_positions(torch.tensor([[2, 3, 4, 5, 6, 7, 8, 0]], device="cuda"))
    if not torch.equal(rolled, right):
        raise Fault("a position is not followed by the next one")


def _context_group() -> dict[str, Any]:
    """Return `roll_tensor`'s keyword arguments: `cp_group`, or none if it takes no group."""
    from megatron.core import parallel_state
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    takes_group = "cp_group" in inspect.signature(roll_tensor).parameters
    return {"cp_group": parallel_state.get_context_parallel_group()} if takes_group else {}


def control() -> object:
    """Shift a row of odd length by one position, without context parallelism, as a control.
    Return the shifted row and its sum.
    """
    import torch
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    bench(overlap_grad_reduce=False, distributed_optimizer=False)
    rolled, total = roll_tensor(torch.arange(1, 8, device="cuda")[None], shifts=-1, dims=-1)
    if rolled.tolist() != [[2, 3, 4, 5, 6, 7, 0]]:
        raise Fault(f"a complete row is rolled to {rolled.tolist()}")
    return [rolled.tolist(), int(total)]


PATCH = Patch(
    "an MTP layer predicts wrong tokens where a context-parallel rank's part ends",
    target("mtp.roll_tensor", roll),
    before="0.14",
    fixed_when=a_body_has("cp_group.size()"),
    fixed_by=((address("mtp._roll_tensors_unpacked"), "cp_group.size()"),),  # on dev
)
