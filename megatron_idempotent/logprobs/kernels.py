"""Computes statistics of logits and their gradient, one block of rows at a time.

The softmax is never kept: the gradient computes it again from the logits, and from a few numbers
per token.

Legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .request import (
    Columns,
    ComputeOptions,
    TokenBatch,
    accumulated,
    is_ours,
    is_unit_temperature,
    place_of,
    temperature_of,
)
from .rows import RowBlock, as_matrices, blocks, flat_indices, rows_of_a_block, split_like, submask
from .statistics import FINITE, Partial, Whole, combine, compiled, gradient, statistics

#: Of log Σ exp(logits). Below, exponentials lose bits of probabilities that have all of theirs;
#: beyond, what they are multiplied with does.
_LEAST_LOG, _MOST_LOG = -15.0, 40.0
#: Of all tokens: for less, picking them costs more than it saves.
_FEW = 0.9


class GradCoefficients(NamedTuple):
    """The gradient of each kept token [N]: exp(z)·(factor + slope·z), `of_target` at its target.

    z = (logit - origin) / temperature.
    """

    local: Tensor
    origin: Tensor | None
    """None where it is 0 for all."""
    factor: Tensor
    slope: Tensor | None
    of_target: Tensor

    @staticmethod
    def from_outputs(
        local_N: Tensor,
        whole: Whole,
        of_logprob_N: Tensor | None,
        of_entropy_N: Tensor | None,
        temperature: Tensor | float,
    ) -> GradCoefficients:
        """Out of p·(-g_logprob - g_entropy·(H + log p)) + [column = target]·g_logprob.

        With H + log p = z - mean nothing cancels; the target's 1 - p is that of its log-prob.
        """
        origin_N, sum_N, mean_N, _, logprob_N, entropy_N = (each.double() for each in whole)
        like_N = whole.origin
        if of_logprob_N is None:
            of_logprob_N = torch.zeros_like(like_N)
        of_logprob_N = of_logprob_N / temperature
        factor_N, slope_N = -of_logprob_N / sum_N, None
        of_target_N = -of_logprob_N * logprob_N.expm1()
        if of_entropy_N is not None:
            of_entropy_N = of_entropy_N / temperature
            factor_N = factor_N + of_entropy_N * mean_N / sum_N
            slope_N = (-of_entropy_N / sum_N).to(like_N)
            inner_N = (logprob_N + entropy_N).clamp(min=FINITE)
            of_target_N = of_target_N - of_entropy_N * logprob_N.exp() * inner_N
        elif is_unit_temperature(temperature):
            # exp(logit), or if that or its factor might not be a normal number, exp(logit - lse).
            lse_N = origin_N + sum_N.log()
            near_N = (lse_N > _LEAST_LOG) & (lse_N < _MOST_LOG)
            origin_N = torch.where(near_N, 0.0, lse_N.to(like_N)).double()
            factor_N = -of_logprob_N * (origin_N - lse_N).exp()
        origin = origin_N.to(like_N) if bool(origin_N.any()) else None
        return GradCoefficients(
            local_N, origin, factor_N.to(like_N), slope_N, of_target_N.to(like_N)
        )

    def of(self, tokens: slice | Tensor) -> GradCoefficients:
        chosen: list[Any] = [None if each is None else each[tokens] for each in self]
        return GradCoefficients(*chosen)


def differentiated(of_logprob_N: Tensor | None, of_entropy_N: Tensor | None) -> Tensor:
    """Returns a mask of the tokens whose outputs have a gradient that is not 0.

    Clipped tokens have none, and those of groups whose rewards are all alike.
    """
    parts = [each != 0 for each in (of_logprob_N, of_entropy_N) if each is not None]
    return parts[0] if len(parts) == 1 else parts[0] | parts[1]


def picked(live_N: Tensor) -> Tensor | None:
    """The same, or None if that is nearly all tokens. Read on the host."""
    few = int(live_N.sum()) <= _FEW * len(live_N)
    return live_N if few and len(live_N) else None


#: Between these, sums of exponentials of float32 have lost nothing that counts, and those of
#: thousands of ranks and parts are still numbers.
_LEAST, _MOST = 1e-20, 1e35
#: Of a target's logit, whose exponential is added to them.
_MOST_OF_ONE = 80.0


class _Scratch:
    """Memory for blocks of rows, used again by each: two buffers at most."""

    def __init__(self, as_matrices: list[Tensor], columns: int, wanted: ComputeOptions) -> None:
        like = as_matrices[0]
        self._dtype = accumulated(like.dtype)
        self.moments = wanted.entropy
        # Where one buffer is enough, the logits' own rows take the other's place in the cache.
        fitting = rows_of_a_block(columns, wanted.workspace_bytes, 2, self._dtype)
        self.rows = min(fitting, max(map(len, as_matrices)) or 1)
        self._columns, self._device = columns, like.device
        self._buffers: dict[int, Tensor] = {}
        # Nearly all blocks are of one size, and a view costs as much as a small operation.
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, number: int, rows: int) -> tuple[Tensor, Tensor]:
        """[rows, columns], and the same with one column more, for what is written of targets that
        are another rank's.
        """
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


def local_statistics(
    logits: Tensor,
    local_N: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    columns: Columns,
    wanted: ComputeOptions,
) -> Partial:
    """Returns statistics of the kept tokens, by which `local_N` and `temperature` are indexed."""
    like = torch.zeros(len(local_N), dtype=accumulated(logits.dtype), device=logits.device)
    found = Partial(*(like.clone() for _ in range(4)))
    found.origin.fill_(FINITE)
    if not len(local_N) or not columns.real:
        return found
    if wanted.backend == "triton":
        from . import on_gpu

        return on_gpu.local_statistics(logits, local_N, kept_N, temperature, columns, wanted)
    rows = [panel[:, : columns.real] for panel in as_matrices(logits)[0]]
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
    for panel, chosen, row in flat_indices(sizes, kept_N, everyone_N):
        found.target[chosen] = rows[panel][row, place_N1[chosen, 0]].to(like.dtype)
    if wanted.entropy or not is_unit_temperature(temperature):
        _sums(rows, apart_N1, kept_N, temperature, found, scratch, subtract_max=True)
    else:
        # Wherever exp(logit) is a normal number it has all of its bits, none lost to a subtraction.
        found.origin.zero_()
        _sums(rows, apart_N1, kept_N, temperature, found, scratch, subtract_max=False)
        within_N = (found.exponentials > _LEAST) & (found.exponentials < _MOST)
        beyond_N = ~(within_N & (found.target < _MOST_OF_ONE))
        if bool(beyond_N.any()):
            # These alone, so that what is found of a token is not up to its neighbours.
            of_these, these_N = (
                Partial(*(each[beyond_N] for each in found)),
                submask(kept_N, beyond_N),
            )
            apart_n1 = apart_N1[beyond_N]
            _sums(rows, apart_n1, these_N, temperature, of_these, scratch, subtract_max=True)
            for into_N, values_n in zip(found, of_these, strict=True):
                into_N[beyond_N] = values_n
    z_N = (found.target - found.origin) / temperature
    found.target.copy_(torch.where(ours_N1[:, 0], z_N, 0.0))
    return found


def global_statistics(partial: Partial, asked: TokenBatch) -> Whole:
    """Statistics over the whole vocabulary. A collective of the group's ranks, one all-gather."""
    if asked.wanted.backend == "triton":
        from . import on_gpu

        return on_gpu.global_statistics(partial, asked)
    return combine(partial, asked.owner, asked.temperature, asked.columns.group)


def _sums(
    rows: list[Tensor],
    apart_N1: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    found: Partial,
    scratch: _Scratch,
    *,
    subtract_max: bool,
) -> None:
    """Sums exp(logit - largest) per token, or exp(logit); and the moments, if entropies are
    wanted.
    """
    cut = list(blocks([len(panel) for panel in rows], kept_N, scratch.rows))
    per_token = found.origin[:, None], apart_N1, found.exponentials, found.moments
    of_blocks = (cut, _divisors(temperature, cut), *(split_like(cut, each) for each in per_token))
    for block, divisor, origin_n1, apart_n1, sums_n, moments_n in zip(*of_blocks, strict=True):
        logits_nV = scratch.read(block.read(rows))
        if subtract_max:
            torch.amax(logits_nV, -1, keepdim=True, out=origin_n1).clamp_(min=FINITE)
        subtracted_n1 = origin_n1 if subtract_max else None
        z_nV = scaled_logits(logits_nV, subtracted_n1, divisor, scratch(0, len(logits_nV))[0])
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
    slopes: GradCoefficients,
    temperature: Tensor | float,
    columns: Columns,
    wanted: ComputeOptions,
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
        z_nV = scaled_logits(scratch.read(logits_nV), origin_n1, divisor, out_nV)
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
    for panel, chosen, row in flat_indices(sizes, kept_N, target_E):
        here_e = target_E[chosen]
        values_e = slopes.of_target[here_e].to(into[panel].dtype)
        into[panel][row, slopes.local[here_e]] = values_e


def scaled_logits(
    logits_nV: Tensor, origin_n1: Tensor | None, temperature: Tensor | float, out_nV: Tensor
) -> Tensor:
    """z = (logits - origin) / temperature, there, or the logits themselves where they are z.

    A temperature for each is [n, 1].
    """
    if origin_n1 is not None:
        logits_nV = torch.sub(logits_nV, origin_n1, out=out_nV)
    if not is_unit_temperature(temperature):
        logits_nV = torch.div(logits_nV, temperature, out=out_nV)
    return logits_nV


def _columns(cut: list[RowBlock], per_token: Tensor | None) -> Sequence[Any]:
    """Returns each block's values as a column, [n, 1]."""
    return [None] * len(cut) if per_token is None else split_like(cut, per_token[:, None])


def _divisors(temperature: Tensor | float, cut: list[RowBlock]) -> Sequence[Any]:
    return (
        _columns(cut, temperature) if isinstance(temperature, Tensor) else [temperature] * len(cut)
    )


def _of_rows(temperature: Tensor | float, like_N: Tensor, block: RowBlock) -> Tensor:
    """One for each row, as compiled functions want it."""
    return torch.ones_like(like_N[block.kept]).mul_(temperature_of(temperature, block.kept))
