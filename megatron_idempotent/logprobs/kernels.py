"""Computes statistics of logits and their gradient, one block of rows at a time.

The softmax is never kept: the gradient computes it again from the logits, and from a few numbers
per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .asked import (
    Asked,
    Columns,
    Wanted,
    accumulated,
    divides_nothing,
    is_ours,
    place_of,
    temperature_of,
)
from .combine import Partial, Whole, combine
from .fused import FINITE, compiled, gradient, statistics
from .rows import Block, along, blocks, panels, places, rows_of_a_block, some
from .slopes import Slopes

#: Between these, sums of exponentials of float32 have lost nothing that counts, and those of
#: thousands of ranks and parts are still numbers.
_LEAST, _MOST = 1e-20, 1e35
#: Of a target's logit, whose exponential is added to them.
_MOST_OF_ONE = 80.0


class _Scratch:
    """Memory for blocks of rows, used again by each: two buffers at most."""

    def __init__(self, panels: list[Tensor], columns: int, wanted: Wanted) -> None:
        like = panels[0]
        self._dtype = accumulated(like.dtype)
        self.moments = wanted.entropy
        # Where one buffer is enough, the logits' own rows take the other's place in the cache.
        fitting = rows_of_a_block(columns, wanted.workspace_bytes, 2, self._dtype)
        self.rows = min(fitting, max(map(len, panels)) or 1)
        self._columns, self._device = columns, like.device
        self._buffers: dict[int, Tensor] = {}
        # Nearly all blocks are of one size, and a view costs as much as a small operation.
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, number: int, rows: int) -> tuple[Tensor, Tensor]:
        """[rows, columns], and the same with one column more, for what is written of targets that
        are another rank's."""
        if (number, rows) not in self._views:
            if number not in self._buffers:
                shape = self.rows, self._columns + 1
                self._buffers[number] = torch.empty(shape, dtype=self._dtype, device=self._device)
            with_room = self._buffers[number][:rows]
            self._views[number, rows] = with_room[:, :-1], with_room
        return self._views[number, rows]

    def read(self, logits_nV: Tensor) -> Tensor:
        """Returns the logits in the type of the computation; in the first buffer if it differs."""
        if logits_nV.dtype == self._dtype:
            return logits_nV
        return self(0, len(logits_nV))[0].copy_(logits_nV)


def partial_of(
    logits: Tensor,
    local_N: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    columns: Columns,
    wanted: Wanted,
) -> Partial:
    """Returns statistics of the kept tokens, by which `local_N` and `temperature` are indexed."""
    like = torch.zeros(len(local_N), dtype=accumulated(logits.dtype), device=logits.device)
    found = Partial(*(like.clone() for _ in range(4)))
    found.origin.fill_(FINITE)
    if not len(local_N) or not columns.real:
        return found
    if wanted.backend == "triton":
        from . import on_gpu

        return on_gpu.partial_of(logits, local_N, kept_N, temperature, columns, wanted)
    rows = [panel[:, : columns.real] for panel in panels(logits)[0]]
    sizes = [len(panel) for panel in rows]
    scratch = _Scratch(rows, columns.real, wanted)
    if wanted.backend == "compiled":
        for block in blocks(sizes, kept_N, scratch.rows):
            of_rows_n = _of_rows(temperature, like, block)
            targets_n = local_N[block.kept]
            made = compiled(statistics)(block.read(rows), targets_n, of_rows_n, wanted.entropy)
            for into_N, values_n in zip(found, made, strict=True):
                into_N[block.kept] = values_n
        return found
    place_N1, ours_N1 = place_of(local_N, columns.real)
    # The target is no part of the sums; another rank's goes where no column is.
    apart_N1 = torch.where(ours_N1, place_N1, columns.real)
    everyone_N = torch.arange(len(local_N), device=local_N.device)
    for panel, chosen, row in places(sizes, kept_N, everyone_N):
        found.target[chosen] = rows[panel][row, place_N1[chosen, 0]].to(like.dtype)
    if wanted.entropy or not divides_nothing(temperature):
        _sums(rows, apart_N1, kept_N, temperature, found, scratch, behind_largest=True)
    else:
        # Wherever exp(logit) is a normal number it has all of its bits, none lost to a subtraction.
        found.origin.zero_()
        _sums(rows, apart_N1, kept_N, temperature, found, scratch, behind_largest=False)
        within_N = (found.exponentials > _LEAST) & (found.exponentials < _MOST)
        beyond_N = ~(within_N & (found.target < _MOST_OF_ONE))
        if bool(beyond_N.any()):
            # These alone, so that what is found of a token is not up to its neighbours.
            of_these, these_N = Partial(*(each[beyond_N] for each in found)), some(kept_N, beyond_N)
            apart_n1 = apart_N1[beyond_N]
            _sums(rows, apart_n1, these_N, temperature, of_these, scratch, behind_largest=True)
            for into_N, values_n in zip(found, of_these, strict=True):
                into_N[beyond_N] = values_n
    z_N = (found.target - found.origin) / temperature
    found.target.copy_(torch.where(ours_N1[:, 0], z_N, 0.0))
    return found


def whole_of(partial: Partial, asked: Asked) -> Whole:
    """Statistics over the whole vocabulary. A collective of the group's ranks, one all-gather."""
    if asked.wanted.backend == "triton":
        from . import on_gpu

        return on_gpu.whole_of(partial, asked)
    return combine(partial, asked.owner, asked.temperature, asked.columns.group)


def _sums(
    rows: list[Tensor],
    apart_N1: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    found: Partial,
    scratch: _Scratch,
    *,
    behind_largest: bool,
) -> None:
    """Sums exp(logit - largest) per token, or exp(logit); and the moments, if entropies are
    wanted."""
    cut = list(blocks([len(panel) for panel in rows], kept_N, scratch.rows))
    per_token = found.origin[:, None], apart_N1, found.exponentials, found.moments
    of_blocks = (cut, _divisors(temperature, cut), *(along(cut, each) for each in per_token))
    for block, divisor, origin_n1, apart_n1, sums_n, moments_n in zip(*of_blocks, strict=True):
        logits_nV = scratch.read(block.read(rows))
        if behind_largest:
            torch.amax(logits_nV, -1, keepdim=True, out=origin_n1).clamp_(min=FINITE)
        subtracted_n1 = origin_n1 if behind_largest else None
        z_nV = behind(logits_nV, subtracted_n1, divisor, scratch(0, len(logits_nV))[0])
        exponentials_nV, with_room_nV = scratch(int(scratch.moments), len(z_nV))
        torch.exp(z_nV, out=exponentials_nV)
        with_room_nV.scatter_(1, apart_n1, 0.0)
        torch.sum(exponentials_nV, -1, out=sums_n)
        if scratch.moments:
            weighted_nV = exponentials_nV.mul_(z_nV.clamp_(min=FINITE))
            torch.sum(weighted_nV, -1, out=moments_n)


def write_gradient(
    rows: list[Tensor],
    into: list[Tensor],
    kept_N: Tensor | None,
    slopes: Slopes,
    temperature: Tensor | float,
    columns: Columns,
    wanted: Wanted,
) -> None:
    """Writes the kept tokens' gradient into tensors of the same shape, or into the logits."""
    if not rows or not columns.real:
        return
    sizes = [len(panel) for panel in rows]
    rows, into = ([panel[:, : columns.real] for panel in each] for each in (rows, into))
    scratch = _Scratch(rows, columns.real, wanted)
    cut = list(blocks(sizes, kept_N, scratch.rows))
    if not cut:
        return
    if wanted.backend == "compiled":
        for block in cut:
            of_rows_n = _of_rows(temperature, slopes.factor, block)
            here = slopes.of(block.kept)
            if here.origin is None:
                here = here._replace(origin=torch.zeros_like(of_rows_n))
            block.write(into, compiled(gradient)(block.read(rows), *here, of_rows_n))
        return
    divisors = _divisors(temperature, cut)
    per_token = slopes.origin, slopes.factor, slopes.slope
    of_blocks = zip(cut, divisors, *(_columns(cut, each) for each in per_token), strict=True)
    for block, divisor, origin_n1, factor_n1, slope_n1 in of_blocks:
        logits_nV = block.read(rows)
        # Where there is nothing to convert or to spread, it is computed where it belongs.
        out_nV = block.view(into)
        in_place = out_nV is not None and out_nV.dtype == slopes.factor.dtype
        if out_nV is None or not in_place:
            out_nV, _ = scratch(0, len(logits_nV))
        z_nV = behind(scratch.read(logits_nV), origin_n1, divisor, out_nV)
        if slope_n1 is None:
            gradient_nV = torch.exp(z_nV, out=out_nV).mul_(factor_n1)
        else:
            exponentials_nV = torch.exp(z_nV, out=scratch(1, len(z_nV))[0])
            # -inf·0 would be NaN.
            gradient_nV = z_nV.clamp_(min=FINITE).mul_(slope_n1)
            gradient_nV.add_(factor_n1).mul_(exponentials_nV)
        if not in_place:
            block.write(into, gradient_nV)
    target_E = is_ours(slopes.local, columns.real).nonzero().squeeze(1)
    for panel, chosen, row in places(sizes, kept_N, target_E):
        here_e = target_E[chosen]
        values_e = slopes.of_target[here_e].to(into[panel].dtype)
        into[panel][row, slopes.local[here_e]] = values_e


def behind(
    logits_nV: Tensor, origin_n1: Tensor | None, temperature: Tensor | float, out_nV: Tensor
) -> Tensor:
    """z = (logits - origin) / temperature, there, or the logits themselves where they are z.

    A temperature for each is [n, 1].
    """
    if origin_n1 is not None:
        logits_nV = torch.sub(logits_nV, origin_n1, out=out_nV)
    if not divides_nothing(temperature):
        logits_nV = torch.div(logits_nV, temperature, out=out_nV)
    return logits_nV


def _columns(cut: list[Block], per_token: Tensor | None) -> Sequence[Any]:
    """Returns each block's values as a column, [n, 1]."""
    return [None] * len(cut) if per_token is None else along(cut, per_token[:, None])


def _divisors(temperature: Tensor | float, cut: list[Block]) -> Sequence[Any]:
    return (
        _columns(cut, temperature) if isinstance(temperature, Tensor) else [temperature] * len(cut)
    )


def _of_rows(temperature: Tensor | float, like_N: Tensor, block: Block) -> Tensor:
    """One for each row, as compiled functions want it."""
    return torch.ones_like(like_N[block.kept]).mul_(temperature_of(temperature, block.kept))
