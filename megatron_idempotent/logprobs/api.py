"""`token_logprobs` computes log-probs of targets, and entropies, from logits or hidden states."""

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
    compiled: bool = False,
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
        compiled: computes with `torch.compile`, which fuses all operations on a logit into one
            loop; the first call takes seconds, and all ranks must pass the same.
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
    """Choose what computes a call; PyTorch computes K targets, on any device.

    Raises:
        ValueError: K targets with an option that knows one target per token.
    """
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
    """Move the last log-prob, that of all other tokens, into `rest`.

    A repeated id gets the log-prob of its first mention, an ignored one 0.
    """
    logprob_K, rest = stats.logprob[..., :-1], stats.logprob[..., -1]
    if targets.first is not None:
        logprob_K = logprob_K.gather(-1, targets.first)
    assert targets.valid is not None
    return stats._replace(logprob=torch.where(targets.valid, logprob_K, 0.0), rest=rest)
