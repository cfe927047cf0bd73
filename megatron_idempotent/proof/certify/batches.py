"""Makes packs of rows for adapters; runs rows and packs through a chunk, and computes losses.

Legend: B rows, T positions of a row, n sequences of a pack, S its tokens with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_idempotent.fp8 import Pack, TokenAlignment
from megatron_idempotent.logprobs import shift_targets
from megatron_idempotent.step import own_positions
from megatron_idempotent.step.pack_layout import padded_borders

from .layouts import LossKind
from .oracle import counted
from .protocol import Packed, Rows

_BORDERS = "packed_seq_params"
#: A pack's fields with a value for each token; context-parallel ranks split these.
_EACH_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask", "scale", "share", "first")


def described(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a pack that `TrainStep` or `pack_batches` made to the dict that `Subject.forward`
    takes.

    Example: `subject.forward(chunk, described(microbatch))`.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    pack: Pack = microbatch["pack"]
    targets_1S = shift_targets(
        microbatch["input_ids"], mask=pack.mask[None], cu_seqlens=pack.cu_seqlens
    )
    mask_1S = microbatch["token_mask"] * pack.expand(microbatch["sample_mask"])[None]
    return {
        "input_ids": microbatch["input_ids"],
        "position_ids": microbatch["position_ids"],
        "labels": targets_1S.clamp(min=0),
        "loss_mask": functional.pad(mask_1S[:, 1:], (0, 1)) * (targets_1S >= 0),
        "scale": pack.expand(microbatch["scale"])[None],
        "sequences": len(pack.lengths),
        _BORDERS: PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=pack.cu_seqlens,
            cu_seqlens_kv=pack.cu_seqlens,
            max_seqlen_q=pack.max_seqlen,
            max_seqlen_kv=pack.max_seqlen,
        ),
    }


def one_pack(rows: Rows, config: Any, tokens: int) -> dict[str, Any]:
    """Pack rows in their order into one pack, a dict for `Subject.forward`. Each row is padded to
    the multiple that `config` needs, and the whole pack to `tokens` tokens.

    Example: `subject.forward(chunk, one_pack(rows, subject.config, subject.max_tokens))`.
    """
    device = rows["input_ids"].device
    lengths = rows["lengths"].tolist()
    pack = Pack.of(lengths, TokenAlignment.of_config(config), tokens=tokens, device=device)

    def joined(name: str) -> Tensor:
        together = zip(rows[name], lengths, strict=True)
        return pack.join([row_T[:length] for row_T, length in together])[None]

    return described(
        {
            **rows,
            "pack": pack,
            "input_ids": joined("input_ids"),
            "token_mask": joined("token_mask"),
            # Padding may be longer than a row, and the model has positions for a row only.
            "position_ids": (pack.position_ids * pack.mask)[None],
        }
    )


def is_pack(rows: Mapping[str, Any]) -> bool:
    """Return True if a microbatch is a pack (it has `packed_seq_params`), and not plain rows."""
    return _BORDERS in rows


def forward(chunk: Any, rows: Rows | Packed) -> Tensor:
    """Run a model chunk on this context-parallel rank's positions of rows, or of a pack; return its
    output. On the last pipeline stage that is the negative log-probability of each label.
    """
    if is_pack(rows):
        inputs, masks = token_fields(rows), {"packed_seq_params": rows[_BORDERS]}
        hidden, loss_mask = None, inputs["loss_mask"]
    else:
        tokens_BT = rows["input_ids"]
        length = tokens_BT.shape[1]
        tensors = {
            "input_ids": tokens_BT,
            "position_ids": torch.arange(length, device="cuda").expand_as(tokens_BT),
            "labels": tokens_BT.roll(-1, 1),
        }
        inputs, masks = {name: own_positions(tensor) for name, tensor in tensors.items()}, {}
        hidden = torch.ones(1, 1, length, length, device="cuda").tril() < 0.5
        hidden, loss_mask = own_positions(hidden, dim=2), own_positions(counted(rows))
    if getattr(chunk.config, "mtp_num_layers", None):
        masks["loss_mask"] = loss_mask
    output: Tensor = chunk(
        inputs["input_ids"], inputs["position_ids"], hidden, labels=inputs["labels"], **masks
    )
    return output


def token_fields(pack: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a pack's per-token tensors, cut to the positions of this context-parallel rank."""
    borders = padded_borders(pack[_BORDERS])
    names = (name for name in _EACH_TOKEN if name in pack)
    return {name: own_positions(pack[name], cu_seqlens=borders) for name in names}


def shares(pack: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return two tensors [1, S] for the S tokens of a pack: the weight of each token's loss in the
    mean of its sequence, and a mask that is 1 at the first token of each sequence.

    Both are 0 throughout a sequence of which no position counts.
    """
    mask_S, borders = pack["loss_mask"][0], padded_borders(pack[_BORDERS]).long()
    place_S = torch.arange(len(mask_S), device=mask_S.device)
    sequence_S = torch.bucketize(place_S, borders[1:], right=True)
    number_n = mask_S.new_zeros(len(borders)).index_add(0, sequence_S, mask_S)
    first_S = torch.zeros_like(mask_S)
    first_S[borders[:-1][number_n[:-1] > 0]] = 1
    return (mask_S / number_n.clamp(min=1)[sequence_S])[None], first_S[None]


def shorten(rows: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """Set the rows' token mask to 0 after these lengths, in place; return the rows with the lengths
    added as the field `lengths`.
    """
    lengths_B = torch.tensor(lengths, dtype=torch.int64, device=rows["input_ids"].device)
    place_T = torch.arange(rows["input_ids"].shape[1], device=lengths_B.device)
    rows["token_mask"] *= place_T < lengths_B[:, None]
    return {**rows, "lengths": lengths_B}


def of_positions(output: Tensor, rows: Rows | Packed) -> tuple[Tensor, Tensor]:
    """Return the token loss as a sum and a count: the sum of the losses at this rank's counted
    positions, each times the scale of its row, and the number of these positions.
    """
    if is_pack(rows):
        fields = token_fields(rows)
        return (output * fields["loss_mask"] * fields["scale"]).sum(), fields["loss_mask"].sum()
    mask_BT = own_positions(counted(rows))
    return (output * mask_BT * rows["scale"][:, None]).sum(), mask_BT.sum()


def of_sequences(output: Tensor, rows: Rows | Packed) -> tuple[Tensor, Tensor]:
    """Return the sequence loss as a sum and a count: the sum of each sequence's mean loss times its
    scale, and the number of sequences with counted positions.

    Each mean is over the positions that count. Where ranks share positions, a rank returns its part
    of these means, and counts the sequences of which it has the first position.
    """
    if is_pack(rows):
        share_1S, first_1S = shares(rows)
        fields = token_fields({**rows, "share": share_1S, "first": first_1S})
        return (output * fields["share"] * fields["scale"]).sum(), fields["first"].sum()
    mask_BT = counted(rows)
    number_B1 = mask_BT.sum(1, keepdim=True)
    first_BT = torch.zeros_like(mask_BT)
    first_BT[:, :1] = number_B1 > 0
    share_BT = own_positions(mask_BT / number_B1.clamp(min=1))
    total = (output * share_BT * rows["scale"][:, None]).sum()
    return total, own_positions(first_BT).sum()


LOSSES: Mapping[LossKind, Callable[[Tensor, Rows | Packed], tuple[Tensor, Tensor]]] = {
    "token": of_positions,
    "sequence": of_sequences,
}
"""The loss of each kind."""
