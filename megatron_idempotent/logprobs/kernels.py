"""What is computed of logits, one block of rows at a time: statistics, and their gradient.

The softmax is never kept: the gradient computes it again from the logits, and from a few numbers
per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .asked import Columns, Wanted, accumulated, is_ours, place_of, temperature_of
from .combine import Partial
from .fused import FINITE, compiled, gradient, statistics
from .rows import blocks, panels, places, rows_of_a_block
from .slopes import Slopes


class _Scratch:
    """Memory for blocks of rows, used again by each."""

    def __init__(self, panels: list[Tensor], columns: int, wanted: Wanted, buffers: int) -> None:
        like = panels[0]
        self._dtype = accumulated(like.dtype)
        fitting = rows_of_a_block(columns, wanted.workspace_bytes, buffers, self._dtype)
        self.rows = min(fitting, max(map(len, panels)) or 1)
        # One column more, for what is written of targets that are another rank's.
        self._shape = self.rows, columns + 1
        self._device = like.device
        self._buffers: dict[int, Tensor] = {}

    def __call__(self, number: int, rows: int) -> Tensor:
        """[rows, columns + 1]"""
        if number not in self._buffers:
            made = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._buffers[number] = made
        return self._buffers[number][:rows]

    def read(self, logits_nV: Tensor) -> Tensor:
        """In the type that is computed in; in the first buffer if it is another."""
        if logits_nV.dtype == self._dtype:
            return logits_nV
        return self(0, len(logits_nV))[:, :-1].copy_(logits_nV)


def partial_of(
    logits: Tensor,
    local_N: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    columns: Columns,
    wanted: Wanted,
) -> Partial:
    """Of the kept tokens, which `local_N` and a temperature per token are of."""
    like = torch.zeros(len(local_N), dtype=accumulated(logits.dtype), device=logits.device)
    found = Partial(*(like.clone() for _ in range(4)))
    found.maximum.fill_(FINITE)
    if not len(local_N) or not columns.real:
        return found
    (rows,) = panels(logits)
    sizes = [len(panel) for panel in rows]
    place_N1, ours_N1 = place_of(local_N, columns.real)
    # The target is no part of the sums; another rank's goes where no column is.
    apart_N1 = torch.where(ours_N1, place_N1, columns.real)
    scratch = _Scratch(rows, columns.real, wanted, 2 if wanted.entropy else 1)
    for block in blocks(sizes, kept_N, scratch.rows):
        logits_nV = block.read(rows, columns.real)
        of_block = temperature_of(temperature, block.kept)
        of_found = Partial(*(each[block.kept] for each in found))
        if wanted.compiled:
            of_rows_n = torch.ones_like(of_found.maximum).mul_(of_block)
            made = compiled(statistics)(logits_nV, local_N[block.kept], of_rows_n, wanted.entropy)
            for into_n, values_n in zip(of_found, made, strict=True):
                into_n.copy_(values_n)
            continue
        logits_nV = scratch.read(logits_nV)
        torch.amax(logits_nV, -1, out=of_found.maximum).clamp_(min=FINITE)
        z_nV = scratch(0, len(logits_nV))[:, :-1]
        behind(logits_nV, of_found.maximum, of_block, z_nV)
        with_room_nV = scratch(int(wanted.entropy), len(z_nV))
        exponentials_nV = torch.exp(z_nV, out=with_room_nV[:, :-1])
        with_room_nV.scatter_(1, apart_N1[block.kept], 0.0)
        torch.sum(exponentials_nV, -1, out=of_found.exponentials)
        if wanted.entropy:
            moments_nV = exponentials_nV.mul_(z_nV.clamp_(min=FINITE))
            torch.sum(moments_nV, -1, out=of_found.moments)
    if not wanted.compiled:
        everyone_N = torch.arange(len(local_N), device=local_N.device)
        for panel, chosen, row in places(sizes, kept_N, everyone_N):
            found.target[chosen] = rows[panel][row, place_N1[chosen, 0]].to(like.dtype)
        z_N = (found.target - found.maximum) / temperature
        found.target.copy_(torch.where(ours_N1[:, 0], z_N, 0.0))
    return found


def write_gradient(
    rows: list[Tensor],
    into: list[Tensor],
    kept_N: Tensor | None,
    slopes: Slopes,
    temperature: Tensor | float,
    columns: Columns,
    wanted: Wanted,
) -> None:
    """Of the kept tokens, into tensors of the same shape, or into the logits themselves."""
    if not rows or not columns.real:
        return
    sizes = [len(panel) for panel in rows]
    scratch = _Scratch(rows, columns.real, wanted, 1 if slopes.slope is None else 2)
    for block in blocks(sizes, kept_N, scratch.rows):
        here = slopes.of(block.kept)
        logits_nV = block.read(rows, columns.real)
        of_block = temperature_of(temperature, block.kept)
        if wanted.compiled:
            of_rows_n = torch.ones_like(here.maximum).mul_(of_block)
            block.write(into, compiled(gradient)(logits_nV, *here, of_rows_n))
            continue
        # Where there is nothing to convert or to spread, it is computed where it belongs.
        out_nV = block.view(into, columns.real)
        in_place = out_nV is not None and out_nV.dtype == here.maximum.dtype
        if out_nV is None or not in_place:
            out_nV = scratch(0, len(logits_nV))[:, :-1]
        z_nV = behind(scratch.read(logits_nV), here.maximum, of_block, out_nV)
        if here.slope is None:
            gradient_nV = z_nV.exp_().mul_(here.factor[:, None])
        else:
            exponentials_nV = torch.exp(z_nV, out=scratch(1, len(z_nV))[:, :-1])
            # -inf·0 would be NaN.
            gradient_nV = z_nV.clamp_(min=FINITE).mul_(here.slope[:, None])
            gradient_nV.add_(here.factor[:, None]).mul_(exponentials_nV)
        if not in_place:
            block.write(into, gradient_nV)
    if wanted.compiled:
        return
    target_E = is_ours(slopes.local, columns.real).nonzero().squeeze(1)
    for panel, chosen, row in places(sizes, kept_N, target_E):
        here_e = target_E[chosen]
        values_e = slopes.of_target[here_e].to(into[panel].dtype)
        into[panel][row, slopes.local[here_e]] = values_e


def behind(
    logits_nV: Tensor, maximum_n: Tensor, temperature: Tensor | float, out_nV: Tensor
) -> Tensor:
    """z = (logits - maximum) / temperature, there."""
    torch.sub(logits_nV, maximum_n[:, None], out=out_nV)
    if isinstance(temperature, Tensor):
        out_nV.div_(temperature[:, None])
    elif temperature != 1.0:
        out_nV.div_(temperature)
    return out_nV
