"""`token_logprobs`: the one entrance, which refuses wrong arguments before it computes or sends."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .autograd import KeptFromHidden, KeptFromLogits, LogprobsFromHidden, LogprobsFromLogits
from .request import Columns, ComputeOptions, Sampling, TokenBatch, backend_of
from .rows import Order, kept_places
from .sources import ProductParts, SequenceParallel


def one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    """An option has a value that it can have."""
    if value not in known:
        raise ValueError(f"token_logprobs() got {name}={value!r}: one of {', '.join(known)}")


def floating(name: str, tensor: Tensor) -> None:
    """The tensor has rows of floating point numbers."""
    if not tensor.is_floating_point() or tensor.dim() < 1:
        raise ValueError(
            f"token_logprobs() got {name} of {tensor.dtype} and shape {tuple(tensor.shape)}: "
            "floating point, [..., columns]"
        )


def one_form(logits: Any, hidden: Any, weight: Any, ownership: str, hidden_layout: str) -> None:
    """Logits, or hidden states and a weight that fit each other, and options that go with them."""
    given = [
        n for n, v in (("logits", logits), ("hidden", hidden), ("weight", weight)) if v is not None
    ]
    if given not in (["logits"], ["hidden", "weight"]):
        raise ValueError(
            f"token_logprobs() got {', '.join(given) or 'neither'}: logits, or hidden and weight"
        )
    if logits is not None:
        floating("logits", logits)
        if hidden_layout != "replicated":
            raise ValueError(f"token_logprobs() got logits and hidden_layout={hidden_layout!r}")
        return
    floating("hidden", hidden)
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"token_logprobs() got hidden of {hidden.dtype} and shape {tuple(hidden.shape)} with "
            f"weight of {weight.dtype} and shape {tuple(weight.shape)}: [..., H] and [columns, H] "
            "of one type"
        )
    if ownership == "consume":
        raise ValueError("token_logprobs() got hidden and ownership='consume': no logits are kept")


class Tokens(NamedTuple):
    """The tokens that a call computes."""

    kept: Tensor | None
    """A mask, [...]; None for all."""
    computed: int

    def others(self, per_token: Tensor, value: float) -> Tensor:
        """Returns a copy of `per_token` with `value` at the tokens that are left out."""
        return per_token if self.kept is None else torch.where(self.kept, per_token, value)


def tokens_to_compute(
    shape: torch.Size,
    targets: Tensor,
    token_mask: Tensor | None,
    ignore_index: int,
    vocabulary: int,
) -> Tokens:
    """The tokens that are neither masked nor ignored, once their targets are ids.

    The host reads once from the device, for the whole call: each time it would wait for all that
    was queued there.
    """
    if targets.dtype != torch.int64 or targets.shape != shape:
        raise ValueError(
            f"token_logprobs() got targets of {targets.dtype} and shape {tuple(targets.shape)} "
            f"for rows of shape {tuple(shape)}: torch.int64, {tuple(shape)}"
        )
    kept = targets != ignore_index
    if token_mask is not None:
        if token_mask.dtype != torch.bool or token_mask.shape != targets.shape:
            raise ValueError(
                f"token_logprobs() got token_mask of {token_mask.dtype} and shape "
                f"{tuple(token_mask.shape)}: torch.bool, {tuple(targets.shape)}"
            )
        kept &= token_mask
    if not kept.numel():
        return Tokens(None, 0)
    facts = torch.stack([kept.sum(), *torch.where(kept, targets, 0).aminmax()])
    count, low, high = facts.tolist()
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"token_logprobs() got target {low if low < 0 else high}, outside of the "
            f"vocabulary of {vocabulary}: mask such tokens, or set them to ignore_index"
        )
    return Tokens(None if count == kept.numel() else kept, count)


def columns_of(per_rank: int, group: Any, vocab_size: int | None) -> Columns:
    """Returns the part of the vocabulary that this rank has."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    whole = per_rank * size
    if vocab_size is None:
        vocab_size = whole
    if not 1 <= vocab_size <= whole:
        raise ValueError(
            f"token_logprobs() got vocab_size={vocab_size}, and {size} ranks with {per_rank} "
            f"columns each have {whole}: is tp_group the one that shares the output layer?"
        )
    first = rank * per_rank
    columns = Columns(first, 0, per_rank, vocab_size, group, size)
    return columns._replace(real=columns.real_of(rank))


def positive(temperature: float | Tensor, targets: Tensor, tokens: Tokens) -> None:
    """A temperature is, on all tokens that are computed."""
    if isinstance(temperature, Tensor):
        if temperature.shape != targets.shape:
            raise ValueError(
                f"token_logprobs() got temperature of shape {tuple(temperature.shape)}: a number, "
                f"or {tuple(targets.shape)}"
            )
        if temperature.requires_grad:
            raise ValueError("token_logprobs() does not differentiate by temperature: detach() it")
        value = float(tokens.others(temperature, 1.0).min()) if tokens.computed else 1.0
    else:
        value = float(temperature)
    if not 0 < value < float("inf"):
        raise ValueError(f"token_logprobs() got temperature {value}: it is positive")


def main_grad(weight: Tensor | None) -> None:
    """There is one to add to."""
    found = getattr(weight, "main_grad", None)
    if weight is None or not isinstance(found, Tensor) or found.shape != weight.shape:
        where = "no weight" if weight is None else f"a weight of shape {tuple(weight.shape)}"
        has = "none" if found is None else f"one of shape {tuple(found.shape)}"
        raise ValueError(
            "token_logprobs(gradient_accumulation_fusion=True) adds to weight.main_grad, and got "
            f"{where} with {has}: pass the parameter that Megatron's DistributedDataParallel has"
        )


def ids_to_keep(
    sampling: Sampling | None, targets: Tensor, tokens: Tokens, vocabulary: int
) -> Tensor | None:
    """Returns the ids that each token keeps, [..., K]."""
    if sampling is None or sampling.keep is None:
        return None
    keep = sampling.keep
    if keep.shape[:-1] != targets.shape:
        raise ValueError(
            f"token_logprobs() got sampling.keep of shape {tuple(keep.shape)} for targets of shape "
            f"{tuple(targets.shape)}: {(*targets.shape, 'ids')}"
        )
    if not tokens.computed:
        return keep
    highest = keep.amax(-1) if keep.shape[-1] else keep.new_full(keep.shape[:-1], -1)
    low, high = torch.stack(tokens.others(highest, 0).aminmax()).tolist()
    if high >= vocabulary:
        raise ValueError(
            f"token_logprobs() got id {high} in sampling.keep, outside of the "
            f"vocabulary of {vocabulary}"
        )
    if sampling.target != "keep" and low < 0:
        raise ValueError(
            "token_logprobs() got a token of which sampling.keep names no id: mask it, or let "
            "its target be kept, with target='keep'"
        )
    return keep


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
    one_of("entropy", entropy, ("none", "metric", "grad"))
    one_of("ownership", ownership, ("borrow", "consume"))
    one_of("hidden_layout", hidden_layout, ("replicated", "sequence_parallel"))
    one_form(logits, hidden, weight, ownership, hidden_layout)
    if workspace_bytes is not None and workspace_bytes < 1:
        raise ValueError(f"token_logprobs() got workspace_bytes={workspace_bytes}: at least 1")
    if logits is not None:
        rows, per_rank = logits, logits.shape[-1]
    else:
        assert hidden is not None
        assert weight is not None
        rows, per_rank = hidden, weight.shape[0]
    columns = columns_of(per_rank, tp_group, vocab_size)
    size = 1 if tp_group is None else dist.get_world_size(tp_group)
    gathered = size > 1 and hidden_layout == "sequence_parallel"
    shape = list(rows.shape[:-1])
    if gathered:
        shape[0] *= size
    tokens = tokens_to_compute(
        torch.Size(shape), targets, token_mask, ignore_index, columns.vocabulary
    )
    positive(temperature, targets, tokens)
    if gradient_accumulation_fusion:
        main_grad(weight)
    keep = ids_to_keep(sampling, targets, tokens, columns.vocabulary)

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
    wanted = ComputeOptions(
        entropy=entropy != "none",
        entropy_gradient=entropy == "grad",
        consume=ownership == "consume" and _may_consume(rows, order),
        backend=backend_of(rows.device, rows.dtype, compiled=compiled, triton=triton),
        workspace_bytes=workspace_bytes or in_cache,
    )
    asked = TokenBatch(chosen(targets), chosen(temperature), columns, wanted)
    cut = sampling is not None and sampling.cuts(columns.vocabulary)
    if cut:
        asked = asked._replace(sampling=sampling, keep=chosen(keep))
    if logits is not None:
        from_logits: Any = KeptFromLogits if cut else LogprobsFromLogits
        found = from_logits.apply(rows, kept_N, asked)
    else:
        parts = ProductParts(
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
