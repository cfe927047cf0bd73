"""Computes the losses that a `Subject` gives to adapters, of rows and of packs.

Legend: B rows, T positions of a row, S tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_idempotent.step import own_positions

from . import packs
from .layouts import LossKind
from .oracle import counted
from .protocol import Packed, Rows


def of_positions(output: Tensor, rows: Rows | Packed) -> tuple[Tensor, Tensor]:
    """Return the sum over positions that count, each times its row's scale, and their number."""
    if packs.is_pack(rows):
        own = packs.own(rows)
        return (output * own["loss_mask"] * own["scale"]).sum(), own["loss_mask"].sum()
    mask_BT = own_positions(counted(rows))
    return (output * mask_BT * rows["scale"][:, None]).sum(), mask_BT.sum()


def of_sequences(output: Tensor, rows: Rows | Packed) -> tuple[Tensor, Tensor]:
    """Return the sum of the sequences' means, each times its scale, and the number of sequences.

    Each mean is over the positions that count. Where ranks share positions, a rank returns its part
    of these means, and counts the sequences of which it has the first position.
    """
    if packs.is_pack(rows):
        share_1S, first_1S = packs.shares(rows)
        own = packs.own({**rows, "share": share_1S, "first": first_1S})
        return (output * own["share"] * own["scale"]).sum(), own["first"].sum()
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
