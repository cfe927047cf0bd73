"""MTP layers predict tokens of other sequences in a pack with padding between its sequences.

Symptom:
    With multi-token prediction (MTP) and `PackedSeqParams` that have both `cu_seqlens_q` and
    `cu_seqlens_q_padded`, tokens, labels and masks are shifted across the borders of sequences: the
    last token of one sequence learns to predict the first token of the next; other tokens learn
    nothing, or learn to predict themselves. No error.

Cause:
    `_roll_tensor_packed_seq` cuts the pack by `cu_seqlens_q`, which count tokens without padding.
    The positions of tokens are those of `cu_seqlens_q_padded`.

Affects:
    0.16 on, when MTP began to take packs. Repaired on the branch dev. What the patch does: packs
    are shifted by the padded borders, if there are any. Then the token after a sequence's last one
    is padding, which a loss mask leaves out. `TrainStep` uses one kind of borders, and does not
    need the patch.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/6246 (on dev)

Remove when:
    no release without `_get_packed_roll_cu_seqlens` is supported.
    `upstream/mtp-rolled-over-padding` has the repair.
"""

from __future__ import annotations

import copy
from typing import Any

from ._case import Fault, Original, Patch, address, arguments, target


def roll(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap `roll_tensor`, the shift of MTP tokens: use `cu_seqlens_q_padded` of packed sequences.
    Upstream uses `cu_seqlens_q`, the sequences' borders without padding.
    """
    call = arguments(original, args, kwargs)
    packed = call["packed_seq_params"]
    if packed is not None and packed.cu_seqlens_q_padded is not None:
        call["packed_seq_params"] = packed = copy.copy(packed)
        packed.cu_seqlens_q = packed.cu_seqlens_q_padded
    return original(**call)


def reproduce() -> None:
    """Shift a pack of two sequences of five and seven tokens, each padded to eight.
    On stock Megatron tokens move across the borders of the sequences.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from megatron_idempotent.step import own_positions

    parallel_state.initialize_model_parallel(context_parallel_size=2)
    ends, padded = (
        torch.tensor(borders, dtype=torch.int32, device="cuda")
        for borders in ([0, 5, 12], [0, 8, 16])
    )
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=8,
        max_seqlen_kv=8,
    )
    row = torch.tensor([[1, 2, 3, 4, 5, 0, 0, 0, 11, 12, 13, 14, 15, 16, 17, 0]], device="cuda")
    right = torch.cat([sequence.roll(-1, 1) for sequence in torch.split(row, 8, 1)], 1)
    right[:, 7::8] = 0
    rolled, _ = roll_tensor(
        own_positions(row, cu_seqlens=padded),
        cp_group=parallel_state.get_context_parallel_group(),
        packed_seq_params=packed,
    )
    if not torch.equal(rolled, own_positions(right, cu_seqlens=padded)):
        raise Fault(f"tokens of two sequences are shifted to {rolled.tolist()}")


PATCH = Patch(
    "with padding between a pack's sequences MTP layers predict tokens of other sequences",
    target("mtp.roll_tensor", roll),
    since="0.16",
    fixed_by=(
        (address("mtp._get_packed_roll_cu_seqlens"), "packed_seq_params.cu_seqlens_q_padded"),
        (address("mtp._roll_tensor_packed_seq"), "packed_seq_params.cu_seqlens_q_padded"),
    ),
)
