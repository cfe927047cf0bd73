"""Log-probs and entropies out of logits, and their gradient, one block of rows at a time.

The softmax is never kept: the backward computes it again from the logits, and from three numbers
per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .combine import Partial, combine
from .rows import Block, Order, blocks, panels, rows_of_a_block

# In place of -inf where it meets a probability of 0, whose product is 0 then and not NaN.
_FINITE = -1e30


class Columns(NamedTuple):
    """The vocabulary, and this rank's part of it."""

    first: int
    """The id of this rank's first column."""
    real: int
    """How many of its columns are tokens; those behind them are padding."""
    per_rank: int
    group: Any


class Wanted(NamedTuple):
    """How to compute."""

    entropy: bool
    entropy_gradient: bool
    consume: bool
    workspace_bytes: int


class _Scratch:
    """Memory for blocks of rows, used again by each."""

    def __init__(self, like: Tensor, columns: int, wanted: Wanted, buffers: int) -> None:
        self._dtype = accumulated(like.dtype)
        self.rows = rows_of_a_block(columns, wanted.workspace_bytes, buffers, self._dtype)
        self._buffers = [
            torch.empty(self.rows, columns, dtype=self._dtype, device=like.device)
            for _ in range(buffers)
        ]

    def __call__(self, number: int, rows: int) -> Tensor:
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


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """What logits of this type are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class LogprobsFromLogits(torch.autograd.Function):
    """`(logprob, entropy, lse)` of the kept tokens, each [N] in the order of `Order`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets_N: Tensor,
        kept_N: Tensor | None,
        temperature: Tensor | float,
        columns: Columns,
        wanted: Wanted,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """`targets_N` and a temperature per token are those of the kept tokens."""
        rows = Order(logits).rows(logits)
        local_N = targets_N - columns.first
        partial = _partial(rows, local_N, kept_N, temperature, columns, wanted)
        whole = combine(partial, targets_N // columns.per_rank, temperature, columns.group)
        needed = ctx.needs_input_grad[0]
        ctx.save_for_backward(
            *(
                (logits, local_N, kept_N, whole.maximum, whole.log_sum, whole.entropy)
                if needed
                else ()
            )
        )
        ctx.temperature, ctx.columns, ctx.wanted = temperature, columns, wanted
        ctx.set_materialize_grads(False)
        lse_N = whole.maximum / temperature + whole.log_sum
        entropy_N = whole.entropy if wanted.entropy else None
        constant = [lse_N]
        if entropy_N is not None and not wanted.entropy_gradient:
            constant.append(entropy_N)
        ctx.mark_non_differentiable(*constant)
        return whole.logprob, entropy_N, lse_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """No collective: what depends on other ranks' columns has been saved."""
        logits, local_N, kept_N, maximum_N, log_sum_N, entropy_N = ctx.saved_tensors
        columns, wanted = ctx.columns, ctx.wanted
        nothing = (None,) * 5
        if of_logprob_N is None and of_entropy_N is None:
            return None, *nothing
        order = Order(logits)
        # An alias that shares the version counter: who has saved the logits too is told of it.
        gradient = logits.detach() if wanted.consume else torch.empty_like(logits)
        rows, into = panels(order.rows(logits.detach()), order.rows(gradient))
        _zero(into, kept_N, columns.real)
        if of_logprob_N is None:
            of_logprob_N = torch.zeros_like(maximum_N)
        _write_gradient(
            rows,
            into,
            kept_N,
            _Saved(local_N, maximum_N, log_sum_N, entropy_N, of_logprob_N, of_entropy_N),
            ctx.temperature,
            columns,
            wanted,
        )
        return gradient, *nothing


class _Saved(NamedTuple):
    """Per kept token, each [N]."""

    local: Tensor
    maximum: Tensor
    log_sum: Tensor
    entropy: Tensor
    of_logprob: Tensor
    of_entropy: Tensor | None

    def of(self, block: Block) -> _Saved:
        chosen: list[Any] = [None if each is None else each[block.kept] for each in self]
        return _Saved(*chosen)


def _partial(
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
    if not columns.real:
        return found
    scratch = _Scratch(logits, columns.real, wanted, 2 if wanted.entropy else 1)
    for block in blocks([len(panel) for panel in rows], kept_N, scratch.rows):
        logits_nV = block.read(rows, columns.real)
        maximum_n = logits_nV.amax(-1).to(found.maximum.dtype)
        found.maximum[block.kept] = maximum_n
        of_block = temperature[block.kept] if isinstance(temperature, Tensor) else temperature
        z_nV = scratch.behind(logits_nV, _finite(maximum_n), of_block)
        place_n1, ours_n1 = _place(local_N[block.kept], columns.real)
        target_n1 = z_nV.gather(1, place_n1)
        found.target[block.kept] = torch.where(ours_n1, target_n1, 0.0).squeeze(1)
        if not wanted.entropy:
            found.exponentials[block.kept] = z_nV.exp_().sum(-1)
            continue
        exponentials_nV = torch.exp(z_nV, out=scratch(1, len(z_nV)))
        found.exponentials[block.kept] = exponentials_nV.sum(-1)
        found.moments[block.kept] = exponentials_nV.mul_(z_nV.clamp_(min=_FINITE)).sum(-1)
    return found


def _write_gradient(
    rows: list[Tensor],
    into: list[Tensor],
    kept_N: Tensor | None,
    saved: _Saved,
    temperature: Tensor | float,
    columns: Columns,
    wanted: Wanted,
) -> None:
    """p·(-g_logprob - g_entropy·(H + log p)) + [column = target]·g_logprob, per temperature."""
    if not rows or not columns.real:
        return
    scratch = _Scratch(rows[0], columns.real, wanted, 2)
    for block in blocks([len(panel) for panel in rows], kept_N, scratch.rows):
        here = saved.of(block)
        of_block = temperature[block.kept] if isinstance(temperature, Tensor) else temperature
        of_logprob_n1 = (here.of_logprob / of_block)[:, None]
        logits_nV = block.read(rows, columns.real)
        logp_nV = scratch.behind(logits_nV, _finite(here.maximum), of_block)
        logp_nV.sub_(here.log_sum[:, None])
        if here.of_entropy is None:
            gradient_nV = logp_nV.exp_().mul_(-of_logprob_n1)
        else:
            of_entropy_n1 = (here.of_entropy / of_block)[:, None]
            gradient_nV = torch.exp(logp_nV, out=scratch(1, len(logp_nV)))
            # H before the factor, because -inf·0 is NaN where no gradient comes.
            logp_nV.clamp_(min=_FINITE).add_(here.entropy[:, None])
            gradient_nV.mul_(logp_nV.mul_(-of_entropy_n1).sub_(of_logprob_n1))
        place_n1, ours_n1 = _place(here.local, columns.real)
        gradient_nV.scatter_add_(1, place_n1, torch.where(ours_n1, of_logprob_n1, 0.0))
        block.write(into, gradient_nV)


def _zero(into: list[Tensor], kept_N: Tensor | None, columns: int) -> None:
    """Where no gradient will be written: padding, and tokens that are not kept."""
    masks = [None] * len(into) if kept_N is None else torch.split(kept_N, [len(p) for p in into])
    for panel, mask in zip(into, masks, strict=True):
        panel[:, columns:] = 0
        if mask is not None:
            panel.index_fill_(0, mask.logical_not().nonzero().squeeze(1), 0)


def _place(local_n: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The target's column here, any where it is another rank's, and whether it is ours; [n, 1]."""
    ours_n = (local_n >= 0) & (local_n < columns)
    return torch.where(ours_n, local_n, 0)[:, None], ours_n[:, None]


def _finite(maximum_n: Tensor) -> Tensor:
    return torch.where(maximum_n == -torch.inf, 0.0, maximum_n)
