"""Autograd functions that compute log-probs, and that gather hidden states cut over ranks.

Legend: N tokens, E kept columns of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels import global_statistics
from .sources import Source
from .statistics import GradCoefficients, OutputGradients, TokenBatch, VocabStatistics
from .truncated_vocab import KeptColumns


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd function as torch's `once_differentiable` does, so
    that it can be pickled by value.

    Torch's decorator is applied at each call, because its wrapper cannot be pickled. If no output
    has a gradient, no input has one, and `backward` is not called.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Any) -> Any:
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        return torch.autograd.function.once_differentiable(backward)(ctx, *gradients)

    return wrapped


Sampler = Callable[[Source, TokenBatch], tuple[KeptColumns, VocabStatistics]]
"""Returns the columns that it keeps on this rank, and statistics over those of all ranks."""


class Logprobs(torch.autograd.Function):
    """Computes the outputs `(logprob, entropy, lse)` from logits, or from hidden states and a
    weight. Each output is [N], one entry per token, in the order in which rows lie in memory.

    The N tokens are those that are kept: neither masked nor ignored. With a sampler the outputs are
    over the columns that the sampler kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        batch: TokenBatch,
        source_of: Callable[..., Source],
        sampler: Sampler | None,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute log-prob, entropy and log-sum-exp of each kept token; `batch` has the targets and
        temperatures of these tokens.

        `source_of` makes a source of logits from the inputs, and again in the backward.
        """
        source = source_of(*inputs)
        columns: tuple[Tensor, ...] = ()
        if sampler is None:
            total = global_statistics(source.statistics(batch), batch)
        else:
            columns, total = sampler(source, batch)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*total, *source.saved(sampled=sampler is not None), *columns)
        ctx.batch, ctx.source_of, ctx.behind_inputs = batch, source_of, len(total) + len(inputs)
        lse_N = total.origin / batch.temperature + total.log_sum
        # Copies, because callers may change in place what the backward has saved.
        entropy_N = total.entropy.clone() if batch.options.entropy else None
        constant = [lse_N]
        if entropy_N is not None and not batch.options.entropy_gradient:
            constant.append(entropy_N)
        ctx.mark_non_differentiable(*constant)
        ctx.set_materialize_grads(False)
        return total.logprob.clone(), entropy_N, lse_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprob_N: Tensor | None, d_entropy_N: Tensor | None, _: Any) -> Any:
        """Compute the gradients of the inputs.

        The forward has saved statistics of all ranks, so that no collective is needed, except one
        in which a source may add up the hidden states' gradients over the ranks.
        """
        saved, count = ctx.saved_tensors, len(VocabStatistics._fields)
        total, columns = VocabStatistics(*saved[:count]), saved[ctx.behind_inputs :]
        source, needed = ctx.source_of(*saved[count : ctx.behind_inputs]), ctx.needs_input_grad[3:]
        if columns and d_logprob_N is not None:  # a log-prob of -inf has no gradient
            d_logprob_N = torch.where(total.logprob > -torch.inf, d_logprob_N, 0.0)
        outputs = OutputGradients(ctx.batch, total, d_logprob_N, d_entropy_N)
        if columns:
            kept_columns = KeptColumns(*columns)
            slopes = GradCoefficients.from_outputs(outputs)
            gradient_E = kept_columns.gradient(slopes, ctx.batch)
            entries = kept_columns.row.long(), kept_columns.column.long(), gradient_E
            gradients = source.gradients_at(*entries, needed)
        else:
            gradients = source.gradients(outputs, needed)
        return None, None, None, *gradients


class SequenceParallel(torch.autograd.Function):
    """Autograd function: gathers hidden states that are cut over ranks along the first dimension.

    Each rank's gradient comes from its columns of the logits. The gradient of a piece is the sum
    over all ranks.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        """Return the hidden states of all ranks, joined; the group's ranks take part in one
        all-gather.
        """
        ctx.group = group
        size = dist.get_world_size(group)
        pieces = hidden.new_empty(size * hidden.shape[0], *hidden.shape[1:])
        dist.all_gather_into_tensor(pieces, hidden.contiguous(), group=group)
        return pieces

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of this rank's piece, summed over the group by one reduce-scatter."""
        size = dist.get_world_size(ctx.group)
        piece = gradient.new_empty(gradient.shape[0] // size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(piece, gradient.contiguous(), group=ctx.group)
        return piece, None
