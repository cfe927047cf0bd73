"""`token_logprobs` computes log-probs of targets, and entropies, from logits or hidden states.

From hidden states its autograd functions compute the logits one part at a time, and again in the
backward: some columns of all tokens, or for Triton's kernels all columns of some tokens. With a
sampler they compute only the few columns that it kept for each token, which alone have a gradient.

Triton's kernels need whole rows, and a product needs many rows of hidden states for each reading of
the weight. So one product makes a block of logits, which the kernels read in place. The backward
overwrites the block with its gradient, and multiplies that twice: for rows of the hidden states'
gradient, each rounded once, and for a summand of the weight's, which the product itself adds up in
float32.

For 262,144 tokens of 2,048 features in bfloat16 and 62,080 columns, memory holds, in GB: hidden
states 1.07 and their gradient 1.07, weight 0.25 and its gradient 0.25, its sum in float32 0.51
(none with a `main_grad` of float32), a block of logits 0.53, the tokens' numbers 0.03: 3.7.

Legend: N tokens, H features, E kept columns of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_idempotent.kernel_choice import uses_triton

from .arguments import Call
from .errors import misfit, one_of
from .kernels import global_statistics, local_statistics, write_gradient
from .sources import (
    Logits,
    Order,
    Product,
    ProductParts,
    Products,
    Source,
    WeightGradient,
    as_matrices,
    flat_indices,
    once_differentiable,
    product_into,
    submask,
    zero_others,
)
from .statistics import (
    Backend,
    ComputeOptions,
    GradCoefficients,
    Partial,
    TokenBatch,
    VocabStatistics,
    is_local,
    merged,
)
from .truncated_vocab import KeptColumns, Sampling, columns_above_boundary, columns_of_ids


class TokenStats(NamedTuple):
    """Holds log-prob, entropy and log-sum-exp of each token, in the shape of the rows: float32, or
    float64 for float64 logits.

    They are zero for tokens that are masked or ignored.
    """

    logprob: Tensor
    """Natural logarithm of softmax(logits / temperature) at the target; in the targets' shape."""
    entropy: Tensor | None
    """The entropy of that softmax, in nats; None if it was not computed."""
    lse: Tensor
    """log Σ exp(logits / temperature); not differentiable."""
    rest: Tensor | None = None
    """The log-prob of all tokens other than the K targets together; -inf if there is no other. It
    is exact even if the targets have nearly all of the probability. None for one target per
    token."""


def token_logprobs(
    *,
    logits: Tensor | None = None,
    hidden: Tensor | None = None,
    weight: Tensor | None = None,
    targets: Tensor,
    tp_group: Any = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Literal["none", "metric", "grad"] = "none",
    token_mask: Tensor | None = None,
    ignore_index: int = -100,
    sampling: Sampling | None = None,
    ownership: Literal["borrow", "consume"] = "borrow",
    hidden_layout: Literal["replicated", "sequence_parallel"] = "replicated",
    gradient_accumulation_fusion: bool = False,
    triton: bool | None = None,
    workspace_bytes: int | None = None,
) -> TokenStats:
    """Compute log-probs of the targets, and entropies, over a vocabulary that ranks may share.

    Given logits, it reads them once; the backward reads them again and writes the gradient. Besides
    that gradient it takes O(tokens) memory and the workspace. Given hidden states and the output
    layer's weight, it makes the logits a part at a time, and again in the backward, only for the
    tokens that are computed.

    With a `tp_group` of several ranks all of them take part, with the same targets, mask and
    temperature, and get the same bits. The forward makes one all-gather of 16 bytes per token and
    rank, or 12 + 4 · K for K targets. The backward makes no collective if logits were given. If
    hidden states were, it adds their gradients up over the ranks: with an all-reduce in float32, or
    under sequence parallelism with a reduce-scatter, where the forward all-gathers hidden states.

    Args:
        logits: [..., V / tp], of float32, bfloat16, float16 or float64: this rank's columns. Rank r
            of the group has those from r · V / tp on, as Megatron's output layer does.
        hidden: [..., H] in place of logits, what the output layer is given.
        weight: [V / tp, H] of the same type: this rank's rows of the output layer.
        targets: [...] of int64 or int32, ids in the whole vocabulary: each row's own target, so
            already shifted. Or [..., K], for the log-probs of K tokens at each row.
        tp_group: the ranks that share the vocabulary; None if this rank has all of it.
        vocab_size: the number of tokens in the vocabulary, if Megatron has padded its columns;
            padded columns take no part.
        temperature: the number that logits are divided by, or [...] with one for each token.
        entropy: "none" leaves it out, "metric" computes it, "grad" differentiates it as well.
        token_mask: [...] of bool; False for tokens that are not computed.
        ignore_index: tokens with this target are not computed either. Among K targets it only
            leaves the entry out.
        sampling: the tokens that the sampler chose from; log-prob, entropy and lse are over those
            alone. It needs one target per token.
        ownership: "consume" lets the backward write the gradient into the logits' memory, so that
            it takes none of its own. Another operation that has saved the logits raises if its
            backward runs later. Logits with gaps in memory are not consumed, with a warning.
        hidden_layout: "sequence_parallel" if each rank of the group has a piece of `hidden`, cut
            along the first dimension; targets are those of all pieces.
        gradient_accumulation_fusion: adds the weight's gradient to its `main_grad`, and gives
            autograd zeros, as Megatron's option of that name does.
        triton: True computes with Triton's kernels, which read logits once and write gradients
            once; False with PyTorch. None follows the environment's MEGATRON_IDEMPOTENT_TRITON, 1
            or 0, and if that is not set uses the kernels on GPUs of compute capability 8.0 or
            higher. PyTorch always computes float64 and K targets.
        workspace_bytes: bytes of scratch memory; None for a size that suits the device.

    Raises:
        ValueError: shapes or types that do not fit, a target outside of the vocabulary, a
            temperature that is not positive, fewer columns than tokens, leaf logits to consume, or
            no `main_grad` to add to, or Triton asked for where its kernels cannot run.

    Example:
        stats = token_logprobs(logits=logits, targets=labels, entropy="metric")
        loss = -(stats.logprob * mask).sum()
    """
    caller = "token_logprobs"
    one_of(caller, "entropy", entropy, ("none", "metric", "grad"))
    call = Call(
        caller=caller,
        logits=logits,
        hidden=hidden,
        weight=weight,
        tp_group=tp_group,
        vocab_size=vocab_size,
        temperature=temperature,
        token_mask=token_mask,
        ignore_index=ignore_index,
        hidden_layout=hidden_layout,
        workspace_bytes=workspace_bytes,
        targets=targets,
        sampling=sampling,
        ownership=ownership,
        fused=gradient_accumulation_fusion,
    )
    many = call.valid is not None
    for name, value in (("triton", triton), ("sampling", sampling)):
        if value and many:
            argument = f"targets of shape {tuple(targets.shape)}, several for each token, and"
            remedy = f"leave {name} out"
            raise misfit(caller, f"{argument} {name}={value!r}, which knows one", remedy)
    # PyTorch computes K targets, on any device.
    dtype, device = call.input.dtype, call.input.device
    backend: Backend = "eager" if many else backend_of(device, dtype, triton)
    rows = call.gather()
    options = ComputeOptions(
        entropy=entropy != "none",
        entropy_gradient=entropy == "grad",
        consume=call.consumes(),
        backend=backend,
        workspace_bytes=call.workspace(),
    )
    of_tokens = call.ordered(call.ids), call.ordered(temperature)
    batch = TokenBatch(*of_tokens, call.columns, options)
    sampler: Any = None
    if sampling is not None and sampling.cuts(call.columns.vocabulary):
        sampler = functools.partial(columns_above_boundary, sampling=sampling)
        if call.keep is not None:
            keep_NK = call.ordered(call.keep)
            sampler = functools.partial(columns_of_ids, sampling=sampling, keep_NK=keep_NK)
    function: Any = LogprobsFromLogits
    inputs: tuple[Any, ...] = (rows, call.kept_N)
    if weight is not None:
        function, inputs = LogprobsFromHidden, (call.ordered(rows), weight, call.parts(backend))
    stats = TokenStats(*map(call.shaped, function.apply(batch, *inputs, sampler)))
    if call.valid is None:
        return stats
    # The last log-prob is that of all other tokens. A repeated id gets its first occurrence's.
    logprob_K, logprob_rest = stats.logprob[..., :-1], stats.logprob[..., -1]
    if call.first is not None:
        logprob_K = logprob_K.gather(-1, call.first)
    return stats._replace(logprob=torch.where(call.valid, logprob_K, 0.0), rest=logprob_rest)


#: The first capability with bfloat16, and with maxima that propagate NaN.
_CAPABILITY = (8, 0)
#: Triton's kernels compute in float32; torch computes float64 logits.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def backend_of(device: torch.device, dtype: torch.dtype, triton: bool | None) -> Backend:
    """Choose the backend, Triton or torch, for logits of a type on a device.

    Raises:
        ValueError: `triton` is True and Triton's kernels cannot run.
    """
    on_triton = uses_triton("token_logprobs()", device, triton=triton, capability=_CAPABILITY)
    return "triton" if on_triton and dtype in DTYPES else "eager"


def _outputs(
    ctx: Any, batch: TokenBatch, total: VocabStatistics, *inputs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return `(logprob, entropy, lse)`, and save the statistics and `inputs` for the backward."""
    if any(ctx.needs_input_grad):
        ctx.save_for_backward(*total, *inputs)
    ctx.batch = batch
    lse_N = total.origin / batch.temperature + total.log_sum
    # Copies, because callers may change in place what the backward has saved.
    entropy_N = total.entropy.clone() if batch.options.entropy else None
    constant = [lse_N]
    if entropy_N is not None and not batch.options.entropy_gradient:
        constant.append(entropy_N)
    ctx.mark_non_differentiable(*constant)
    ctx.set_materialize_grads(False)
    return total.logprob.clone(), entropy_N, lse_N


def _saved(ctx: Any) -> tuple[Any, ...]:
    """Return the `VocabStatistics` and the inputs that `_outputs` saved for the backward."""
    count = len(VocabStatistics._fields)
    return VocabStatistics(*ctx.saved_tensors[:count]), *ctx.saved_tensors[count:]


Sampler = Callable[[Source, TokenBatch], tuple[KeptColumns, VocabStatistics]]
"""Returns the kept columns of this rank, and statistics over the kept columns of all ranks."""


class LogprobsFromLogits(torch.autograd.Function):
    """Computes the outputs `(logprob, entropy, lse)` from logits. Each output is [N], one entry per
    token, in the order in which the rows of the logits lie in memory.

    The N tokens are those that are kept: neither masked nor ignored. With a sampler the outputs are
    over what that kept, and the logits are not needed after the forward, unless their memory is
    consumed.
    """

    @staticmethod
    def forward(
        ctx: Any, batch: TokenBatch, logits: Tensor, kept_N: Tensor | None, sampler: Sampler | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute log-prob, entropy and log-sum-exp; `batch` has an entry for each kept token."""
        rows, ctx.is_sampled = Order(logits).rows(logits), sampler is not None
        if sampler is None:
            partial = local_statistics(rows, kept_N, batch)
            return _outputs(ctx, batch, global_statistics(partial, batch), logits, kept_N)
        source = Logits(rows, kept_N, batch.columns, batch.options.workspace_bytes)
        columns, total = sampler(source, batch)
        ctx.like, ctx.device = torch.empty_like(logits, device="meta"), logits.device
        consumed = logits if batch.options.consume else None
        return _outputs(ctx, batch, total, *columns, kept_N, consumed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprob_N: Tensor | None, d_entropy_N: Tensor | None, _: Any) -> Any:
        """Compute the logits' gradient, without a collective, because the forward has saved
        statistics of all ranks.
        """
        gradient_of = _gradient_of_kept_logits if ctx.is_sampled else _gradient_of_logits
        return None, gradient_of(ctx, d_logprob_N, d_entropy_N), None, None


def _gradient_of_logits(ctx: Any, d_logprob_N: Tensor | None, d_entropy_N: Tensor | None) -> Tensor:
    """Return the logits' gradient for all columns, in the logits' memory if they are consumed."""
    batch, (total, logits, kept_N) = ctx.batch, _saved(ctx)
    order, of_outputs = Order(logits), (batch, total, d_logprob_N, d_entropy_N)
    # An alias that shares the version counter: autograd tells others who have saved the logits.
    gradient: Tensor = logits.detach() if batch.options.consume else torch.empty_like(logits)
    panels, into = as_matrices(order.rows(logits.detach()), order.rows(gradient))
    if batch.options.backend == "triton":
        from . import on_gpu

        slopes, token_N = on_gpu.grad_coefficients(*of_outputs)
        on_gpu.write_gradient(panels, into, kept_N, token_N, slopes, batch)
    else:
        slopes, batch, few_N = _differentiated(*of_outputs)
        kept_N = kept_N if few_N is None else submask(kept_N, few_N)
        zero_others(into, kept_N, batch.columns.real)
        write_gradient(panels, into, kept_N, slopes, batch)
    return gradient


def _gradient_of_kept_logits(
    ctx: Any, d_logprob_N: Tensor | None, d_entropy_N: Tensor | None
) -> Tensor:
    """Return the logits' gradient with a sampler: zeros except in the columns that it kept."""
    row_E, column_E, gradient_E, kept_N, logits = _kept_gradient(ctx, d_logprob_N, d_entropy_N)
    # An alias that shares the version counter: autograd tells others who have saved the logits.
    gradient: Tensor = (
        torch.zeros_like(ctx.like, device=ctx.device) if logits is None else logits.detach().zero_()
    )
    (into,) = as_matrices(Order(gradient).rows(gradient))
    for panel, entry_e, row_e in flat_indices(into, kept_N, row_E):
        panel[row_e, column_E[entry_e]] = gradient_E[entry_e].to(gradient.dtype)
    return gradient


#: If more than this fraction of tokens has a gradient, selecting them costs more than it saves.
_FEW = 0.9


def _differentiated(
    batch: TokenBatch,
    total: VocabStatistics,
    d_logprob_N: Tensor | None,
    d_entropy_N: Tensor | None,
) -> tuple[GradCoefficients, TokenBatch, Tensor | None]:
    """Return the gradient's coefficients, and the `TokenBatch`, of tokens with a nonzero gradient.
    Also return a mask [N] of these tokens; None if all tokens are returned.

    Clipped tokens have no gradient, and neither have those of a group with equal rewards. If nearly
    all tokens have one, all are returned, and None as the mask. The host waits for their number.
    """
    slopes = GradCoefficients.from_outputs(batch, total, d_logprob_N, d_entropy_N)
    live = [gradient != 0 for gradient in (d_logprob_N, d_entropy_N) if gradient is not None]
    live_N, *more = (mask if mask.dim() == 1 else mask.any(-1) for mask in live)
    live_N = live_N | more[0] if more else live_N
    if not len(live_N) or int(live_N.sum()) > _FEW * len(live_N):
        return slopes, batch, None
    return slopes.select(live_N), batch.select(live_N), live_N


class LogprobsFromHidden(torch.autograd.Function):
    """Computes `(logprob, entropy, lse)` of tokens [N] from their hidden states, [N, H].

    With a sampler the outputs are over what that kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        batch: TokenBatch,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        parts: ProductParts,
        sampler: Sampler | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute log-prob, entropy and log-sum-exp from the logits `hidden_NH @ weight_VH.T`. The
        logits are computed one part at a time, in the dtype that `hidden_NH` and `weight_VH` share.

        A part is some columns of all tokens, so that each row of the weight is read once; with
        Triton's kernels it is all columns of some tokens.
        """
        # Saved tensors may be other objects, without the weight's main_grad.
        ctx.parts, ctx.weight, ctx.is_sampled = parts, weight_VH, sampler is not None
        partials, columns = [], batch.columns
        if sampler is not None:
            kept_columns, total = sampler(Products(hidden_NH, weight_VH, columns, parts), batch)
            return _outputs(ctx, batch, total, *kept_columns, hidden_NH, weight_VH)
        if batch.options.backend == "triton":
            for tokens, logits_nV in Products(hidden_NH, weight_VH, columns, parts).parts():
                partials.append(local_statistics(logits_nV, None, batch.select(tokens)))
            partial = partials[0]
            if len(partials) > 1:
                partial = Partial(*map(torch.cat, zip(*partials, strict=True)))
        else:
            has_target, product = [], Product()
            for part in parts.of_columns(len(hidden_NH), columns.real, hidden_NH.dtype):
                logits_Nv, of_part = product(hidden_NH, weight_VH[part].t()), batch.in_columns(part)
                partials.append(local_statistics(logits_Nv, None, of_part))
                has_target.append(is_local(of_part.local, of_part.columns.real))
            partial = merged(partials, has_target, batch.temperature)
        return _outputs(ctx, batch, global_statistics(partial, batch), hidden_NH, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logprob_N: Tensor | None, d_entropy_N: Tensor | None, _: Any) -> Any:
        """Compute the logits again, part by part, and from them the gradients of the hidden states
        and the weight.

        With `parts.reduce` the group's ranks take part in one all-reduce, in float32.
        """
        by_tokens = ctx.batch.options.backend == "triton"
        gradients = _gradients_by_tokens if by_tokens else _gradients_by_columns
        if ctx.is_sampled:
            gradients = _gradients_of_kept
        d_hidden_NH, d_weight_VH = gradients(ctx, d_logprob_N, d_entropy_N)
        if d_hidden_NH is not None and ctx.parts.reduce:
            dist.all_reduce(d_hidden_NH, group=ctx.batch.columns.group)
        return None, d_hidden_NH, d_weight_VH, None, None


def _gradients_by_columns(
    ctx: Any, d_logprob_N: Tensor | None, d_entropy_N: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the hidden states' gradient from this rank's columns, and the weight's gradient.
    The logits are computed again, some columns of all tokens at a time.

    The hidden states' gradient is added up in the type of the statistics.
    """
    total, hidden_NH, weight_VH = _saved(ctx)
    slopes, batch, few_N = _differentiated(ctx.batch, total, d_logprob_N, d_entropy_N)
    real, dtype = batch.columns.real, total.origin.dtype
    shape, product = hidden_NH.shape, Product()
    if few_N is not None:
        hidden_NH = hidden_NH[few_N]
    _, of_hidden, of_weight, *_ = ctx.needs_input_grad
    sum_NH = torch.zeros_like(hidden_NH, dtype=dtype) if of_hidden else None
    d_weight = WeightGradient(ctx.weight, of_weight, ctx.parts.fused, written=real)
    for part in ctx.parts.of_columns(len(hidden_NH), real, hidden_NH.dtype):
        logits_Nv = product(hidden_NH, weight_VH[part].t())
        write_gradient([logits_Nv], [logits_Nv], None, slopes, batch.in_columns(part))
        if sum_NH is not None and dtype == logits_Nv.dtype:
            sum_NH.addmm_(logits_Nv, weight_VH[part])
        elif sum_NH is not None:
            sum_NH += logits_Nv @ weight_VH[part]
        d_weight.add(part, logits_Nv, hidden_NH)
    if sum_NH is not None and few_N is not None:
        sum_NH = sum_NH.new_zeros(shape).masked_scatter_(few_N[:, None], sum_NH)
    return sum_NH, d_weight.finish()


def _gradients_by_tokens(
    ctx: Any, d_logprob_N: Tensor | None, d_entropy_N: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the hidden states and the weight, with Triton's kernels.
    The logits are computed again, all columns of some tokens at a time.

    The hidden states' gradient is in float32 if it is summed over several ranks.
    """
    from . import on_gpu

    total, hidden_NH, weight_VH = _saved(ctx)
    batch, parts, dtype = ctx.batch, ctx.parts, hidden_NH.dtype
    slopes, token_N = on_gpu.grad_coefficients(batch, total, d_logprob_N, d_entropy_N)
    token_L = (token_N >= 0).nonzero().squeeze(1)
    all_live, rows = len(token_L) == len(hidden_NH), slice(batch.columns.real)
    real_VH = weight_VH[rows]
    blocks = list(parts.of_tokens(len(token_L), rows.stop, dtype)) if len(token_L) else []
    _, of_hidden, of_weight, *_ = ctx.needs_input_grad
    d_hidden_NH: Any = None
    if of_hidden:
        allocate = torch.empty_like if all_live and rows.stop else torch.zeros_like
        d_hidden_NH = allocate(hidden_NH, dtype=slopes.factor.dtype if parts.reduce else dtype)
    counts = {"written": rows.stop, "parts": len(blocks)}
    d_weight, product = WeightGradient(ctx.weight, of_weight, parts.fused, **counts), Product()
    for block in blocks if rows.stop else ():
        token_n: Any = block if all_live else token_L[block]
        hidden_nH = hidden_NH[token_n]
        logits_nV = product(hidden_nH, real_VH.t())
        of_tokens = slopes.select(token_n), batch.select(token_n)
        on_gpu.write_gradient([logits_nV], [logits_nV], None, None, *of_tokens)
        if all_live and d_hidden_NH is not None:
            product_into(d_hidden_NH[block], logits_nV, real_VH)
        elif d_hidden_NH is not None:
            d_hidden_nH = d_hidden_NH.new_empty(hidden_nH.shape)
            d_hidden_NH[token_n] = product_into(d_hidden_nH, logits_nV, real_VH)
        d_weight.add(rows, logits_nV, hidden_nH)
    return d_hidden_NH, d_weight.finish()


def _kept_gradient(ctx: Any, d_logprob_N: Tensor | None, d_entropy_N: Tensor | None) -> Any:
    """Return, for each column that a sampler kept for a token, three values, and the saved inputs.
    The values are the token's index, the column's number and the logit's gradient, each [E].
    """
    total, *saved = _saved(ctx)
    columns, inputs = KeptColumns(*saved[:3]), saved[3:]
    if d_logprob_N is not None:  # a log-prob of -inf has no gradient
        d_logprob_N = torch.where(total.logprob > -torch.inf, d_logprob_N, 0.0)
    slopes = GradCoefficients.from_outputs(ctx.batch, total, d_logprob_N, d_entropy_N)
    gradient_E = columns.gradient(slopes, ctx.batch)
    return columns.row.long(), columns.column.long(), gradient_E, *inputs


def _gradients_of_kept(
    ctx: Any, d_logprob_N: Tensor | None, d_entropy_N: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the hidden states and the weight from the columns that a sampler
    kept, without computing logits again.
    """
    row_E, column_E, gradient_E, hidden_NH, weight_VH = _kept_gradient(
        ctx, d_logprob_N, d_entropy_N
    )
    _, of_hidden, of_weight, *_ = ctx.needs_input_grad
    d_hidden_NH = torch.zeros_like(hidden_NH, dtype=gradient_E.dtype) if of_hidden else None
    d_weight = WeightGradient(ctx.weight, of_weight, ctx.parts.fused)
    used_U, place_E = torch.unique(column_E, return_inverse=True)
    by_place_E = place_E.argsort(stable=True)
    place_E, row_E, gradient_E = place_E[by_place_E], row_E[by_place_E], gradient_E[by_place_E]
    columns = list(ctx.parts.of_columns(len(hidden_NH), len(used_U), hidden_NH.dtype))
    ends = torch.tensor([part.stop for part in columns], device=place_E.device)
    counts = torch.searchsorted(place_E, ends).tolist()
    for part, start, stop in zip(columns, [0, *counts], counts, strict=False):
        d_logits_Nu = hidden_NH.new_zeros(len(hidden_NH), part.stop - part.start)
        values_e = gradient_E[start:stop].to(d_logits_Nu.dtype)
        d_logits_Nu[row_E[start:stop], place_E[start:stop] - part.start] = values_e
        if d_hidden_NH is not None:
            d_hidden_NH += d_logits_Nu @ weight_VH[used_U[part]]
        d_weight.add(used_U[part], d_logits_Nu, hidden_NH)
    return d_hidden_NH, d_weight.finish()
