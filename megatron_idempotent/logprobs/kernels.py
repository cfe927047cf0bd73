"""What is computed of logits, one block of rows at a time: statistics, and their gradient.

The softmax is never kept: the gradient computes it again from the logits, and from three numbers
per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .combine import Partial, Whole
from .fused import FINITE, compiled, gradient, statistics
from .rows import Block, blocks, panels, rows_of_a_block


class Columns(NamedTuple):
    """The vocabulary, and this rank's part of it."""

    first: int
    """The id of this rank's first column."""
    real: int
    """How many of its columns are tokens; those behind them are padding."""
    per_rank: int
    vocabulary: int
    """Tokens on all ranks."""
    group: Any
    ranks: int

    def real_of(self, rank: int) -> int:
        """How many columns of that rank are tokens."""
        return min(self.per_rank, max(0, self.vocabulary - rank * self.per_rank))


class Wanted(NamedTuple):
    """How to compute."""

    entropy: bool
    entropy_gradient: bool
    consume: bool
    compiled: bool
    workspace_bytes: int

    def returned(
        self, ctx: Any, whole: Whole, temperature: Tensor | float
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """`(logprob, entropy, lse)`, of which the gradient is known for what is differentiated."""
        lse_N = whole.maximum / temperature + whole.log_sum
        entropy_N = whole.entropy if self.entropy else None
        constant = [lse_N]
        if entropy_N is not None and not self.entropy_gradient:
            constant.append(entropy_N)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        # Not the same tensor, because what is saved may not be what is returned.
        return whole.logprob.clone(), entropy_N, lse_N


class Slopes(NamedTuple):
    """Of each kept token [N]: its gradient is exp(z)·(factor + slope·z), and `of_target` there."""

    local: Tensor
    maximum: Tensor
    factor: Tensor
    slope: Tensor | None
    of_target: Tensor

    @staticmethod
    def made(
        local_N: Tensor,
        whole: Whole,
        of_logprob_N: Tensor | None,
        of_entropy_N: Tensor | None,
        temperature: Tensor | float,
    ) -> Slopes:
        """Out of p·(-g_logprob - g_entropy·(H + log p)) + [column = target]·g_logprob.

        With H + log p = z - mean nothing cancels; the target's 1 - p is that of its log-prob.
        """
        _, sum_N, mean_N, _, logprob_N, entropy_N = (each.double() for each in whole)
        like_N = whole.maximum
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
        return Slopes(local_N, like_N, factor_N.to(like_N), slope_N, of_target_N.to(like_N))

    def of(self, block: Block) -> Slopes:
        chosen: list[Any] = [None if each is None else each[block.kept] for each in self]
        return Slopes(*chosen)


class _Scratch:
    """Memory for blocks of rows, used again by each."""

    def __init__(self, panels: list[Tensor], columns: int, wanted: Wanted, buffers: int) -> None:
        like = panels[0]
        self._dtype = accumulated(like.dtype)
        fitting = rows_of_a_block(columns, wanted.workspace_bytes, buffers, self._dtype)
        self.rows = min(fitting, max(map(len, panels)) or 1)
        self._shape = self.rows, columns
        self._device = like.device
        self._buffers: dict[int, Tensor] = {}

    def __call__(self, number: int, rows: int) -> Tensor:
        if number not in self._buffers:
            made = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._buffers[number] = made
        return self._buffers[number][:rows]

    def read(self, logits_nV: Tensor) -> Tensor:
        """In the type that is computed in; in the first buffer if it is another."""
        if logits_nV.dtype == self._dtype:
            return logits_nV
        return self(0, len(logits_nV)).copy_(logits_nV)


def behind(
    logits_nV: Tensor, maximum_n: Tensor, temperature: Tensor | float, out_nV: Tensor
) -> Tensor:
    """z = (logits - maximum) / temperature, there."""
    torch.sub(logits_nV, finite(maximum_n)[:, None], out=out_nV)
    if isinstance(temperature, Tensor):
        out_nV.div_(temperature[:, None])
    elif temperature != 1.0:
        out_nV.div_(temperature)
    return out_nV


def temperature_of(temperature: Tensor | float, tokens: slice | Tensor) -> Tensor | float:
    """Of some tokens, where each has one of its own."""
    return temperature[tokens] if isinstance(temperature, Tensor) else temperature


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """What logits of this type are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def partial_of(
    logits: Tensor,
    local_N: Tensor,
    kept_N: Tensor | None,
    temperature: Tensor | float,
    columns: Columns,
    wanted: Wanted,
) -> Partial:
    (rows,) = panels(logits)
    like = torch.zeros(len(local_N), dtype=accumulated(logits.dtype), device=logits.device)
    found = Partial(*(like.clone() for _ in range(4)))
    found.maximum.fill_(-torch.inf)
    if not rows or not columns.real:
        return found
    scratch = _Scratch(rows, columns.real, wanted, 2 if wanted.entropy else 1)
    for block in blocks([len(panel) for panel in rows], kept_N, scratch.rows):
        logits_nV = block.read(rows, columns.real)
        of_block = temperature_of(temperature, block.kept)
        if wanted.compiled:
            of_rows_n = torch.ones_like(like[block.kept]).mul_(of_block)
            found_n = compiled(statistics)(
                logits_nV, local_N[block.kept], of_rows_n, wanted.entropy
            )
            for into_N, values_n in zip(found, found_n, strict=True):
                into_N[block.kept] = values_n
            continue
        logits_nV = scratch.read(logits_nV)
        maximum_n = logits_nV.amax(-1)
        z_nV = behind(logits_nV, maximum_n, of_block, scratch(0, len(logits_nV)))
        place_n1, ours_n1 = place_of(local_N[block.kept], columns.real)
        target_n1 = z_nV.gather(1, place_n1)
        if wanted.entropy:
            exponentials_nV = torch.exp(z_nV, out=scratch(1, len(z_nV)))
        else:
            exponentials_nV = z_nV.exp_()
        of_others_n1 = torch.where(ours_n1, 0.0, exponentials_nV.gather(1, place_n1))
        exponentials_nV.scatter_(1, place_n1, of_others_n1)
        found.maximum[block.kept] = maximum_n
        found.exponentials[block.kept] = exponentials_nV.sum(-1)
        found.target[block.kept] = torch.where(ours_n1, target_n1, 0.0).squeeze(1)
        if wanted.entropy:
            moments_nV = exponentials_nV.mul_(z_nV.clamp_(min=FINITE))
            found.moments[block.kept] = moments_nV.sum(-1)
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
    scratch = _Scratch(rows, columns.real, wanted, 2)
    for block in blocks([len(panel) for panel in rows], kept_N, scratch.rows):
        here = slopes.of(block)
        logits_nV = block.read(rows, columns.real)
        of_block = temperature_of(temperature, block.kept)
        if wanted.compiled:
            of_rows_n = torch.ones_like(here.maximum).mul_(of_block)
            block.write(into, compiled(gradient)(logits_nV, *here, of_rows_n))
            continue
        # Where there is nothing to convert or to spread, it is computed where it belongs.
        out_nV = block.view(into, columns.real)
        if out_nV is None or out_nV.dtype != here.maximum.dtype:
            out_nV = scratch(0, len(logits_nV))
        z_nV = behind(scratch.read(logits_nV), here.maximum, of_block, out_nV)
        if here.slope is None:
            gradient_nV = z_nV.exp_().mul_(here.factor[:, None])
        else:
            exponentials_nV = torch.exp(z_nV, out=scratch(1, len(z_nV)))
            # -inf·0 would be NaN.
            gradient_nV = z_nV.clamp_(min=FINITE).mul_(here.slope[:, None])
            gradient_nV.add_(here.factor[:, None]).mul_(exponentials_nV)
        place_n1, ours_n1 = place_of(here.local, columns.real)
        others_n1 = gradient_nV.gather(1, place_n1)
        of_target_n1 = torch.where(ours_n1, here.of_target[:, None], others_n1)
        gradient_nV.scatter_(1, place_n1, of_target_n1)
        if out_nV.dtype != into[block.panel].dtype or not isinstance(block.rows, slice):
            block.write(into, gradient_nV)


def place_of(local_n: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The target's column here, any where it is another rank's, and whether it is ours; [n, 1]."""
    ours_n = (local_n >= 0) & (local_n < columns)
    return torch.where(ours_n, local_n, 0)[:, None], ours_n[:, None]


def finite(maximum: Tensor) -> Tensor:
    """A maximum that can be subtracted from columns that are all -inf."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)
