"""Refuses wrong arguments before anything is computed or sent, and turns right ones into records.

Legend: N tokens that are computed, K targets of a token, V columns of the vocabulary on this rank,
H features.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .sources import Order, ProductParts, SequenceParallel, kept_places
from .statistics import ID_DTYPES, Backend, Columns
from .truncated_vocab import Sampling


def one_of(who: str, name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise `ValueError` unless an option has one of its known values."""
    if value not in known:
        raise ValueError(f"{who}() got {name}={value!r}: pass one of {', '.join(known)}")


def floating(who: str, name: str, tensor: Tensor) -> None:
    """Raise `ValueError` unless the tensor has rows of floating point numbers."""
    if not tensor.is_floating_point() or tensor.dim() < 1:
        raise ValueError(
            f"{who}() got {name} of {tensor.dtype} and shape {tuple(tensor.shape)}: "
            "pass floating point numbers, [..., columns]"
        )


def one_form(
    who: str, logits: Any, hidden: Any, weight: Any, ownership: str, hidden_layout: str
) -> None:
    """Raise `ValueError` unless there are logits, or hidden states and a weight that fit.

    `ownership` and `hidden_layout` must go with what is given.
    """
    given = [
        n for n, v in (("logits", logits), ("hidden", hidden), ("weight", weight)) if v is not None
    ]
    if given not in (["logits"], ["hidden", "weight"]):
        raise ValueError(
            f"{who}() got {', '.join(given) or 'neither'}: pass logits, or hidden and weight"
        )
    if logits is not None:
        floating(who, "logits", logits)
        if hidden_layout != "replicated":
            raise ValueError(
                f"{who}() got logits and hidden_layout={hidden_layout!r}, which is for hidden: "
                "leave it out"
            )
        return
    floating(who, "hidden", hidden)
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"{who}() got hidden of {hidden.dtype} and shape {tuple(hidden.shape)} with "
            f"weight of {weight.dtype} and shape {tuple(weight.shape)}: [..., H] and [columns, H] "
            "of one type"
        )
    if ownership == "consume":
        raise ValueError(
            f"{who}() got hidden and ownership='consume', but no logits are kept that it could "
            "consume: leave it out"
        )


class Tokens(NamedTuple):
    """Says which tokens a call computes."""

    kept: Tensor | None
    """A bool mask of the tokens that are computed, [...]; None for all."""
    computed: int
    """The number of tokens that are computed."""

    def others(self, per_token: Tensor, value: float) -> Tensor:
        """Return a copy of `per_token` with `value` at the tokens that are left out."""
        return per_token if self.kept is None else torch.where(self.kept, per_token, value)


def mask_of(who: str, token_mask: Tensor | None, shape: torch.Size) -> None:
    """Raise `ValueError` unless the mask has a bool for each token, [...], or is None."""
    if token_mask is not None and (token_mask.dtype != torch.bool or token_mask.shape != shape):
        raise ValueError(
            f"{who}() got token_mask of {token_mask.dtype} and shape "
            f"{tuple(token_mask.shape)}: torch.bool, {tuple(shape)}"
        )


def masked_tokens(who: str, shape: torch.Size, token_mask: Tensor | None) -> Tokens:
    """Return the tokens that are not masked, for a call without targets.

    The host reads their number from the device, once.
    """
    mask_of(who, token_mask, shape)
    count = shape.numel() if token_mask is None else int(token_mask.sum())
    return Tokens(None if count == shape.numel() else token_mask, count)


class Targets(NamedTuple):
    """Holds targets as they are computed: ids in the whole vocabulary."""

    ids: Tensor
    """[...] of int64. Or [..., K], with -1 for targets that are ignored, masked or repeated."""
    valid: Tensor | None = None
    """[..., K] of bool, False for targets that are ignored or masked; None for one per token."""
    first: Tensor | None = None
    """[..., K], the place in `ids` where each target is named first; None if none is repeated."""

    @property
    def many(self) -> bool:
        """True for K targets of each token, False for one."""
        return self.valid is not None


def tokens_to_compute(
    who: str,
    shape: torch.Size,
    targets: Tensor,
    token_mask: Tensor | None,
    ignore_index: int,
    vocabulary: int,
) -> tuple[Tokens, Targets]:
    """Check the targets, and return the tokens that are neither masked nor ignored with theirs.

    The host reads from the device once for the whole call, because each reading waits for all that
    is queued there.

    Raises:
        ValueError: targets of another type or shape, or outside of the vocabulary.
    """
    many = targets.shape[:-1] == shape and targets.dim() == len(shape) + 1
    if targets.dtype not in ID_DTYPES or not (targets.shape == shape or many):
        raise ValueError(
            f"{who}() got targets of {targets.dtype} and shape {tuple(targets.shape)} "
            f"for rows of shape {tuple(shape)}: torch.int64 or int32, {tuple(shape)}, or "
            f"{(*shape, 'K')} for K of each token"
        )
    if many and not targets.shape[-1]:
        raise ValueError(
            f"{who}() got targets of shape {tuple(targets.shape)}: pass at least one each"
        )
    targets = targets.long()
    mask_of(who, token_mask, shape)
    valid = targets != ignore_index
    kept = valid.any(-1) if many else valid
    if token_mask is not None:
        kept = kept & token_mask
    if many:
        valid = valid & kept[..., None]
    ids = torch.where(valid, targets, -1) if many else targets
    found = Targets(ids, valid) if many else Targets(ids)
    if not kept.numel():
        return Tokens(None, 0), found
    checked = torch.where(valid if many else kept, targets, 0)
    facts = [kept.sum(), *checked.aminmax()]
    if many:
        sorted_K, order_K = ids.sort(stable=True, dim=-1)
        again_K = (sorted_K[..., 1:] == sorted_K[..., :-1]) & (sorted_K[..., 1:] >= 0)
        facts.append(again_K.sum())
    count, low, high, *repeated = torch.stack(facts).tolist()
    if low < 0 or high >= vocabulary:
        raise ValueError(
            f"{who}() got target {low if low < 0 else high}, outside of the "
            f"vocabulary of {vocabulary}: mask such tokens, or set them to ignore_index"
        )
    if repeated and repeated[0]:
        found = _each_once(found, order_K, again_K)
    return Tokens(None if count == kept.numel() else kept, count), found


def _each_once(targets: Targets, order_K: Tensor, again_K: Tensor) -> Targets:
    """Replace repeated ids by -1, and note the place where each id is named first."""
    place_K = torch.arange(order_K.shape[-1], device=order_K.device).expand_as(order_K).clone()
    place_K[..., 1:] = torch.where(again_K, 0, place_K[..., 1:])
    # Of a run of equal ids the first one's place, since places ascend.
    start_K = place_K.cummax(-1).values
    first_K = torch.empty_like(order_K).scatter_(-1, order_K, order_K.gather(-1, start_K))
    everyone_K = torch.arange(order_K.shape[-1], device=order_K.device)
    ids = torch.where(first_K == everyone_K, targets.ids, -1)
    return targets._replace(ids=ids, first=first_K)


def positive(who: str, temperature: float | Tensor, shape: torch.Size, tokens: Tokens) -> None:
    """Raise `ValueError` unless the temperature of all computed tokens is positive and finite."""
    if isinstance(temperature, Tensor):
        if temperature.shape != shape:
            raise ValueError(
                f"{who}() got temperature of shape {tuple(temperature.shape)}: a number, "
                f"or {tuple(shape)}"
            )
        if temperature.requires_grad:
            raise ValueError(f"{who}() does not differentiate by temperature: detach() it")
        value = float(tokens.others(temperature, 1.0).min()) if tokens.computed else 1.0
    else:
        value = float(temperature)
    if not 0 < value < float("inf"):
        raise ValueError(f"{who}() got temperature {value}: pass a positive, finite number")


def ids_to_keep(
    who: str, sampling: Sampling | None, shape: torch.Size, tokens: Tokens, vocabulary: int
) -> Tensor | None:
    """Return the ids that a sampler kept for each token, [..., K]; None if it names none.

    Raises:
        ValueError: ids of another shape or outside of the vocabulary, or a token without any.
    """
    if sampling is None or sampling.keep is None:
        return None
    keep = sampling.keep.long()
    if keep.shape[:-1] != shape:
        raise ValueError(
            f"{who}() got sampling.keep of shape {tuple(keep.shape)} for targets of shape "
            f"{tuple(shape)}: {(*shape, 'ids')}"
        )
    if not tokens.computed:
        return keep
    highest = keep.amax(-1) if keep.shape[-1] else keep.new_full(keep.shape[:-1], -1)
    low, high = torch.stack(tokens.others(highest, 0).aminmax()).tolist()
    if high >= vocabulary:
        raise ValueError(
            f"{who}() got id {high} in sampling.keep, outside of the vocabulary of {vocabulary}: "
            "set entries that are no ids to -1"
        )
    if sampling.target != "keep" and low < 0:
        raise ValueError(
            f"{who}() got a token for which sampling.keep names no id: mask it, or let "
            "its target be kept, with target='keep'"
        )
    return keep


#: Blocks that stay in a core's cache; on a GPU, blocks that fill it.
_WORKSPACE_BYTES = {"cpu": 1 << 20}
_WORKSPACE_BYTES_ELSEWHERE = 64 << 20
#: Logits are made from hidden states in parts of this size, whose products run at full speed.
_LOGITS_BYTES = {"cpu": 8 << 20}
_LOGITS_BYTES_ELSEWHERE = 256 << 20
#: Parts of rows are larger: each reads and writes the weight's whole gradient in float32.
_LOGITS_BYTES_OF_ROWS = 512 << 20


class Inputs(NamedTuple):
    """Holds a call's checked logits, or hidden states and weight, and the columns they are of."""

    who: str
    """The function that was called, as errors name it."""
    logits: Tensor | None
    hidden: Tensor | None
    weight: Tensor | None
    columns: Columns
    gathered: bool
    """True if each rank has a piece of the hidden states, and `rows()` gathers them."""
    shape: torch.Size
    """The shape of the tokens, [...], with those of all pieces."""
    consume: bool
    """True if the gradient is to take the logits' memory."""
    fused: bool
    """True if the weight's gradient is to be added to its `main_grad`."""
    workspace_bytes: int | None
    """The caller's bytes of scratch memory; None for what suits the device."""

    @staticmethod
    def accepted(
        who: str,
        *,
        logits: Tensor | None,
        hidden: Tensor | None,
        weight: Tensor | None,
        tp_group: Any,
        vocab_size: int | None,
        ownership: str = "borrow",
        hidden_layout: str = "replicated",
        fused: bool = False,
        workspace_bytes: int | None = None,
    ) -> Inputs:
        """Return the inputs of a call if they fit each other; raise `ValueError` if not."""
        one_of(who, "ownership", ownership, ("borrow", "consume"))
        one_of(who, "hidden_layout", hidden_layout, ("replicated", "sequence_parallel"))
        one_form(who, logits, hidden, weight, ownership, hidden_layout)
        if workspace_bytes is not None and workspace_bytes < 1:
            raise ValueError(f"{who}() got workspace_bytes={workspace_bytes}: pass at least 1")
        main_grad = getattr(weight, "main_grad", None)
        if fused and (weight is None or getattr(main_grad, "shape", None) != weight.shape):
            where = "no weight" if weight is None else f"a weight of shape {tuple(weight.shape)}"
            has = "none" if main_grad is None else f"one of shape {tuple(main_grad.shape)}"
            raise ValueError(
                f"{who}(gradient_accumulation_fusion=True) adds to weight.main_grad, and got "
                f"{where} with {has}: pass the parameter that Megatron's DistributedDataParallel "
                "has"
            )
        if logits is not None:
            rows, per_rank = logits, logits.shape[-1]
        else:
            assert hidden is not None
            assert weight is not None
            rows, per_rank = hidden, weight.shape[0]
        alone = tp_group is None
        rank, size = (0, 1) if alone else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
        whole = per_rank * size
        vocabulary = whole if vocab_size is None else vocab_size
        if not 1 <= vocabulary <= whole:
            raise ValueError(
                f"{who}() got vocab_size={vocabulary}, and {size} ranks with {per_rank} columns "
                f"each have {whole}: is tp_group the one that shares the output layer?"
            )
        columns = Columns(rank * per_rank, 0, per_rank, vocabulary, tp_group, size)
        columns = columns._replace(real=columns.real_of(rank))
        gathered = columns.ranks > 1 and hidden_layout == "sequence_parallel"
        shape = list(rows.shape[:-1])
        if gathered:
            shape[0] *= columns.ranks
        how = ownership == "consume", fused, workspace_bytes
        return Inputs(who, logits, hidden, weight, columns, gathered, torch.Size(shape), *how)

    @property
    def given(self) -> Tensor:
        """The logits, or the hidden states as they were given."""
        given = self.hidden if self.logits is None else self.logits
        assert given is not None
        return given

    def rows(self) -> Tensor:
        """Return the logits [..., V] or the hidden states [..., H] of all tokens.

        Under sequence parallelism the group's ranks take part in one all-gather.
        """
        if not self.gathered:
            return self.given
        gather: Any = SequenceParallel.apply
        gathered: Tensor = gather(self.given, self.columns.group)
        return gathered

    def workspace(self) -> int:
        """Return the bytes of scratch memory for blocks of logits.

        For logits that are made from hidden states it is no more than what suits the device.
        """
        asked = self.workspace_bytes
        in_cache = _WORKSPACE_BYTES.get(self.given.device.type, _WORKSPACE_BYTES_ELSEWHERE)
        if asked is None:
            return in_cache
        return asked if self.logits is not None else min(asked, in_cache)

    def logits_bytes(self) -> int:
        """Return the bytes of logits that are made at a time."""
        usual = _LOGITS_BYTES.get(self.given.device.type, _LOGITS_BYTES_ELSEWHERE)
        return self.workspace_bytes or usual

    def parts(self, backend: Backend = "eager") -> ProductParts:
        """Return how large the parts are in which logits are made from hidden states."""
        by_rows = backend == "triton" and self.given.device.type != "cpu"
        return ProductParts(
            self.workspace_bytes or (_LOGITS_BYTES_OF_ROWS if by_rows else self.logits_bytes()),
            reduce=self.columns.ranks > 1 and not self.gathered,
            fused=self.fused,
        )

    def consumes(self, order: Order) -> bool:
        """Return whether the gradient takes the logits' memory; warn if it could but for gaps.

        Raises:
            ValueError: the logits are a leaf, which its owner would find overwritten.
        """
        logits = self.logits
        if logits is None or not self.consume:
            return False
        if not logits.requires_grad or not torch.is_grad_enabled():
            return False
        if logits.is_leaf:
            raise ValueError(
                f"{self.who}(ownership='consume') got leaf logits, which the caller would find "
                "overwritten: pass an output of the model, or borrow"
            )
        if not order.rows(logits).is_contiguous():
            warnings.warn(
                f"{self.who}(ownership='consume') borrows: logits of shape {tuple(logits.shape)} "
                f"and strides {logits.stride()} lie in memory with gaps: pass contiguous ones to "
                "save the gradient's memory",
                stacklevel=3,
            )
            return False
        return True


class ResultLayout:
    """Puts values of each token into the order in which the rows lie in memory, and back.

    `chosen` does the former, and leaves out tokens that are not computed; `shaped` does the latter.
    """

    def __init__(self, rows: Tensor, tokens: Tokens) -> None:
        self.order = Order(rows)
        self.kept_N = None if tokens.kept is None else self.order.flat(tokens.kept)
        self._place_K = None if self.kept_N is None else kept_places(self.kept_N, tokens.computed)

    def chosen(self, value: Any) -> Any:
        """Return a tensor [...] as [N], or [..., K] as [N, K]; any other value as it is."""
        if not isinstance(value, Tensor):
            return value
        value = self.order.flat(value)
        return value if self._place_K is None else value.index_select(0, self._place_K)

    def shaped(self, values_N: Tensor | None, fill: float = 0.0) -> Any:
        """Return [N] as [...], or [N, K] as [..., K]; `fill` stands for tokens not computed."""
        if values_N is None:
            return None
        if self.kept_N is not None:
            behind = values_N.shape[1:]
            mask = self.kept_N.view(-1, *(1 for _ in behind))
            whole = values_N.new_full((len(self.kept_N), *behind), fill)
            values_N = whole.masked_scatter(mask, values_N)
        return self.order.unflat(values_N)
