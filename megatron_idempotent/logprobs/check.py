"""Refuses wrong arguments of `token_logprobs` before anything is computed or sent."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .asked import Columns
from .sampling import Sampling


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
