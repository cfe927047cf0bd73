"""Checks a call's arguments before it computes or communicates, and orders them as in memory.

Legend: N tokens that are computed, K targets of a token, V columns of the vocabulary on this rank,
H features.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_idempotent.kernel_choice import uses_triton

from .autograd import SequenceParallel
from .errors import dense, integer, misfit, number, one_of, typed, within
from .rows import Order, kept_places
from .sources import Logits, Products, Source
from .statistics import ID_DTYPES, Backend, Columns, ComputeOptions, TokenBatch
from .truncated_vocab import Sampling


class _Bytes(NamedTuple):
    """Holds the sizes of blocks of logits, in bytes, with which a device computes at full speed."""

    workspace: int
    """The size of a block that stays in a core's cache or, on a GPU, keeps the device busy."""
    logits: int
    """The size of a part of the logits that is computed from hidden states."""
    logits_rows: int
    """The size of such a part if it consists of whole rows. On a GPU it is larger, because each
    part reads and writes the weight's whole gradient."""


_ON_CPU = _Bytes(workspace=1 << 20, logits=8 << 20, logits_rows=8 << 20)
_ELSEWHERE = _Bytes(workspace=64 << 20, logits=256 << 20, logits_rows=512 << 20)


@dataclasses.dataclass(eq=False, kw_only=True)
class Call:
    """Checks and holds the arguments of a call such as `token_logprobs`, and orders values of each
    token as the rows lie in memory.

    `ordered` puts values of each token into that order, and leaves out tokens that are not
    computed; `shaped` puts results back.

    Arguments are those of `token_logprobs`, and `k` of `vocab_topk`; without `targets` all tokens
    that are not masked are computed.

    Raises:
        ValueError: arguments do not fit each other.

    Example: `Call(caller="vocab_topk", **arguments)`, with a function's arguments by their names.
    """

    caller: str
    """The name of the called function, for errors."""
    logits: Tensor | None
    hidden: Tensor | None
    weight: Tensor | None
    tp_group: Any
    vocab_size: int | None
    temperature: float | Tensor
    token_mask: Tensor | None
    ignore_index: int
    hidden_layout: str
    workspace_bytes: int | None
    targets: Tensor | None = None
    entropy: str = "none"
    sampling: Sampling | None = None
    ownership: str = "borrow"
    gradient_accumulation_fusion: bool = False
    triton: bool | None = False
    k: int = 1
    """The number of tokens that `vocab_topk` finds."""
    computed: Tensor | None = dataclasses.field(init=False, default=None)
    """A bool mask of the tokens that are computed, [...]; None for all."""
    count: int = dataclasses.field(init=False)
    """The number of tokens that are computed."""
    ids: Tensor = dataclasses.field(init=False)
    """Targets, [...] of int64. Or [..., K], with -1 for those ignored, masked or repeated."""
    valid: Tensor | None = dataclasses.field(init=False, default=None)
    """[..., K] of bool, False for targets that are ignored or masked; None for one per token."""
    first: Tensor | None = dataclasses.field(init=False, default=None)
    """[..., K], the index of each target's first occurrence; None if none is repeated."""
    keep: Tensor | None = dataclasses.field(init=False, default=None)
    """The ids that a sampler kept for each token, [..., K]; None if `keep` was not passed."""
    kept_N: Tensor | None = dataclasses.field(init=False, default=None)
    """The mask `computed` in the order of rows in memory; None for all."""

    def __post_init__(self) -> None:
        caller, token_mask, sampling = self.caller, self.token_mask, self.sampling
        one_of(caller, "entropy", self.entropy, ("none", "metric", "grad"))
        one_of(caller, "ownership", self.ownership, ("borrow", "consume"))
        one_of(caller, "hidden_layout", self.hidden_layout, ("replicated", "sequence_parallel"))
        self._accept_form()
        if self.workspace_bytes is not None and self.workspace_bytes < 1:
            raise misfit(caller, f"workspace_bytes={self.workspace_bytes}", "pass at least 1")
        self._accept_main_grad()
        self.columns = self._columns()
        self._sizes = _ON_CPU if self.input.device.type == "cpu" else _ELSEWHERE
        self._in_pieces = self.columns.ranks > 1 and self.hidden_layout == "sequence_parallel"
        shape = list(self.input.shape[:-1])
        if self._in_pieces:
            shape[0] *= self.columns.ranks
        self.shape = torch.Size(shape)
        integer(caller, "ignore_index", self.ignore_index)
        if token_mask is not None:
            dense(caller, "token_mask", token_mask)
            if (token_mask.dtype, token_mask.shape) != (torch.bool, self.shape):
                remedy = f"torch.bool, {tuple(self.shape)}"
                raise misfit(caller, f"token_mask of {typed(token_mask)}", remedy)
        remedy = f"from 1 to {self.columns.vocabulary}, the size of the vocabulary"
        within(caller, "k", self.k, int, (1, self.columns.vocabulary), remedy)
        if self.targets is not None:
            self._accept_targets(self.targets)
        else:
            self.count = self.shape.numel() if token_mask is None else int(token_mask.sum())
            self.computed = None if self.count == self.shape.numel() else token_mask
        self._accept_temperature()
        if not isinstance(sampling, (Sampling, type(None))):
            raise misfit(caller, f"sampling={sampling!r}", "pass a Sampling, or None")
        if sampling is not None and sampling.keep is not None:
            self._accept_keep(sampling)
        # PyTorch computes K targets, on any device.
        triton = self.triton if self.valid is None else False
        self.backend = backend_of(self.input.device, self.input.dtype, triton)
        # Gathered pieces follow each other in memory.
        in_memory = torch.empty(*shape, 1, device="meta") if self._in_pieces else self.input
        self._order = Order(in_memory)
        if self.computed is not None:
            self.kept_N = self._order.flat(self.computed)
            self._position_K = kept_places(self.kept_N, self.count)

    def _accept_form(self) -> None:
        """Check that the caller gave either logits, or hidden states and a weight, of shapes and
        types that fit; store the logits or hidden states as `self.input`.
        """
        weight = self.weight
        forms: dict[str, Any] = {"logits": self.logits, "hidden": self.hidden, "weight": weight}
        names = [name for name, value in forms.items() if value is not None]
        if names not in (["logits"], ["hidden", "weight"]):
            remedy = "pass logits, or hidden and weight"
            raise misfit(self.caller, ", ".join(names) or "neither", remedy)
        for name in names:
            dense(self.caller, name, forms[name])
        self.input: Tensor = forms[names[0]]
        rows = self.input
        if not rows.is_floating_point() or rows.dim() < 1:
            remedy = "pass floating point numbers, [..., columns]"
            raise misfit(self.caller, f"{names[0]} of {typed(rows)}", remedy)
        if weight is None and self.hidden_layout != "replicated":
            argument = f"logits and hidden_layout={self.hidden_layout!r}, which is for hidden"
            raise misfit(self.caller, argument, "leave it out")
        if weight is None:
            return
        if weight.dim() != 2 or rows.shape[-1] != weight.shape[1] or rows.dtype != weight.dtype:
            argument = f"hidden of {typed(rows)} with weight of {typed(weight)}"
            raise misfit(self.caller, argument, "[..., H] and [columns, H] of one type")
        if self.ownership == "consume":
            argument = "hidden and ownership='consume', but no logits are kept that it could"
            raise misfit(self.caller, f"{argument} consume", "leave it out")

    def _accept_main_grad(self) -> None:
        weight, main_grad = self.weight, getattr(self.weight, "main_grad", None)
        fits = weight is not None and getattr(main_grad, "shape", None) == weight.shape
        if fits or not self.gradient_accumulation_fusion:
            return
        parameter = "no weight" if weight is None else f"a weight of shape {tuple(weight.shape)}"
        gradient = "none" if main_grad is None else f"one of shape {tuple(main_grad.shape)}"
        raise ValueError(
            f"{self.caller}(gradient_accumulation_fusion=True) adds to weight.main_grad, and got "
            f"{parameter} with {gradient}: pass the parameter that Megatron's "
            "DistributedDataParallel has"
        )

    def _columns(self) -> Columns:
        per_rank = self.input.shape[-1] if self.weight is None else self.weight.shape[0]
        group, alone = self.tp_group, self.tp_group is None
        rank, size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        total = per_rank * size
        vocabulary = total if self.vocab_size is None else self.vocab_size
        if not 1 <= vocabulary <= total:
            of_ranks = f"{size} ranks with {per_rank} columns each have {total}"
            remedy = "is tp_group the one that shares the output layer?"
            raise misfit(self.caller, f"vocab_size={vocabulary}, and {of_ranks}", remedy)
        columns = Columns(rank * per_rank, 0, per_rank, vocabulary, group, size)
        return columns._replace(real=columns.real_of(rank))

    def _accept_targets(self, targets: Tensor) -> None:
        """Check and store the targets; find the tokens that are neither masked nor ignored.

        The host reads from the device once for the whole call, because each read waits for all
        queued work.
        """
        caller, shape, vocabulary = self.caller, self.shape, self.columns.vocabulary
        dense(caller, "targets", targets)
        many = targets.shape[:-1] == shape and targets.dim() == len(shape) + 1
        if targets.dtype not in ID_DTYPES or not (targets.shape == shape or many):
            argument = f"targets of {typed(targets)} for rows of shape {tuple(shape)}"
            several = f"{(*shape, 'K')} for K of each token"
            raise misfit(caller, argument, f"torch.int64 or int32, {tuple(shape)}, or {several}")
        of_shape = f"targets of shape {tuple(targets.shape)}"
        if many and not targets.shape[-1]:
            raise misfit(caller, of_shape, "pass at least one each")
        for name in ("triton", "sampling"):
            if many and (value := getattr(self, name)):
                argument = f"{of_shape}, several for each token, and {name}={value!r}"
                raise misfit(caller, f"{argument}, which knows one", f"leave {name} out")
        self.ids = targets = targets.long()
        valid = targets != self.ignore_index
        computed = valid.any(-1) if many else valid
        if self.token_mask is not None:
            computed = computed & self.token_mask
        if many:
            self.valid = valid = valid & computed[..., None]
            self.ids = torch.where(valid, targets, -1)
        self.count = 0
        if not computed.numel():
            return
        checked = torch.where(valid if many else computed, targets, 0)
        facts = [computed.sum(), *checked.aminmax()]
        if many:
            sorted_K, order_K = self.ids.sort(stable=True, dim=-1)
            repeated_K = (sorted_K[..., 1:] == sorted_K[..., :-1]) & (sorted_K[..., 1:] >= 0)
            facts.append(repeated_K.sum())
        self.count, low, high, *repeated = torch.stack(facts).tolist()
        if low < 0 or high >= vocabulary:
            target = f"target {low if low < 0 else high}, outside of the vocabulary of {vocabulary}"
            raise misfit(caller, target, "mask such tokens, or set them to ignore_index")
        if repeated and repeated[0]:
            self._leave_repeats_out(order_K, repeated_K)
        self.computed = None if self.count == computed.numel() else computed

    def _accept_temperature(self) -> None:
        temperature, value = self.temperature, 1.0
        number(self.caller, temperature)
        if not isinstance(temperature, Tensor):
            value = float(temperature)
        elif temperature.shape != self.shape:
            argument = f"temperature of shape {tuple(temperature.shape)}"
            raise misfit(self.caller, argument, f"a number, or {tuple(self.shape)}")
        elif temperature.requires_grad:
            raise ValueError(f"{self.caller}() does not differentiate by temperature: detach() it")
        elif self.count:
            value = float(self._filled(temperature, 1.0).min())
        if not 0 < value < float("inf"):
            raise misfit(self.caller, f"temperature {value}", "pass a positive, finite number")

    def _accept_keep(self, sampling: Sampling) -> None:
        assert sampling.keep is not None
        caller, shape, vocabulary = self.caller, self.shape, self.columns.vocabulary
        keep = self.keep = sampling.keep.long()
        if keep.shape[:-1] != shape:
            argument = f"sampling.keep of shape {tuple(keep.shape)} for targets of shape"
            raise misfit(caller, f"{argument} {tuple(shape)}", f"{(*shape, 'ids')}")
        if not self.count:
            return
        highest = keep.amax(-1) if keep.shape[-1] else keep.new_full(keep.shape[:-1], -1)
        low, high = torch.stack(self._filled(highest, 0).aminmax()).tolist()
        if high >= vocabulary:
            argument = f"id {high} in sampling.keep, outside of the vocabulary of {vocabulary}"
            raise misfit(caller, argument, "set entries that are no ids to -1")
        if sampling.target != "keep" and low < 0:
            argument = "a token for which sampling.keep names no id"
            remedy = "mask it, or let its target be kept, with target='keep'"
            raise misfit(caller, argument, remedy)

    def _leave_repeats_out(self, order_K: Tensor, repeated_K: Tensor) -> None:
        """Replace by -1 each id in `self.ids` [..., K] that the same token has at a lower index;
        store in `self.first`, for each entry, the index at which the token first has that id.
        """
        position_K = torch.arange(order_K.shape[-1], device=order_K.device)
        start_K = position_K.expand_as(order_K).clone()
        start_K[..., 1:] = torch.where(repeated_K, 0, start_K[..., 1:])
        # In a run of equal ids the first has the lowest index.
        start_K = order_K.gather(-1, start_K.cummax(-1).values)
        self.first = torch.empty_like(order_K).scatter_(-1, order_K, start_K)
        self.ids = torch.where(self.first == position_K, self.ids, -1)

    def _filled(self, per_token: Tensor, value: float) -> Tensor:
        """Return a copy of `per_token` with `value` at the tokens that are not computed."""
        return per_token if self.computed is None else torch.where(self.computed, per_token, value)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the tensors that `source_of` makes a source from: the logits [..., V], or the
        hidden states [N, H] of the computed tokens and the weight.

        Under sequence parallelism the group's ranks take part in one all-gather.
        """
        rows = self.input
        if self._in_pieces:
            gather: Any = SequenceParallel.apply
            rows = gather(rows, self.columns.group)
        return (rows,) if self.weight is None else (self.ordered(rows), self.weight)

    def batch(self, targets: Tensor) -> TokenBatch:
        """Return the batch of the computed tokens with these targets, [N] or [N, K]."""
        # Blocks of logits from hidden states stay in the cache, whatever the caller allows.
        block_bytes = self._sizes.workspace
        workspace_bytes = self.workspace_bytes or block_bytes
        options = ComputeOptions(
            entropy=self.entropy != "none",
            entropy_gradient=self.entropy == "grad",
            backend=self.backend,
            workspace_bytes=(
                workspace_bytes if self.weight is None else min(workspace_bytes, block_bytes)
            ),
        )
        return TokenBatch(targets, self.ordered(self.temperature), self.columns, options)

    def source_of(self, *, in_cache: bool = False) -> Callable[..., Source]:
        """Return a function that takes the tensors of `inputs`, and returns a source: a `Logits`,
        or the `Products` of hidden states and weight.

        With `in_cache` the parts of given logits stay in the cache. Otherwise they are larger: few
        operations are computed with each.
        """
        sizes = self._sizes
        part_bytes = sizes.logits_rows if self.backend == "triton" else sizes.logits
        if self.weight is None and in_cache:
            part_bytes = sizes.workspace
        logits_bytes = self.workspace_bytes or part_bytes
        common: Any = {"columns": self.columns, "logits_bytes": logits_bytes}
        if self.weight is None:
            consume = self._consumes()
            return functools.partial(Logits, kept_N=self.kept_N, consume=consume, **common)
        summed = self.columns.ranks > 1 and not self._in_pieces
        fused = self.weight if self.gradient_accumulation_fusion else None
        return functools.partial(Products, summed=summed, fused=fused, **common)

    def ordered(self, value: Any) -> Any:
        """Flatten a tensor [...] or [..., K] to [N] or [N, K], with only the computed tokens, in
        the order of rows in memory. Return a value that is not a tensor unchanged.
        """
        if not isinstance(value, Tensor):
            return value
        value = self._order.flat(value)
        return value if self.kept_N is None else value.index_select(0, self._position_K)

    def shaped(self, values_N: Tensor | None, fill: float = 0.0) -> Any:
        """Undo `ordered`: return [N] as [...], or [N, K] as [..., K].
        Tokens that were not computed get `fill`.
        """
        if values_N is None:
            return None
        if self.kept_N is not None:
            behind = values_N.shape[1:]
            mask = self.kept_N.view(-1, *(1 for _ in behind))
            filled = values_N.new_full((len(self.kept_N), *behind), fill)
            values_N = filled.masked_scatter(mask, values_N)
        return self._order.unflat(values_N)

    def _consumes(self) -> bool:
        """Return whether the gradient is written into the logits' memory, as the caller allowed.
        Warn, and return False, if the logits have gaps in memory.

        Raises:
            ValueError: the logits are a leaf tensor, which would be overwritten for the caller.
        """
        logits = self.input
        trained = logits.requires_grad and torch.is_grad_enabled()
        if self.ownership != "consume" or not trained:
            return False
        if logits.is_leaf:
            raise ValueError(
                f"{self.caller}(ownership='consume') got leaf logits, which the caller would find "
                "overwritten: pass an output of the model, or borrow"
            )
        if self._order.rows(logits).is_contiguous():
            return True
        warnings.warn(
            f"{self.caller}(ownership='consume') borrows: logits of shape {tuple(logits.shape)} "
            f"and strides {logits.stride()} lie in memory with gaps: pass contiguous ones to "
            "save the gradient's memory",
            stacklevel=4,
        )
        return False


#: The first capability with bfloat16, and with maxima that propagate NaN.
_CAPABILITY = (8, 0)
#: Triton's kernels compute in float32; torch computes float64 logits.
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def backend_of(device: torch.device, dtype: torch.dtype, triton: bool | None) -> Backend:
    """Choose the backend, Triton or torch, for logits of a type on a device.

    Raises:
        ValueError: `triton` is True and Triton's kernels cannot run.
    """
    on_triton = uses_triton("token_logprobs()", device, triton=triton, capability=_CAPABILITY)
    return "triton" if on_triton and dtype in _TRITON_DTYPES else "eager"
