"""Log-probs and entropies out of logits, and the gradient into their memory or beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .asked import Asked, temperature_of
from .combine import Whole
from .differentiable import once_differentiable
from .kernels import partial_of, whole_of, write_gradient
from .rows import Order, panels, some
from .slopes import Slopes, differentiated, picked


class LogprobsFromLogits(torch.autograd.Function):
    """`(logprob, entropy, lse)` of the kept tokens, each [N] in the order of `Order`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        kept_N: Tensor | None,
        asked: Asked,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Computes statistics; `asked` is indexed by kept token."""
        rows = Order(logits).rows(logits)
        temperature, columns, wanted = asked.temperature, asked.columns, asked.wanted
        partial = partial_of(rows, asked.local, kept_N, temperature, columns, wanted)
        whole = whole_of(partial, asked)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, kept_N, *whole)
        ctx.asked = asked
        return wanted.returned(ctx, whole, temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """No collective: what depends on other ranks' columns has been saved."""
        logits, kept_N, *whole = ctx.saved_tensors
        asked: Asked = ctx.asked
        columns, wanted, temperature = asked.columns, asked.wanted, asked.temperature
        nothing = (None,) * 2
        if of_logprob_N is None and of_entropy_N is None:
            return None, *nothing
        order = Order(logits)
        # An alias that shares the version counter: who has saved the logits too is told of it.
        gradient = logits.detach() if wanted.consume else torch.empty_like(logits)
        rows, into = panels(order.rows(logits.detach()), order.rows(gradient))
        if wanted.backend == "triton":
            from . import on_gpu

            found, token_N = on_gpu.slopes_of(asked, Whole(*whole), of_logprob_N, of_entropy_N)
            on_gpu.write_gradient(rows, into, kept_N, token_N, found, temperature, columns)
            return gradient, *nothing
        slopes = Slopes.made(asked.local, Whole(*whole), of_logprob_N, of_entropy_N, temperature)
        live_N = differentiated(of_logprob_N, of_entropy_N)
        few_N = picked(live_N)
        if few_N is not None:
            slopes, temperature = slopes.of(few_N), temperature_of(temperature, few_N)
            kept_N = some(kept_N, few_N)
        _zero(into, kept_N, columns.real)
        write_gradient(rows, into, kept_N, slopes, temperature, columns, wanted)
        return gradient, *nothing


def _zero(into: list[Tensor], kept_N: Tensor | None, columns: int) -> None:
    """Zeroes the parts without a gradient: padding, and tokens that are not kept."""
    masks = [None] * len(into) if kept_N is None else torch.split(kept_N, [len(p) for p in into])
    for panel, mask in zip(into, masks, strict=True):
        panel[:, columns:] = 0
        if mask is not None:
            panel.index_fill_(0, mask.logical_not().nonzero().squeeze(1), 0)
