"""`token_logprobs`: the one entrance."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import check
from .asked import Asked, Wanted
from .backend import backend_of
from .from_hidden import LogprobsFromHidden
from .from_kept import KeptFromHidden, KeptFromLogits
from .from_logits import LogprobsFromLogits
from .parts import Parts
from .rows import Order, kept_places
from .sampling import Sampling
from .sequence import SequenceParallel

#: Blocks that stay in a core's cache; on a GPU, blocks that fill it.
_WORKSPACE_BYTES = {"cpu": 1 << 20}
_WORKSPACE_BYTES_ELSEWHERE = 64 << 20
#: Of logits that are made a part at a time: matrices that are multiplied at full speed.
_LOGITS_BYTES = {"cpu": 8 << 20}
_LOGITS_BYTES_ELSEWHERE = 256 << 20
#: By rows, where the weight's gradient in float32 is read and written once for each part.
_LOGITS_BYTES_OF_ROWS = 512 << 20


class TokenStats(NamedTuple):
    """The statistics of each token, in the targets' shape, float32 (float64 for such logits).

    Zero for tokens that are masked or ignored.
    """

    logprob: Tensor
    """Natural logarithm of softmax(logits / temperature) at the target."""
    entropy: Tensor | None
    """The entropy of that softmax, in nats; None unless asked for."""
    lse: Tensor
    """log Σ exp(logits / temperature); not differentiable."""


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
    rank. The backward makes none from logits, and from hidden states the one that adds up their
    gradients: an all-reduce in float32, or under sequence parallelism a reduce-scatter, with an
    all-gather of the hidden states in the forward.

    Args:
        logits: [..., V / tp], of float32, bfloat16, float16 or float64: this rank's columns. Rank r
            of the group has those from r · V / tp on, as Megatron's output layer does.
        hidden: [..., H] in place of logits, what the output layer is given.
        weight: [V / tp, H] of the same type: this rank's rows of the output layer.
        targets: [...] of int64, ids in the whole vocabulary: the token whose probability is meant,
            so already shifted.
        tp_group: the ranks that share the vocabulary; None where it is whole.
        vocab_size: tokens in it, where Megatron has padded the columns; padding takes no part.
        temperature: what logits are divided by, or one for each token [...].
        entropy: "metric" computes it, "grad" differentiates it as well.
        token_mask: [...] of bool; False for tokens that are not computed.
        ignore_index: a target of that is not computed either.
        sampling: which tokens there were to choose from; log-prob, entropy and lse are over those.
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
            to do so on GPUs of compute capability 8.0 on, False for PyTorch. float64 is computed
            by PyTorch. Where it is None the environment's MEGATRON_IDEMPOTENT_TRITON says 1 or 0.
        workspace_bytes: scratch memory; None for what suits the device.

    Raises:
        ValueError: shapes or types that do not fit, a target outside of the vocabulary, a
            temperature that is not positive, fewer columns than tokens, leaf logits to consume, or
            no `main_grad` to add to, or Triton asked for where its kernels cannot run.

    Example:
        stats = token_logprobs(logits=logits, targets=labels, entropy="metric")
        loss = -(stats.logprob * mask).sum()
    """
    check.one_of("entropy", entropy, ("none", "metric", "grad"))
    check.one_of("ownership", ownership, ("borrow", "consume"))
    check.one_of("hidden_layout", hidden_layout, ("replicated", "sequence_parallel"))
    check.one_form(logits, hidden, weight, ownership, hidden_layout)
    if workspace_bytes is not None and workspace_bytes < 1:
        raise ValueError(f"token_logprobs() got workspace_bytes={workspace_bytes}: at least 1")
    if logits is not None:
        rows, per_rank = logits, logits.shape[-1]
    else:
        assert hidden is not None
        assert weight is not None
        rows, per_rank = hidden, weight.shape[0]
    columns = check.columns_of(per_rank, tp_group, vocab_size)
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    gathered = size > 1 and hidden_layout == "sequence_parallel"
    shape = list(rows.shape[:-1])
    if gathered:
        shape[0] *= size
    tokens = check.tokens_to_compute(
        torch.Size(shape), targets, token_mask, ignore_index, columns.vocabulary
    )
    check.positive(temperature, targets, tokens)
    if gradient_accumulation_fusion:
        check.main_grad(weight)
    keep = check.ids_to_keep(sampling, targets, tokens, columns.vocabulary)

    if gathered:
        rows = SequenceParallel.apply(rows, tp_group)  # type: ignore[no-untyped-call]
    order = Order(rows)

    def chosen(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = order.flat(value)
        return value if place_K is None else value.index_select(0, place_K)

    kept_N = None if tokens.kept is None else order.flat(tokens.kept)
    place_K = None if kept_N is None else kept_places(kept_N, tokens.computed)
    device = rows.device.type
    in_cache = _WORKSPACE_BYTES.get(device, _WORKSPACE_BYTES_ELSEWHERE)
    wanted = Wanted(
        entropy=entropy != "none",
        entropy_gradient=entropy == "grad",
        consume=ownership == "consume" and _may_consume(rows, order),
        backend=backend_of(rows.device, rows.dtype, compiled=compiled, triton=triton),
        workspace_bytes=workspace_bytes or in_cache,
    )
    asked = Asked(chosen(targets), chosen(temperature), columns, wanted)
    cut = sampling is not None and sampling.cuts(columns.vocabulary)
    if cut:
        asked = asked._replace(sampling=sampling, keep=chosen(keep))
    if logits is not None:
        from_logits: Any = KeptFromLogits if cut else LogprobsFromLogits
        found = from_logits.apply(rows, kept_N, asked)
    else:
        parts = Parts(
            workspace_bytes or _LOGITS_BYTES.get(device, _LOGITS_BYTES_ELSEWHERE),
            reduce=size > 1 and not gathered,
            fused=gradient_accumulation_fusion,
        )
        if wanted.backend == "triton" and device != "cpu":
            parts = parts._replace(logits_bytes=workspace_bytes or _LOGITS_BYTES_OF_ROWS)
        fitting = wanted._replace(workspace_bytes=min(wanted.workspace_bytes, in_cache))
        from_hidden: Any = KeptFromHidden if cut else LogprobsFromHidden
        found = from_hidden.apply(chosen(rows), weight, asked._replace(wanted=fitting), parts)

    def shaped(values_N: Tensor | None) -> Any:
        if values_N is None:
            return None
        if kept_N is not None:
            values_N = values_N.new_zeros(kept_N.shape).masked_scatter(kept_N, values_N)
        return order.unflat(values_N)

    return TokenStats(*map(shaped, found))


def _may_consume(logits: Tensor, order: Order) -> bool:
    if not logits.requires_grad or not torch.is_grad_enabled():
        return False
    if logits.is_leaf:
        raise ValueError(
            "token_logprobs(ownership='consume') got leaf logits, which the caller would find "
            "overwritten: pass an output of the model, or borrow"
        )
    if not order.rows(logits).is_contiguous():
        warnings.warn(
            f"token_logprobs(ownership='consume') borrows: logits of shape {tuple(logits.shape)} "
            f"and strides {logits.stride()} lie in memory with gaps",
            stacklevel=3,
        )
        return False
    return True
