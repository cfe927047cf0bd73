"""`token_logprobs`: log-probs of targets, and entropies, out of logits or of hidden states."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .arguments import (
    Inputs,
    ResultLayout,
    Targets,
    batch_of,
    ids_to_keep,
    may_consume,
    one_of,
    parts_of,
    positive,
    tokens_to_compute,
    workspace_of,
)
from .autograd import KeptFromHidden, KeptFromLogits, LogprobsFromHidden, LogprobsFromLogits
from .request import Backend, ComputeOptions, Sampling, backend_of

_NAME = "token_logprobs"


class TokenStats(NamedTuple):
    """The statistics of each token, in the shape of the rows, float32 (float64 for such logits).

    Zero for tokens that are masked or ignored.
    """

    logprob: Tensor
    """Natural logarithm of softmax(logits / temperature) at the target; in the targets' shape."""
    entropy: Tensor | None
    """The entropy of that softmax, in nats; None unless asked for."""
    lse: Tensor
    """log Σ exp(logits / temperature); not differentiable."""
    rest: Tensor | None = None
    """The log-prob of all tokens but K targets together, -inf where there is none; as exact where
    that is next to nothing. None for one target per token."""


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
    compiled: bool = False,
    triton: bool | None = None,
    workspace_bytes: int | None = None,
) -> TokenStats:
    """Log-probs of the targets, and entropies, over a vocabulary that ranks may share.

    From logits: reads them once; the backward reads them again and writes the gradient. Besides
    that gradient it takes O(tokens) memory and the workspace. From hidden states and the output
    layer's weight: the logits are made a part at a time, and again in the backward, only for the
    tokens that are computed.

    With a `tp_group` of several ranks all of them take part, with the same targets, mask and
    temperature, and find the same bits: the forward makes one all-gather of 16 bytes per token and
    rank, or 12 + 4 · K of K targets. The backward makes none from logits, and from hidden states
    the one that adds up their gradients: an all-reduce in float32, or under sequence parallelism a
    reduce-scatter, with an all-gather of the hidden states in the forward.

    Args:
        logits: [..., V / tp], of float32, bfloat16, float16 or float64: this rank's columns. Rank r
            of the group has those from r · V / tp on, as Megatron's output layer does.
        hidden: [..., H] in place of logits, what the output layer is given.
        weight: [V / tp, H] of the same type: this rank's rows of the output layer.
        targets: [...] of int64 or int32, ids in the whole vocabulary: the token whose probability
            is meant, so already shifted. Or [..., K], for the log-probs of K tokens.
        tp_group: the ranks that share the vocabulary; None where it is whole.
        vocab_size: tokens in it, where Megatron has padded the columns; padding takes no part.
        temperature: what logits are divided by, or one for each token [...].
        entropy: "metric" computes it, "grad" differentiates it as well.
        token_mask: [...] of bool; False for tokens that are not computed.
        ignore_index: a target of that is not computed either; of K targets it is only left out, and
            is one of the rest.
        sampling: which tokens there were to choose from; log-prob, entropy and lse are over those.
            With one target per token.
        ownership: "consume" lets the backward write the gradient into the logits' memory, which
            then takes none of its own. What else has saved the logits for its backward raises if
            that comes later. Logits that lie in memory with gaps are borrowed all the same, with a
            warning.
        hidden_layout: "sequence_parallel" where each rank of the group has a piece of `hidden`, by
            its first dimension; targets are those of all pieces.
        gradient_accumulation_fusion: as Megatron's option of that name: the weight's gradient is
            added to its `main_grad`, and autograd is given zeros.
        compiled: compute with `torch.compile`, which makes one loop of what is done to a logit;
            the first call takes seconds, and all ranks must say the same.
        triton: compute with Triton's kernels, which read logits once and write gradients once; None
            to do so on GPUs of compute capability 8.0 on, False for PyTorch. float64 and K targets
            are computed by PyTorch. Where it is None the environment's MEGATRON_IDEMPOTENT_TRITON
            says 1 or 0.
        workspace_bytes: scratch memory; None for what suits the device.

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
    backend = _backend(inputs, asked_targets, sampling, compiled=compiled, triton=triton)
    rows = inputs.rows()
    layout = ResultLayout(rows, tokens)
    wanted = ComputeOptions(
        entropy=entropy != "none",
        entropy_gradient=entropy == "grad",
        consume=ownership == "consume" and may_consume(_NAME, rows, layout.order),
        backend=backend,
        workspace_bytes=workspace_of(rows.device, workspace_bytes, from_logits=logits is not None),
    )
    asked = batch_of(layout, asked_targets.ids, temperature, columns, wanted)
    cut = sampling is not None and sampling.cuts(columns.vocabulary)
    if cut:
        asked = asked._replace(sampling=sampling, keep=layout.chosen(keep))
    if logits is not None:
        from_logits: Any = KeptFromLogits if cut else LogprobsFromLogits
        found = from_logits.apply(rows, layout.kept_N, asked)
    else:
        parts = parts_of(inputs, backend, workspace_bytes, fused=gradient_accumulation_fusion)
        from_hidden: Any = KeptFromHidden if cut else LogprobsFromHidden
        found = from_hidden.apply(layout.chosen(rows), weight, asked, parts)
    stats = TokenStats(*map(layout.shaped, found))
    return _of_each(stats, asked_targets) if asked_targets.many else stats


def _backend(
    inputs: Inputs,
    targets: Targets,
    sampling: Sampling | None,
    *,
    compiled: bool,
    triton: bool | None,
) -> Backend:
    """Choose what computes; K targets are PyTorch's, on any device."""
    rows = inputs.hidden if inputs.logits is None else inputs.logits
    assert rows is not None
    if not targets.many:
        return backend_of(rows.device, rows.dtype, compiled=compiled, triton=triton)
    given = {"compiled": compiled, "triton": triton, "sampling": sampling}
    for name, value in given.items():
        if value:
            raise ValueError(
                f"{_NAME}() got targets of shape {tuple(targets.ids.shape)}, several for each "
                f"token, and {name}={value!r}, which knows one: leave {name} out"
            )
    return "eager"


def _of_each(stats: TokenStats, targets: Targets) -> TokenStats:
    """Takes the last log-prob, of all other tokens, off those of K targets."""
    logprob_K, rest = stats.logprob[..., :-1], stats.logprob[..., -1]
    if targets.first is not None:
        logprob_K = logprob_K.gather(-1, targets.first)
    assert targets.valid is not None
    return stats._replace(logprob=torch.where(targets.valid, logprob_K, 0.0), rest=rest)
