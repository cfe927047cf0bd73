"""`token_logprobs`: the one entrance."""

from __future__ import annotations

import warnings
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .from_logits import Columns, LogprobsFromLogits, Wanted
from .rows import Order

#: Blocks that stay in a core's cache; on a GPU, blocks that fill it.
_WORKSPACE_BYTES = {"cpu": 4 << 20}
_WORKSPACE_BYTES_ELSEWHERE = 64 << 20


class TokenStats(NamedTuple):
    """What is known of each token, in the shape of the targets, float32 (float64 of such logits).

    Zero for tokens that are masked or ignored.
    """

    logprob: Tensor
    """Natural logarithm of softmax(logits / temperature) at the target."""
    entropy: Tensor | None
    """Of that softmax, in nats; None unless asked for."""
    lse: Tensor
    """log Σ exp(logits / temperature); not differentiable."""


def token_logprobs(
    *,
    logits: Tensor,
    targets: Tensor,
    tp_group: Any = None,
    vocab_size: int | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Literal["none", "metric", "grad"] = "none",
    token_mask: Tensor | None = None,
    ignore_index: int = -100,
    ownership: Literal["borrow", "consume"] = "borrow",
    workspace_bytes: int | None = None,
) -> TokenStats:
    """Log-probs of the targets, and entropies, over a vocabulary that ranks may share.

    Reads the logits once; the backward reads them again and writes the gradient. Besides that
    gradient it takes O(tokens) memory and the workspace. With a `tp_group` of several ranks the
    forward makes one all-gather, of 16 bytes per token and rank, in which all its ranks take part,
    with the same targets, mask and temperature; they find the same bits. The backward makes none.

    Args:
        logits: [..., V / tp], of float32, bfloat16, float16 or float64: this rank's columns. Rank r
            of the group has those from r · V / tp on, as Megatron's output layer does.
        targets: [...] of int64, ids in the whole vocabulary: the token whose probability is meant,
            so already shifted.
        tp_group: the ranks that share the vocabulary; None where it is whole.
        vocab_size: tokens in it, where Megatron has padded the columns; padding takes no part.
        temperature: what logits are divided by, or one for each token [...].
        entropy: "metric" computes it, "grad" differentiates it as well.
        token_mask: [...] of bool; False for tokens that are not computed.
        ignore_index: a target of that is not computed either.
        ownership: "consume" lets the backward write the gradient into the logits' memory, which
            then takes none of its own. What else has saved the logits for its backward raises if
            that comes later. Logits that lie in memory with gaps are borrowed all the same, with a
            warning.
        workspace_bytes: scratch memory; None for what suits the device.

    Raises:
        ValueError: shapes or types that do not fit, a target outside of the vocabulary, a
            temperature that is not positive, fewer columns than tokens, or leaf logits to consume.

    Example:
        stats = token_logprobs(logits=logits, targets=labels, entropy="metric")
        loss = -(stats.logprob * mask).sum()
    """
    kept = _check_tensors(logits, targets, token_mask, ignore_index)
    columns = _columns(logits, tp_group, vocab_size)
    _check_targets(targets, kept, columns, vocab_size)
    _check_temperature(temperature, targets, kept)
    for name, value, known in (
        ("entropy", entropy, ("none", "metric", "grad")),
        ("ownership", ownership, ("borrow", "consume")),
    ):
        if value not in known:
            raise ValueError(f"token_logprobs() got {name}={value!r}: one of {', '.join(known)}")
    if workspace_bytes is not None and workspace_bytes < 1:
        raise ValueError(f"token_logprobs() got workspace_bytes={workspace_bytes}: at least 1")
    order = Order(logits)
    kept_N = None if kept is None else order.flat(kept)
    flat = [
        order.flat(each) if isinstance(each, Tensor) else each for each in (targets, temperature)
    ]
    if kept_N is not None:
        flat = [each[kept_N] if isinstance(each, Tensor) else each for each in flat]
    wanted = Wanted(
        entropy=entropy != "none",
        entropy_gradient=entropy == "grad",
        consume=ownership == "consume" and _may_consume(logits, order),
        workspace_bytes=workspace_bytes
        or _WORKSPACE_BYTES.get(logits.device.type, _WORKSPACE_BYTES_ELSEWHERE),
    )
    found: Any = LogprobsFromLogits.apply(  # type: ignore[no-untyped-call]
        logits, flat[0], kept_N, flat[1], columns, wanted
    )

    def shaped(values_N: Tensor | None) -> Any:
        if values_N is None:
            return None
        if kept_N is not None:
            everywhere_N = values_N.new_zeros(kept_N.shape)
            values_N = everywhere_N.masked_scatter(kept_N, values_N)
        return order.unflat(values_N)

    return TokenStats(*map(shaped, found))


def _check_tensors(
    logits: Tensor, targets: Tensor, token_mask: Tensor | None, ignore_index: int
) -> Tensor | None:
    """Which tokens are computed; None for all."""
    if not logits.is_floating_point() or logits.dim() < 1:
        raise ValueError(
            f"token_logprobs() got logits of {logits.dtype} and shape {tuple(logits.shape)}: "
            "floating point, [..., columns]"
        )
    if targets.dtype != torch.int64 or targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"token_logprobs() got targets of {targets.dtype} and shape {tuple(targets.shape)} for "
            f"logits of shape {tuple(logits.shape)}: torch.int64, {tuple(logits.shape[:-1])}"
        )
    kept = targets != ignore_index
    if token_mask is not None:
        if token_mask.dtype != torch.bool or token_mask.shape != targets.shape:
            raise ValueError(
                f"token_logprobs() got token_mask of {token_mask.dtype} and shape "
                f"{tuple(token_mask.shape)}: torch.bool, {tuple(targets.shape)}"
            )
        kept &= token_mask
    return None if kept.all() else kept


def _columns(logits: Tensor, group: Any, vocab_size: int | None) -> Columns:
    per_rank = logits.shape[-1]
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
    real = min(per_rank, max(0, vocab_size - first))
    return Columns(first=first, real=real, per_rank=per_rank, group=group)


def _check_targets(
    targets: Tensor, kept: Tensor | None, columns: Columns, vocab_size: int | None
) -> None:
    chosen = targets if kept is None else targets[kept]
    size = dist.get_world_size(columns.group) if columns.group is not None else 1
    end = columns.per_rank * size if vocab_size is None else vocab_size
    if chosen.numel():
        low, high = (int(each) for each in chosen.aminmax())
        if low < 0 or high >= end:
            raise ValueError(
                f"token_logprobs() got target {low if low < 0 else high}, outside of the "
                f"vocabulary of {end}: mask such tokens, or set them to ignore_index"
            )


def _check_temperature(temperature: float | Tensor, targets: Tensor, kept: Tensor | None) -> None:
    if isinstance(temperature, Tensor):
        if temperature.shape != targets.shape:
            raise ValueError(
                f"token_logprobs() got temperature of shape {tuple(temperature.shape)}: a number, "
                f"or {tuple(targets.shape)}"
            )
        lowest = temperature if kept is None else temperature[kept]
        value = float(lowest.min()) if lowest.numel() else 1.0
    else:
        value = float(temperature)
    if not 0 < value < float("inf"):
        raise ValueError(f"token_logprobs() got temperature {value}: it is positive")


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
