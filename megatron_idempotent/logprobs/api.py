"""`token_logprobs` computes log-probs of targets, and entropies, from logits or hidden states.

Its autograd functions from hidden states make the logits a part at a time, and again in the
backward: some columns of all tokens, or for Triton's kernels all columns of some tokens. Those with
a sampler compute only the few columns of each token that it kept, and only these have a gradient.

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

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from megatron_idempotent.kernel_choice import uses_triton

from .arguments import (
    Inputs,
    ResultLayout,
    ids_to_keep,
    one_of,
    positive,
    tokens_to_compute,
)
from .kernels import (
    GradCoefficients,
    differentiated,
    global_statistics,
    local_statistics,
    picked,
    write_gradient,
)
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
    gradients_by_columns,
    of_all_ranks,
    once_differentiable,
    product_into,
    submask,
    zero_others,
)
from .statistics import (
    Backend,
    ComputeOptions,
    Partial,
    TokenBatch,
    Whole,
    is_ours,
    merged,
    temperature_of,
)
from .truncated_vocab import Kept, Sampling, choose, named

_NAME = "token_logprobs"


class TokenStats(NamedTuple):
    """Holds the statistics of each token, [...] as the rows: float32, or float64 for such logits.

    They are zero for tokens that are masked or ignored.
    """

    logprob: Tensor
    """Natural logarithm of softmax(logits / temperature) at the target; in the targets' shape."""
    entropy: Tensor | None
    """The entropy of that softmax, in nats; None unless asked for."""
    lse: Tensor
    """log Σ exp(logits / temperature); not differentiable."""
    rest: Tensor | None = None
    """The log-prob of all tokens but the K targets together; -inf if there is no other token. It is
    exact even if the targets have nearly all of the probability. None for one target per token."""


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
    temperature, and find the same bits. The forward makes one all-gather of 16 bytes per token and
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
            backward runs later. Logits that lie in memory with gaps are borrowed all the same, with
            a warning.
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
    one_of(_NAME, "entropy", entropy, ("none", "metric", "grad"))
    inputs = Inputs.accepted(
        _NAME,
        logits=logits,
        hidden=hidden,
        weight=weight,
        tp_group=tp_group,
        vocab_size=vocab_size,
        ownership=ownership,
        hidden_layout=hidden_layout,
        fused=gradient_accumulation_fusion,
        workspace_bytes=workspace_bytes,
    )
    columns = inputs.columns
    tokens, asked_targets = tokens_to_compute(
        _NAME, inputs.shape, targets, token_mask, ignore_index, columns.vocabulary
    )
    positive(_NAME, temperature, inputs.shape, tokens)
    keep = ids_to_keep(_NAME, sampling, inputs.shape, tokens, columns.vocabulary)
    for name, value in (("triton", triton), ("sampling", sampling)):
        if value and asked_targets.many:
            raise ValueError(
                f"{_NAME}() got targets of shape {tuple(targets.shape)}, several for each token, "
                f"and {name}={value!r}, which knows one: leave {name} out"
            )
    # PyTorch computes K targets, on any device.
    backend: Backend = "eager"
    if not asked_targets.many:
        backend = backend_of(inputs.given.device, inputs.given.dtype, triton)
    rows = inputs.rows()
    layout = ResultLayout(rows, tokens)
    wanted = ComputeOptions(
        entropy=entropy != "none",
        entropy_gradient=entropy == "grad",
        consume=inputs.consumes(layout.order),
        backend=backend,
        workspace_bytes=inputs.workspace(),
    )
    ids, of_tokens = layout.chosen(asked_targets.ids), layout.chosen(temperature)
    asked = TokenBatch(ids, of_tokens, columns, wanted)
    cut = sampling is not None and sampling.cuts(columns.vocabulary)
    if cut:
        asked = asked._replace(sampling=sampling, keep=layout.chosen(keep))
    if logits is not None:
        from_logits: Any = KeptFromLogits if cut else LogprobsFromLogits
        found = from_logits.apply(rows, layout.kept_N, asked)
    else:
        from_hidden: Any = KeptFromHidden if cut else LogprobsFromHidden
        found = from_hidden.apply(layout.chosen(rows), weight, asked, inputs.parts(backend))
    stats = TokenStats(*map(layout.shaped, found))
    if asked_targets.valid is None:
        return stats
    # The last log-prob is that of all other tokens. A repeated id gets that of its first mention.
    logprob_K, rest = stats.logprob[..., :-1], stats.logprob[..., -1]
    if asked_targets.first is not None:
        logprob_K = logprob_K.gather(-1, asked_targets.first)
    return stats._replace(logprob=torch.where(asked_targets.valid, logprob_K, 0.0), rest=rest)


#: With bfloat16, and maxima that keep NaN.
_CAPABILITY = (8, 0)
#: Kernels compute in float32; float64 is for who wants more, and computed by torch.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def backend_of(device: torch.device, dtype: torch.dtype, triton: bool | None) -> Backend:
    """Choose what computes logits of this type on this device.

    Raises:
        ValueError: kernels were asked for where they cannot run.
    """
    found = uses_triton("token_logprobs()", device, asked=triton, capability=_CAPABILITY)
    return "triton" if found and dtype in DTYPES else "eager"


class LogprobsFromLogits(torch.autograd.Function):
    """Computes `(logprob, entropy, lse)` from logits, each [N] in the order of `Order`.

    The N tokens are those that are kept: neither masked nor ignored.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, kept_N: Tensor | None, asked: TokenBatch
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the statistics; `asked` has an entry for each kept token."""
        rows = Order(logits).rows(logits)
        temperature, columns, wanted = asked.temperature, asked.columns, asked.wanted
        partial = local_statistics(rows, asked.local, kept_N, temperature, columns, wanted)
        whole = global_statistics(partial, asked)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, kept_N, *whole)
        ctx.asked = asked
        return wanted.returned(ctx, whole, temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """Compute the logits' gradient, without a collective: all ranks' sums have been saved."""
        logits, kept_N, *saved = ctx.saved_tensors
        asked: TokenBatch = ctx.asked
        given = Whole(*saved), of_logprob_N, of_entropy_N
        order = Order(logits)
        # An alias that shares the version counter: who has saved the logits too is told of it.
        gradient = logits.detach() if asked.wanted.consume else torch.empty_like(logits)
        rows, into = as_matrices(order.rows(logits.detach()), order.rows(gradient))
        if asked.wanted.backend == "triton":
            from . import on_gpu

            found, token_N = on_gpu.grad_coefficients(asked, *given)
            numbers = found, asked.temperature, asked.columns
            on_gpu.write_gradient(rows, into, kept_N, token_N, *numbers)
        else:
            slopes, temperature, few_N = _differentiated(asked, *given)
            kept_N = kept_N if few_N is None else submask(kept_N, few_N)
            zero_others(into, kept_N, asked.columns.real)
            numbers = slopes, temperature, asked.columns
            write_gradient(rows, into, kept_N, *numbers, asked.wanted)
        return gradient, None, None


def _differentiated(
    asked: TokenBatch, whole: Whole, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None
) -> tuple[GradCoefficients, Tensor | float, Tensor | None]:
    """Return coefficients and temperature of the tokens that have a gradient, and a mask of these.

    The mask is [N], or None if nearly all tokens have one: then these are of all.
    """
    slopes = GradCoefficients.from_outputs(
        asked.local, whole, of_logprob_N, of_entropy_N, asked.temperature
    )
    few_N = picked(differentiated(of_logprob_N, of_entropy_N))
    if few_N is None:
        return slopes, asked.temperature, None
    return slopes.of(few_N), temperature_of(asked.temperature, few_N), few_N


def _gradients_by_tokens(
    weight: Tensor,
    hidden_NH: Tensor,
    weight_VH: Tensor,
    asked: TokenBatch,
    parts: ProductParts,
    *,
    given: tuple[Whole, Tensor | None, Tensor | None],
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute this rank's share of the hidden states' gradient, and the weight's gradient.

    Arguments are those of `sources.gradients_by_columns`; `given` holds the statistics, and the
    gradients of log-probs and entropies. The hidden states' gradient is in float32 if shares of
    several ranks are added up.
    """
    from . import on_gpu

    of_hidden, of_weight = needed
    columns, dtype = asked.columns, hidden_NH.dtype
    slopes, token_N = on_gpu.grad_coefficients(asked, *given)
    token_L = (token_N >= 0).nonzero().squeeze(1)
    every = len(token_L) == len(hidden_NH)
    real_VH = weight_VH[: columns.real]
    blocks = list(parts.of_tokens(len(token_L), columns.real, dtype)) if len(token_L) else []
    d_hidden_NH: Any = None
    if of_hidden:
        made = torch.empty_like if every and columns.real else torch.zeros_like
        summed = slopes.factor.dtype if parts.reduce else dtype
        d_hidden_NH = made(hidden_NH, dtype=summed)
    rows, number = slice(columns.real), len(blocks)
    d_weight = WeightGradient(weight, of_weight, parts.fused, written=rows.stop, parts=number)
    product = Product()
    for block in blocks if columns.real else ():
        chosen: Any = block if every else token_L[block]
        hidden_nH, some = hidden_NH[chosen], slopes.of(chosen)
        logits_nV = product(hidden_nH, real_VH.t())
        temperature, in_place = temperature_of(asked.temperature, chosen), [logits_nV]
        on_gpu.write_gradient(in_place, in_place, None, None, some, temperature, columns)
        if isinstance(chosen, slice) and d_hidden_NH is not None:
            product_into(d_hidden_NH[chosen], logits_nV, real_VH)
        elif d_hidden_NH is not None:
            d_hidden_nH = d_hidden_NH.new_empty(hidden_nH.shape)
            d_hidden_NH[chosen] = product_into(d_hidden_nH, logits_nV, real_VH)
        d_weight.add(rows, logits_nV, hidden_nH)
    return of_all_ranks(d_hidden_NH, parts, columns), d_weight.done()


class LogprobsFromHidden(torch.autograd.Function):
    """Computes `(logprob, entropy, lse)` of tokens [N] from their hidden states, [N, H]."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, asked: TokenBatch, parts: ProductParts
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the statistics of logits `hidden_NH @ weight_VH.T`, in the type of both.

        It makes some columns of all tokens at a time, so that each row of the weight is read once;
        with Triton's kernels all columns of some tokens.
        """
        found, columns, wanted = [], asked.columns, asked.wanted
        if wanted.backend == "triton":
            for tokens, logits_nV in Products(hidden_NH, weight_VH, columns, parts).parts():
                of_these = temperature_of(asked.temperature, tokens)
                given = (logits_nV, asked.local[tokens], None, of_these, columns, wanted)
                found.append(local_statistics(*given))
            several = len(found) > 1
            partial = Partial(*map(torch.cat, zip(*found, strict=True))) if several else found[0]
        else:
            own, product = [], Product()
            for part in parts.of_columns(len(hidden_NH), columns.real, hidden_NH.dtype):
                logits_Nv = product(hidden_NH, weight_VH[part].t())
                here = columns._replace(real=part.stop - part.start)
                local_n = asked.local - part.start
                given = (logits_Nv, local_n, None, asked.temperature, here, wanted)
                found.append(local_statistics(*given))
                own.append(is_ours(local_n, here.real))
            partial = merged(found, own, asked.temperature)
        whole = global_statistics(partial, asked)
        if any(ctx.needs_input_grad[:2]):
            ctx.save_for_backward(hidden_NH, weight_VH, *whole)
        ctx.asked, ctx.parts = asked, parts
        ctx.weight = weight_VH  # what is saved may be another object, without its main_grad
        return asked.wanted.returned(ctx, whole, asked.temperature)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """Make the same parts of the logits again, and from them both gradients.

        With `parts.reduce` the group's ranks take part in one all-reduce, in float32.
        """
        asked: TokenBatch = ctx.asked
        hidden_NH, weight_VH, *saved = ctx.saved_tensors
        given = Whole(*saved), of_logprob_N, of_entropy_N
        inputs, needed = (ctx.weight, hidden_NH, weight_VH), ctx.needs_input_grad[:2]
        if asked.wanted.backend == "triton":
            found = _gradients_by_tokens(*inputs, asked, ctx.parts, given=given, needed=needed)
            return *found, None, None
        slopes, temperature, few_N = _differentiated(asked, *given)

        def write(part: slice, logits_Nv: Tensor) -> None:
            here = slopes._replace(local=slopes.local - part.start)
            columns = asked.columns._replace(real=part.stop - part.start)
            rows = [logits_Nv]
            write_gradient(rows, rows, None, here, temperature, columns, asked.wanted)

        of_these = asked.columns, ctx.parts, few_N
        found = gradients_by_columns(
            *inputs, *of_these, needed=needed, dtype=saved[0].dtype, write=write
        )
        return *found, None, None


def _forward(
    ctx: Any, source: Source, asked: TokenBatch, *inputs: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    kept, whole = (choose if asked.keep is None else named)(source, asked)
    if any(ctx.needs_input_grad):
        ctx.save_for_backward(*kept, *whole, *inputs)
    ctx.asked = asked
    return asked.wanted.returned(ctx, whole, asked.temperature)


def _gradient(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None) -> Any:
    """Return the kept columns' tokens, numbers and gradients, each [E], and the saved inputs."""
    asked: TokenBatch = ctx.asked
    saved = ctx.saved_tensors
    kept, whole, inputs = Kept(*saved[:3]), Whole(*saved[3:9]), saved[9:]
    if of_logprob_N is not None:  # one of -inf does not move
        of_logprob_N = torch.where(whole.logprob > -torch.inf, of_logprob_N, 0.0)
    slopes = GradCoefficients.from_outputs(
        asked.local, whole, of_logprob_N, of_entropy_N, asked.temperature
    )
    gradient_E = kept.gradient(slopes, asked.temperature)
    return kept.row.long(), kept.column.long(), gradient_E, *inputs


class KeptFromLogits(torch.autograd.Function):
    """Computes `(logprob, entropy, lse)` over what a sampler kept, from logits.

    Each is [N] in the order of `Order`, of the tokens that are computed. The logits are not needed
    after the forward, unless their memory is consumed.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, kept_N: Tensor | None, asked: TokenBatch
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the statistics; `asked` has an entry for each kept token."""
        wanted = asked.wanted
        rows = Order(logits).rows(logits)
        source = Logits(rows, kept_N, asked.columns, wanted.workspace_bytes)
        ctx.like = torch.empty_like(logits, device="meta")
        ctx.device = logits.device
        return _forward(ctx, source, asked, kept_N, logits if wanted.consume else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """Write the gradients of kept columns, and zeros elsewhere, without a collective."""
        row_E, column_E, gradient_E, kept_N, logits = _gradient(ctx, of_logprob_N, of_entropy_N)
        if logits is None:
            gradient = torch.zeros_like(ctx.like, device=ctx.device)
        else:
            # An alias that shares the version counter: who has saved the logits too is told of it.
            gradient = logits.detach().zero_()
        (into,) = as_matrices(Order(gradient).rows(gradient))
        for panel, chosen, row_e in flat_indices([len(each) for each in into], kept_N, row_E):
            into[panel][row_e, column_E[chosen]] = gradient_E[chosen].to(gradient.dtype)
        return gradient, None, None


class KeptFromHidden(torch.autograd.Function):
    """Computes `(logprob, entropy, lse)` over what a sampler kept, from hidden states [N, H]."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, asked: TokenBatch, parts: ProductParts
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Compute the statistics of logits `hidden_NH @ weight_VH.T`, in the type of both."""
        ctx.parts, ctx.weight = parts, weight_VH
        source = Products(hidden_NH, weight_VH, asked.columns, parts)
        return _forward(ctx, source, asked, hidden_NH, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob_N: Tensor | None, of_entropy_N: Tensor | None, _: Any) -> Any:
        """Compute both gradients with the columns that some token kept, and make no logits.

        With `parts.reduce` the group's ranks take part in one all-reduce, in float32.
        """
        row_E, column_E, gradient_E, hidden_NH, weight_VH = _gradient(
            ctx, of_logprob_N, of_entropy_N
        )
        of_hidden, of_weight = ctx.needs_input_grad[:2]
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
        d_hidden_NH = of_all_ranks(d_hidden_NH, ctx.parts, ctx.asked.columns)
        return d_hidden_NH, d_weight.done(), None, None
