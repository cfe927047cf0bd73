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
        return whole.logprob, entropy_N, lse_N


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

    def behind(self, logits_nV: Tensor, maximum_n: Tensor, temperature: Tensor | float) -> Tensor:
        """(logits - maximum) / temperature, in the first buffer."""
        out_nV = self(0, len(logits_nV))
        if logits_nV.dtype == self._dtype:
            torch.sub(logits_nV, maximum_n[:, None], out=out_nV)
        else:
            out_nV.copy_(logits_nV).sub_(maximum_n[:, None])
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


class Saved(NamedTuple):
    """Per kept token, each [N]."""

    local: Tensor
    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor
    of_logprob: Tensor
    of_entropy: Tensor | None

    def of(self, block: Block) -> Saved:
        chosen: list[Any] = [None if each is None else each[block.kept] for each in self]
        return Saved(*chosen)


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
            of_rows_n = like[block.kept].fill_(1.0).mul_(of_block)
            found_n = compiled(statistics)(
                logits_nV, local_N[block.kept], of_rows_n, wanted.entropy
            )
            for into_N, values_n in zip(found, found_n, strict=True):
                into_N[block.kept] = values_n
            continue
        maximum_n = logits_nV.amax(-1).to(found.maximum.dtype)
        found.maximum[block.kept] = maximum_n
        z_nV = scratch.behind(logits_nV, _finite(maximum_n), of_block)
        place_n1, ours_n1 = place_of(local_N[block.kept], columns.real)
        target_n1 = z_nV.gather(1, place_n1)
        found.target[block.kept] = torch.where(ours_n1, target_n1, 0.0).squeeze(1)
        if not wanted.entropy:
            found.exponentials[block.kept] = z_nV.exp_().sum(-1)
            continue
        exponentials_nV = torch.exp(z_nV, out=scratch(1, len(z_nV)))
        found.exponentials[block.kept] = exponentials_nV.sum(-1)
        found.moments[block.kept] = exponentials_nV.mul_(z_nV.clamp_(min=FINITE)).sum(-1)
    return found


def write_gradient(
    rows: list[Tensor],
    into: list[Tensor],
    kept_N: Tensor | None,
    saved: Saved,
    temperature: Tensor | float,
    columns: Columns,
    wanted: Wanted,
) -> None:
    """p·(-g_logprob - g_entropy·(H + log p)) + [column = target]·g_logprob, per temperature."""
    if not rows or not columns.real:
        return
    scratch = _Scratch(rows, columns.real, wanted, 2)
    for block in blocks([len(panel) for panel in rows], kept_N, scratch.rows):
        here = saved.of(block)
        of_block = temperature_of(temperature, block.kept)
        logits_nV = block.read(rows, columns.real)
        if wanted.compiled:
            of_rows_n = torch.ones_like(here.maximum).mul_(of_block)
            block.write(into, compiled(gradient)(logits_nV, *here, of_rows_n))
            continue
        of_logprob_n1 = (here.of_logprob / of_block)[:, None]
        logp_nV = scratch.behind(logits_nV, _finite(here.maximum), of_block)
        logp_nV.sub_(here.log_sum[:, None])
        if here.of_entropy is None:
            gradient_nV = logp_nV.exp_().mul_(-of_logprob_n1)
        else:
            of_entropy_n1 = (here.of_entropy / of_block)[:, None]
            gradient_nV = torch.exp(logp_nV, out=scratch(1, len(logp_nV)))
            # H before the factor, because -inf·0 is NaN where no gradient comes.
            logp_nV.clamp_(min=FINITE).add_(here.entropy[:, None])
            gradient_nV.mul_(logp_nV.mul_(-of_entropy_n1).sub_(of_logprob_n1))
        place_n1, ours_n1 = place_of(here.local, columns.real)
        gradient_nV.scatter_add_(1, place_n1, torch.where(ours_n1, of_logprob_n1, 0.0))
        block.write(into, gradient_nV)


def place_of(local_n: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The target's column here, any where it is another rank's, and whether it is ours; [n, 1]."""
    ours_n = (local_n >= 0) & (local_n < columns)
    return torch.where(ours_n, local_n, 0)[:, None], ours_n[:, None]


def _finite(maximum_n: Tensor) -> Tensor:
    return torch.where(maximum_n == -torch.inf, 0.0, maximum_n)
