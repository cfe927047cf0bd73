"""Computes statistics of logits and their gradient, one block of rows at a time.

The softmax is never kept: the gradient computes it again from the logits, and from a few numbers
per token.

Legend: N tokens, K targets of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .sources import (
    RowBlock,
    as_matrices,
    blocks,
    flat_indices,
    rows_of_a_block,
    split_like,
    submask,
)
from .statistics import (
    FINITE,
    Columns,
    ComputeOptions,
    Partial,
    TokenBatch,
    Whole,
    accumulated,
    combine,
    is_ours,
    is_unit_temperature,
    per_row,
    place_of,
)

#: Between these values of log Σ exp(logits) the gradient uses exp(logit) as it is. Below them
#: exponentials lose bits that the probabilities have; above them the factor of exp(logit) does.
_LEAST_LOG, _MOST_LOG = -15.0, 40.0
#: If more than this share of the tokens has a gradient, picking them costs more than it saves.
_FEW = 0.9


class GradCoefficients(NamedTuple):
    """Holds the numbers of each kept token's gradient, each [N].

    The gradient is exp(z)·(factor + slope·z), with z = (logit - origin) / temperature, and
    `of_target` at the target's column.
    """

    local: Tensor
    """The targets' columns on this rank, [N] or [N, K]."""
    origin: Tensor | None
    """The number that z subtracts from each logit; None if it is 0 for all tokens."""
    factor: Tensor
    slope: Tensor | None
    """The factor of z; None if entropies have no gradient."""
    of_target: Tensor
    """The gradient at the targets' columns, [N] or [N, K]."""

    @staticmethod
    def from_outputs(
        local_N: Tensor,
        whole: Whole,
        of_logprob_N: Tensor | None,
        of_entropy_N: Tensor | None,
        temperature: Tensor | float,
    ) -> GradCoefficients:
        """Return the numbers of p·(-g_logprob - g_entropy·(H + log p)) + [is target]·g_logprob.

        It takes H + log p as z - mean, so that nothing cancels, and the target's 1 - p from its
        log-prob.
        """
        if local_N.dim() == 2:
            given = whole, of_logprob_N, of_entropy_N
            return GradCoefficients._of_targets(local_N, *given, temperature)
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

    @staticmethod
    def _of_targets(
        local_NK: Tensor,
        whole: Whole,
        of_logprob_NX: Tensor | None,
        of_entropy_N: Tensor | None,
        temperature: Tensor | float,
    ) -> GradCoefficients:
        """Return the same for K targets and the rest, all other tokens; each has a gradient.

        The other columns' gradient is written with q = p / rest, which is a number however small
        both are: q·(g_rest·(1 - rest) - rest·Σ g_target), and for the entropy
        -q·rest·g_entropy·(H + log p).
        """
        like_N = whole.origin
        top_N, _, _, log_sum_N, logprob_NX, entropy_N = (each.double() for each in whole)
        logprob_NK, rest_N = logprob_NX[:, :-1], logprob_NX[:, -1]
        if of_logprob_NX is None:
            of_logprob_NX = torch.zeros_like(whole.logprob)
        given_NX = of_logprob_NX.double() / per_row(temperature)
        # What is -inf does not move.
        given_NX = torch.where(logprob_NX > -torch.inf, given_NX, 0.0)
        given_NK, of_rest_N = given_NX[:, :-1], given_NX[:, -1]
        of_targets_N = given_NK.sum(-1)
        # z = (logit - origin) / temperature + shift = log q
        of_others_N = torch.where(rest_N > -torch.inf, log_sum_N + rest_N, 0.0)
        exact_N = top_N + of_others_N * temperature
        origin_N = exact_N.to(like_N)
        shift_N = (origin_N.double() - exact_N) / temperature
        factor_N = -of_rest_N * rest_N.expm1() - rest_N.exp() * of_targets_N
        slope_N = None
        p_NK = logprob_NK.exp()
        others_NK = (of_targets_N + of_rest_N)[:, None] - given_NK
        of_target_NK = -given_NK * logprob_NK.expm1() - p_NK * others_NK
        if of_entropy_N is not None:
            of_entropy_N = of_entropy_N.double() / temperature
            inner_N = (rest_N + entropy_N).clamp(min=FINITE)
            scaled_N = of_entropy_N * rest_N.exp()
            factor_N = factor_N - scaled_N * (inner_N + shift_N)
            slope_N = (-scaled_N * shift_N.exp()).to(like_N)
            inner_NK = (logprob_NK + entropy_N[:, None]).clamp(min=FINITE)
            of_target_NK = of_target_NK - of_entropy_N[:, None] * p_NK * inner_NK
        factor_N = factor_N * shift_N.exp()
        return GradCoefficients(
            local_NK, origin_N, factor_N.to(like_N), slope_N, of_target_NK.to(like_N)
        )

    def of(self, tokens: slice | Tensor) -> GradCoefficients:
        chosen: list[Any] = [None if each is None else each[tokens] for each in self]
        return GradCoefficients(*chosen)


def differentiated(of_logprob_N: Tensor | None, of_entropy_N: Tensor | None) -> Tensor:
    """Return a mask of the tokens whose outputs have a gradient that is not 0.

    Clipped tokens have no such gradient, nor have tokens of groups whose rewards are all alike.
    """
    parts = [each != 0 for each in (of_logprob_N, of_entropy_N) if each is not None]
    parts = [part if part.dim() == 1 else part.any(-1) for part in parts]
    return parts[0] if len(parts) == 1 else parts[0] | parts[1]


def picked(live_N: Tensor) -> Tensor | None:
    """Return the mask itself, or None if it has nearly all tokens; the host counts them."""
    few = int(live_N.sum()) <= _FEW * len(live_N)
    return live_N if few and len(live_N) else None


#: Between these, sums of exponentials of float32 have lost nothing that counts, and those of
#: thousands of ranks and parts are still numbers.
_LEAST, _MOST = 1e-20, 1e35
#: The largest logit of a target whose exponential can be added to such sums.
_MOST_OF_ONE = 80.0


class Scratch:
    """Holds memory for blocks of rows, at most two buffers, which each block uses again."""

    def __init__(
        self,
        sizes: list[int],
        columns: int,
        like: Tensor,
        workspace_bytes: int,
        *,
        moments: bool,
    ) -> None:
        self._dtype = accumulated(like.dtype)
        self.moments = moments
        # Where one buffer is enough, the logits' own rows take the other's place in the cache.
        fitting = rows_of_a_block(columns, workspace_bytes, 2, self._dtype)
        self.rows = min(fitting, max(sizes) or 1)
        self._columns, self._device = columns, like.device
        self._buffers: dict[int, Tensor] = {}
        # Nearly all blocks are of one size, and a view costs as much as a small operation.
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, number: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return buffer `number` as [rows, columns], and as [rows, columns + 1].

        The column more takes what is written for targets that are another rank's.
        """
        if (number, rows) not in self._views:
            if number not in self._buffers:
                shape = self.rows, self._columns + 1
                self._buffers[number] = torch.empty(shape, dtype=self._dtype, device=self._device)
            with_room = self._buffers[number][:rows]
            self._views[number, rows] = with_room[:, :-1], with_room
        return self._views[number, rows]

    def read(self, logits_nV: Tensor) -> Tensor:
        """Return the logits in the type of the computation; a copy in the buffer if it differs."""
        if logits_nV.dtype == self._dtype:
            return logits_nV
        return self(0, len(logits_nV))[0].copy_(logits_nV)

    def without(self, logits_nV: Tensor, apart_nK: Tensor) -> Tensor:
        """Return logits that `read` gave with -inf at some columns, in the first buffer."""
        copy_nV, with_room_nV = self(0, len(logits_nV))
        if copy_nV.data_ptr() != logits_nV.data_ptr():
            copy_nV.copy_(logits_nV)
        with_room_nV.scatter_(1, apart_nK, -torch.inf)
        return copy_nV


def _scratch(rows: list[Tensor], columns: Columns, wanted: ComputeOptions) -> Scratch:
    sizes = [len(panel) for panel in rows]
    memory = columns.real, rows[0], wanted.workspace_bytes
    return Scratch(sizes, *memory, moments=wanted.entropy)


def local_statistics(
    logits: Tensor,
    local_N: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    columns: Columns,
    wanted: ComputeOptions,
) -> Partial:
    """Return statistics of this rank's columns for each kept token.

    `local_N`, and a tensor of temperatures, have an entry for each kept token.
    """
    like = torch.zeros(len(local_N), dtype=accumulated(logits.dtype), device=logits.device)
    target = like.new_zeros(local_N.shape)
    found = Partial(like.clone(), like.clone(), like.clone(), target)
    found.origin.fill_(FINITE)
    if not len(local_N) or not columns.real:
        return found
    if wanted.backend == "triton":
        from . import on_gpu

        return on_gpu.local_statistics(logits, local_N, kept_N, temperature, columns, wanted)
    rows = [panel[:, : columns.real] for panel in as_matrices(logits)[0]]
    sizes = [len(panel) for panel in rows]
    scratch = _scratch(rows, columns, wanted)
    place_NK, ours_NK = place_of(local_N, columns.real)
    # The targets are no part of the sums; another rank's go where no column is.
    apart_NK = torch.where(ours_NK, place_NK, columns.real)
    everyone_N = torch.arange(len(local_N), device=local_N.device)
    target_NK = found.target.view(place_NK.shape)
    for panel, chosen, row in flat_indices(sizes, kept_N, everyone_N):
        target_NK[chosen] = rows[panel][row[:, None], place_NK[chosen]].to(like.dtype)
    if wanted.entropy or not is_unit_temperature(temperature):
        _sums(rows, apart_NK, kept_N, temperature, found, scratch, subtract_max=True)
    else:
        # Wherever exp(logit) is a normal number it has all of its bits, none lost to a subtraction.
        found.origin.zero_()
        _sums(rows, apart_NK, kept_N, temperature, found, scratch, subtract_max=False)
        within_N = (found.exponentials > _LEAST) & (found.exponentials < _MOST)
        beyond_N = ~(within_N & (target_NK < _MOST_OF_ONE).all(-1))
        if bool(beyond_N.any()):
            # These alone, so that what is found of a token is not up to its neighbours.
            of_these, these_N = (
                Partial(*(each[beyond_N] for each in found)),
                submask(kept_N, beyond_N),
            )
            apart_nK = apart_NK[beyond_N]
            _sums(rows, apart_nK, these_N, temperature, of_these, scratch, subtract_max=True)
            for into_N, values_n in zip(found, of_these, strict=True):
                into_N[beyond_N] = values_n
    if local_N.dim() == 2:
        found.target.copy_(torch.where(ours_NK, found.target, 0.0))
    else:
        z_N = (found.target - found.origin) / temperature
        found.target.copy_(torch.where(ours_NK[:, 0], z_N, 0.0))
    return found


def global_statistics(partial: Partial, asked: TokenBatch) -> Whole:
    """Combine the ranks' statistics into those of the whole vocabulary.

    The group's ranks take part in one all-gather.
    """
    if asked.wanted.backend == "triton":
        from . import on_gpu

        return on_gpu.global_statistics(partial, asked)
    return combine(partial, asked.owner, asked.temperature, asked.columns.group)


def _sums(
    rows: list[Tensor],
    apart_NK: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    found: Partial,
    scratch: Scratch,
    *,
    subtract_max: bool,
) -> None:
    """Sum exp(logit - largest), or exp(logit), per token; and moments if entropies are wanted."""
    cut = list(blocks([len(panel) for panel in rows], kept_N, scratch.rows))
    per_token = found.origin[:, None], apart_NK, found.exponentials, found.moments
    many = found.target.dim() == 2
    of_blocks = (cut, divisors(temperature, cut), *(split_like(cut, each) for each in per_token))
    for block, divisor, origin_n1, apart_nK, sums_n, moments_n in zip(*of_blocks, strict=True):
        logits_nV = scratch.read(block.read(rows))
        if subtract_max and many:
            logits_nV = scratch.without(logits_nV, apart_nK)
        if subtract_max:
            torch.amax(logits_nV, -1, keepdim=True, out=origin_n1).clamp_(min=FINITE)
        subtracted_n1 = origin_n1 if subtract_max else None
        z_nV = scaled_logits(logits_nV, subtracted_n1, divisor, scratch(0, len(logits_nV))[0])
        exponentials_nV, with_room_nV = scratch(int(scratch.moments), len(z_nV))
        torch.exp(z_nV, out=exponentials_nV)
        with_room_nV.scatter_(1, apart_nK, 0.0)
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
    """Write the kept tokens' gradient into tensors of the same shape, or into the logits."""
    if not rows or not columns.real:
        return
    sizes = [len(panel) for panel in rows]
    rows, into = ([panel[:, : columns.real] for panel in each] for each in (rows, into))
    scratch = _scratch(rows, columns, wanted)
    cut = list(blocks(sizes, kept_N, scratch.rows))
    if not cut:
        return
    per_token = slopes.origin, slopes.factor, slopes.slope
    of_blocks = zip(
        cut,
        divisors(temperature, cut),
        *(columns_of_blocks(cut, each) for each in per_token),
        strict=True,
    )
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
    # A target's place among the tokens, and of K targets that among them.
    place_E = is_ours(slopes.local, columns.real).nonzero().unbind(1)
    for panel, chosen, row in flat_indices(sizes, kept_N, place_E[0]):
        here_e = tuple(each[chosen] for each in place_E)
        values_e = slopes.of_target[here_e].to(into[panel].dtype)
        into[panel][row, slopes.local[here_e]] = values_e


def scaled_logits(
    logits_nV: Tensor, origin_n1: Tensor | None, temperature: Tensor | float, out_nV: Tensor
) -> Tensor:
    """Return z = (logits - origin) / temperature in `out_nV`; the logits if they are z already.

    A tensor of temperatures is [n, 1].
    """
    if origin_n1 is not None:
        logits_nV = torch.sub(logits_nV, origin_n1, out=out_nV)
    if not is_unit_temperature(temperature):
        logits_nV = torch.div(logits_nV, temperature, out=out_nV)
    return logits_nV


def columns_of_blocks(cut: list[RowBlock], per_token: Tensor | None) -> Sequence[Any]:
    """Return each block's values as a column, [n, 1]; None for each if there are no values."""
    return [None] * len(cut) if per_token is None else split_like(cut, per_token[:, None])


def divisors(temperature: Tensor | float, cut: list[RowBlock]) -> Sequence[Any]:
    """Return each block's temperature, a number or [n, 1]."""
    return (
        columns_of_blocks(cut, temperature)
        if isinstance(temperature, Tensor)
        else [temperature] * len(cut)
    )
