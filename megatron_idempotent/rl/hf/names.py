"""Maps each parameter of a GPTModel to the Hugging Face tensors that it is made of.

Knows the names of Megatron's local layers, of Transformer Engine's with norms fused into the
projections after them, and of experts as `local_experts.K`, as `weightK`, and all in one weight.

A parameter of Megatron, put together from all of its tensor-parallel shards along one dimension,
is a row of blocks of Hugging Face tensors, and shard r of n is the r-th n-th of that row. That one
description covers fused and interleaved projections, padded vocabularies and more tensor-parallel
ranks than heads of keys; loading and exporting both read it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from .config import Architecture


class Block(NamedTuple):
    """Names consecutive rows, or columns, of a Hugging Face tensor; padding if `name` is None."""

    name: str | None
    start: int
    size: int


class SlotPart(NamedTuple):
    """Describes the part of one Hugging Face tensor in one shard: a range of it along `dim`."""

    name: str
    dim: int
    start: int
    size: int
    segments: tuple[tuple[int, int], ...]
    """The places of the part in the shard, in order: start and size along `dim`."""

    @property
    def place(self) -> tuple[str, int, int, int]:
        """The key that replicas of the same elements have in common."""
        return self.name, self.dim, self.start, self.size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSlot:
    """Describes one matrix or vector of a parameter, and the tensors that it is made of.

    Example:
        ParameterSlot(parameter="decoder.final_layernorm.weight", blocks=(Block("n", 0, 64),))
    """

    parameter: str
    """Megatron's name of the parameter in the chunk."""
    blocks: tuple[Block, ...]
    """The blocks of the whole parameter, one after the other along `dim`."""
    dim: int = 0
    rank: int = 0
    """The index of this shard of the parameter."""
    count: int = 1
    """The number of shards of the parameter."""
    grouped: tuple[int, int] | None = None
    """The expert's index, and the number of experts, in the old GroupedMLP's weight of all local
    experts; None if the parameter is this matrix alone."""

    @property
    def size(self) -> int:
        """The size of the whole row of blocks."""
        return sum(block.size for block in self.blocks)

    @property
    def local_size(self) -> int:
        """The size of this shard along `dim`."""
        return self.size // self.count

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slot's elements in a parameter, oriented as Hugging Face has them; no copy."""
        if self.grouped is None:
            return tensor
        expert, experts = self.grouped
        inputs, outputs = tensor.shape
        if self.dim == 0:  # [H, E x 2F], which is used as [E, H, 2F]
            return tensor.view(experts, inputs, outputs // experts)[expert].T
        return tensor.view(experts, inputs // experts, outputs)[expert].T

    def shares(self) -> tuple[SlotPart, ...]:
        """Return the parts that this shard holds by Hugging Face tensor, in the order of blocks."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for name, start, local, size in self._pieces():
            if name is not None:
                found.setdefault(name, []).append((start, local, size))
        parts = []
        for name, pieces in found.items():
            first, at = pieces[0][0], pieces[0][0]
            for start, _, size in pieces:
                # Blocks of a tensor come in its order, and a shard is consecutive: without gaps.
                assert start == at, f"{self.parameter}: parts of {name} are not consecutive"
                at += size
            segments = tuple((local, size) for _, local, size in pieces)
            parts.append(SlotPart(name, self.dim, first, at - first, segments))
        return tuple(parts)

    def padding(self) -> tuple[tuple[int, int], ...]:
        """Return the rows of this shard that belong to no tensor, as start and size."""
        return tuple((local, size) for name, _, local, size in self._pieces() if name is None)

    def _pieces(self) -> Iterable[tuple[str | None, int, int, int]]:
        low = self.rank * self.local_size
        high = low + self.local_size
        at = 0
        for block in self.blocks:
            first, last = max(low, at), min(high, at + block.size)
            if first < last:
                yield block.name, block.start + first - at, first - low, last - first
            at += block.size


class Placed(NamedTuple):
    """Pairs a slot with the parameter that it is in."""

    slot: ParameterSlot
    parameter: torch.nn.Parameter

    @property
    def view(self) -> torch.Tensor:
        """The slot's elements in the parameter's memory, oriented as Hugging Face has them."""
        return self.slot.view(self.parameter.detach())


EMBEDDING, OUTPUT, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

Kind = Literal["whole", "columns", "qkv", "gate_up"]
_QKV = tuple(f"self_attn.{each}_proj" for each in "qkv")
#: For each name in a layer, its layout and the names in a Hugging Face layer.
_LAYER: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "input_layernorm.weight": ("whole", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": ("whole", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"{each}.weight" for each in _QKV)),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"{each}.bias" for each in _QKV)),
    "self_attention.q_layernorm.weight": ("whole", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("whole", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("columns", ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": ("whole", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": ("whole", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", ("mlp.down_proj.weight",)),
    "mlp.router.weight": ("whole", ("mlp.gate.weight",)),
}
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_TE_EXPERT = re.compile(r"mlp\.experts\.linear_fc([12])\.weight(\d+)")
_ADAPTER = re.compile(r"(.+)\.adapter\.linear_(in|out)\.weight")
_ALL_EXPERTS = re.compile(r"mlp\.experts\.weight([12])")


_OF_EXPERT: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "1": ("gate_up", ("gate_proj.weight", "up_proj.weight")),
    "2": ("columns", ("down_proj.weight",)),
}


class Ranks(NamedTuple):
    """Gives this process's place among those that share a layer. Example: `Ranks(0, 2, 0, 1)`."""

    tensor: int
    """The rank among those that share a layer's tensors."""
    tensor_count: int
    expert: int
    """The rank among those that share an expert; ranks with other experts do not count."""
    expert_count: int

    @classmethod
    def here(cls) -> Ranks:
        """Read the ranks from Megatron's parallel state."""
        from megatron.core import parallel_state as state

        return cls(
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
            state.get_expert_tensor_parallel_rank(),
            state.get_expert_tensor_parallel_world_size(),
        )


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return every tensor of the checkpoint and its shape, in transformers' order of modules."""
    hidden, ffn = arch.hidden, arch.ffn
    queries, keys = arch.heads * arch.head_dim, arch.query_groups * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocab_size, hidden)}
    for layer in range(arch.layers):
        at = f"model.layers.{layer}."
        for name, rows in zip(_QKV, (queries, keys, keys), strict=True):
            shapes[f"{at}{name}.weight"] = (rows, hidden)
            if arch.qkv_bias:
                shapes[f"{at}{name}.bias"] = (rows,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, queries)
        if arch.qk_norm:
            shapes[f"{at}self_attn.q_norm.weight"] = (arch.head_dim,)
            shapes[f"{at}self_attn.k_norm.weight"] = (arch.head_dim,)
        if arch.experts:
            shapes[f"{at}mlp.gate.weight"] = (arch.experts, hidden)
        experts = [f"experts.{expert}." for expert in range(arch.experts)]
        inner = arch.expert_ffn if arch.experts else ffn
        for expert in experts or [""]:
            shapes[f"{at}mlp.{expert}gate_proj.weight"] = (inner, hidden)
            shapes[f"{at}mlp.{expert}up_proj.weight"] = (inner, hidden)
            shapes[f"{at}mlp.{expert}down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = (hidden,)
        shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes[NORM] = (hidden,)
    if not arch.tied:
        shapes[OUTPUT] = (arch.vocab_size, hidden)
    return shapes


_PROJECTIONS = {
    "linear_qkv": _QKV,
    "linear_proj": ("self_attn.o_proj",),
    "linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_fc2": ("mlp.down_proj",),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """Describes a model's low-rank adapters, as Megatron-Bridge's LoRA has them.

    Example: `Lora(rank=16, layers=("linear_qkv", "linear_proj"))`.
    """

    rank: int
    layers: tuple[str, ...] = tuple(_PROJECTIONS)
    """Megatron's names of the layers that have adapters."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not {*self.layers} <= {*_PROJECTIONS}:
            raise ValueError(
                f"Lora() got rank={self.rank} and layers={self.layers}; allowed: 1 or more, and "
                f"layers of {', '.join(_PROJECTIONS)}"
            )

    def shapes(self, arch: Architecture) -> dict[str, tuple[int, ...]]:
        """Return the adapters' tensors and their shapes, by the names that PEFT gives them."""
        targets = tuple(f".{each}.weight" for layer in self.layers for each in _PROJECTIONS[layer])
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in hf_shapes(arch).items():
            if name.endswith(targets):
                found[_peft(name, "A")] = (self.rank, shape[1])
                found[_peft(name, "B")] = (shape[0], self.rank)
        return found


def _peft(name: str, factor: str) -> str:
    return f"base_model.model.{name.removesuffix('weight')}lora_{factor}.weight"


class Names:
    """Finds the slots of a model's parameters on one rank.

    Example:
        names = Names(arch, Ranks.here())
        slots = names.slots("decoder.layers.0.mlp.linear_fc1.weight", 64, layers=[4, 5])
    """

    def __init__(self, arch: Architecture, ranks: Ranks, lora: Lora | None = None) -> None:
        self.arch, self.ranks, self.lora = arch, ranks, lora
        self.shapes = hf_shapes(arch) if lora is None else lora.shapes(arch)

    def slots(
        self, name: str, rows: int, *, layers: Sequence[int], experts: Sequence[int] = ()
    ) -> tuple[ParameterSlot, ...]:
        """Return the slots of a parameter; none for a name without a counterpart.

        Args:
            name: the parameter's name in the chunk.
            rows: the parameter's rows on this rank; a vocabulary's padding is known from it.
            layers: this chunk's layers, by their number in the whole model, from 0.
            experts: this rank's experts in the parameter's layer, by their number among all.
        """
        target = {
            "embedding.word_embeddings.weight": EMBEDDING,
            "output_layer.weight": EMBEDDING if self.arch.tied else OUTPUT,
        }.get(name)
        if target is not None:
            rank, count, _, _ = self.ranks
            padding = rows * count - self.arch.vocab_size
            blocks = [Block(target, 0, self.arch.vocab_size)]
            blocks += [Block(None, 0, padding)] if padding > 0 else []
            return (ParameterSlot(parameter=name, blocks=tuple(blocks), rank=rank, count=count),)
        if name == "decoder.final_layernorm.weight":
            return (self._slot(name, "whole", [NORM], 0, 1),)
        if match := _IN_LAYER.fullmatch(name):
            at = f"model.layers.{layers[int(match[1])]}."
            if factor := _ADAPTER.fullmatch(match[2]):
                return self._factor(name, factor[1], "AB"[factor[2] == "out"], at, rows)
            return self._in_layer(name, match[2], at) or self._experts(name, match[2], at, experts)
        return ()

    def _in_layer(self, name: str, inner: str, at: str) -> tuple[ParameterSlot, ...]:
        kind, names = _LAYER.get(inner, ("whole", ()))
        targets = [at + each for each in names]
        if not targets or not all(each in self.shapes for each in targets):
            return ()
        rank, count = (0, 1) if kind == "whole" else self.ranks[:2]
        return (self._slot(name, kind, targets, rank, count),)

    def _factor(
        self, name: str, layer: str, factor: str, at: str, rows: int
    ) -> tuple[ParameterSlot, ...]:
        kind, names = _LAYER.get(f"{layer}.weight", ("whole", ()))
        targets = [_peft(at + each, factor) for each in names]
        if not targets or not all(each in self.shapes for each in targets):
            return ()
        rank, count = self.ranks[:2]
        if factor == "B" and kind != "columns":
            return (self._slot(name, kind, targets, rank, count),)
        # Some wrappers cut an A along the adapter's rank, and the B of a row-parallel layer.
        cut = rows < self.shapes[targets[0]][0]
        along: Kind = "columns" if factor == "A" and kind == "columns" and not cut else "whole"
        place = (rank, count) if cut or along == "columns" else (0, 1)
        # Fused projections have one A for all.
        return tuple(self._slot(name, along, [target], *place) for target in targets)

    def _experts(
        self, name: str, inner: str, at: str, experts: Sequence[int]
    ) -> tuple[ParameterSlot, ...]:
        grouped = None
        if match := _EXPERT.fullmatch(inner):
            chosen, which = [int(match[1])], match[2]
        elif match := _TE_EXPERT.fullmatch(inner):
            chosen, which = [int(match[2])], match[1]
        elif match := _ALL_EXPERTS.fullmatch(inner):
            chosen, which, grouped = list(range(len(experts))), match[1], len(experts)
        else:
            return ()
        kind, last = _OF_EXPERT[which]
        rank, count = self.ranks[2:]
        found = []
        for local in chosen:
            targets = [f"{at}mlp.experts.{experts[local]}.{each}" for each in last]
            place = None if grouped is None else (local, grouped)
            found.append(self._slot(name, kind, targets, rank, count, place))
        return tuple(found)

    def _slot(
        self,
        name: str,
        kind: Kind,
        targets: Sequence[str],
        rank: int,
        count: int,
        grouped: tuple[int, int] | None = None,
    ) -> ParameterSlot:
        arch, shape = self.arch, self.shapes[targets[0]]
        if kind == "qkv":  # for each group of heads its queries, its keys and its values
            query, key, value = targets
            wide, rows = arch.heads // arch.query_groups * arch.head_dim, arch.head_dim
            blocks = []
            for group in range(arch.query_groups):
                blocks.append(Block(query, group * wide, wide))
                blocks.append(Block(key, group * rows, rows))
                blocks.append(Block(value, group * rows, rows))
        elif kind == "gate_up":  # each shard has its part of the gate, then of `up`
            rows = shape[0] // count
            blocks = [Block(each, n * rows, rows) for n in range(count) for each in targets]
        else:
            blocks = [Block(targets[0], 0, shape[int(kind == "columns")])]
        return ParameterSlot(
            parameter=name,
            blocks=tuple(blocks),
            dim=int(kind == "columns"),
            rank=rank,
            count=count,
            grouped=grouped,
        )
