"""`token_logprobs` computes log-probs of targets, and entropies, from logits or hidden states."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .arguments import Call
from .autograd import Logprobs
from .errors import dense
from .truncated_vocab import Sampling, columns_above_boundary, columns_of_ids


class TokenStats(NamedTuple):
    """Holds log-prob, entropy and log-sum-exp of each token, in float32, or in float64 for float64
    logits. Entropy and log-sum-exp have the shape of the logits or hidden states without their last
    dimension.

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
    """Compute log-probs of the targets, and entropies, from logits or from hidden states. The
    vocabulary may be split over the ranks of a tensor-parallel group.

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
    # `Call` also takes None as targets, for `vocab_topk`.
    dense("token_logprobs", "targets", targets)
    # `Call` has a field for each argument of this function.
    call = Call(caller="token_logprobs", **locals())
    inputs = call.inputs()
    batch = call.batch(call.ordered(call.ids))
    sampler: Any = None
    if sampling is not None and sampling.cuts(call.columns.vocabulary):
        sampler = functools.partial(columns_above_boundary, sampling=sampling)
        if call.keep is not None:
            keep_NK = call.ordered(call.keep)
            sampler = functools.partial(columns_of_ids, sampling=sampling, keep_NK=keep_NK)
    compute: Any = Logprobs.apply
    outputs = compute(batch, call.source_of(in_cache=True), sampler, *inputs)
    stats = TokenStats(*map(call.shaped, outputs))
    if call.valid is None:
        return stats
    # The last log-prob is that of all other tokens. A repeated id gets its first occurrence's.
    logprob_K, logprob_rest = stats.logprob[..., :-1], stats.logprob[..., -1]
    if call.first is not None:
        logprob_K = logprob_K.gather(-1, call.first)
    return stats._replace(logprob=torch.where(call.valid, logprob_K, 0.0), rest=logprob_rest)
