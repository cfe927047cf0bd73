"""Makes the rows of checks: of all shapes, masks and scales, the same on all ranks.

Legend: B rows, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.proof.cpu import tiny

from .batches import shorten
from .layouts import Layout
from .protocol import MICRO_BATCH, Calls

T = tiny.SEQUENCE
"""Positions of a row."""


class LayoutRows:
    """Makes token sequences (rows) for the data-parallel replicas of a layout, from a seed.

    Example: `bench.rows(replica=0, seed=1, number=4)`.
    """

    layout: Layout

    def rows(self, replica: int, seed: int, number: int) -> dict[str, Any]:
        """Return `number` random rows [B, T], drawn from `seed` for this replica; the loss counts
        all their positions. The result does not depend on the rank that calls this.

        In a layout of packs each row has a length of three quarters of T.
        """
        generator = torch.Generator().manual_seed(1000 * seed + replica)
        shape = number, T
        tokens_BT = torch.randint(0, tiny.VOCABULARY, shape, generator=generator)
        dtype = torch.float64 if self.layout.dtype == "fp64" else torch.float32
        rows = {
            "input_ids": tokens_BT.cuda(),
            "token_mask": torch.ones(shape, dtype=dtype).cuda(),
            "sample_mask": torch.ones(number, dtype=dtype).cuda(),
            "scale": torch.ones(number, dtype=dtype).cuda(),
        }
        return shorten(rows, [3 * T // 4] * number) if self.layout.packs else rows

    def alike(self, seed: int, *numbers: int) -> Calls:
        """Return a step as a function from a replica's number to a list with the rows of each call.
        On each replica, call i has `numbers[i]` random rows.
        """
        return lambda replica: [
            self.rows(replica, 10 * seed + call, number) for call, number in enumerate(numbers)
        ]

    def mixed(self, replica: int, seed: int, number: int) -> dict[str, Any]:
        """Return `number` rows of lengths from 1 to T for a replica. In the loss the whole row 1
        does not count, nor does a span of positions in row 2.

        For a mean over sequences lengths are from 2: in a sequence of length 1 nothing counts.
        """
        rows = self.rows(replica, seed, number)
        rows["token_mask"][:] = 1
        least = 2 if self.layout.loss_kind == "sequence" else 1
        offsets = [11 * (row + 3 * replica + seed) % T for row in range(number)]
        lengths = [max(least, 1 + offset) for offset in offsets]
        rows["sample_mask"][1] = 0
        rows["token_mask"][2, T // 4 : T // 2] = 0
        return shorten(rows, lengths)

    def sparse(
        self, replica: int, seed: int, number: int, share: float, *, size: float = 1.0
    ) -> dict[str, Any]:
        """Return rows with random masks, in which the loss counts about the fraction `share` of the
        positions. The token mask keeps at least two positions of each row.

        The loss leaves out some rows. In a layout of packs lengths are from 3 to T. Each row has a
        scale between `size` / 2 and 2 * `size`, like an advantage. In float64 its sign is drawn,
        too: there a sum that cancels is still within the bound.
        """
        rows = self.rows(replica, seed, number)
        generator = torch.Generator().manual_seed(1000 * seed + replica + 500)
        scale_B = size * 2 ** (2 * torch.rand(number, generator=generator) - 1)
        if self.layout.dtype == "fp64":
            scale_B[torch.rand(number, generator=generator) < 0.5] *= -1
        rows["scale"][:] = scale_B.to(rows["scale"])
        keep_BT = torch.rand(number, T, generator=generator) < share
        keep_BT[:, 1:3] = True  # an MTP layer has something to predict, too
        rows["token_mask"][:] = keep_BT.to(rows["token_mask"])
        drop_B = torch.rand(number, generator=generator) < 0.2
        drop_B[::MICRO_BATCH] = False  # something counts in each microbatch
        rows["sample_mask"][drop_B.to(rows["sample_mask"].device)] = 0
        if not self.layout.packs:
            return rows
        lengths = torch.randint(3, T + 1, (number,), generator=generator).tolist()
        return shorten(rows, lengths)

    def ragged(self, replica: int, seed: int, number: int) -> tuple[dict[str, Any], Tensor]:
        """Return rows of random lengths from 2 to T, after which the mask is 0, and these lengths
        [B].
        """
        rows = self.rows(replica, seed, number)
        rows["token_mask"][:] = 1
        generator = torch.Generator().manual_seed(1000 * seed + replica + 700)
        rows = shorten(rows, torch.randint(2, T + 1, (number,), generator=generator).tolist())
        lengths_B = rows["lengths"] if self.layout.packs else rows.pop("lengths")
        return rows, lengths_B
