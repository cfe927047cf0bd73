"""Maps each parameter of a GPTModel to the Hugging Face tensors that it consists of.

The names cover Megatron's local layers, Transformer Engine's layers with fused norms, and experts
as `local_experts.K`, as `weightK`, or all in one weight.

An unsharded parameter of Megatron is a concatenation of blocks of Hugging Face tensors along one
dimension, and tensor-parallel shard r of n is the r-th of n equal slices of it. This one
description covers fused and interleaved projections, padded vocabularies and more tensor-parallel
ranks than key heads. Loading and exporting both use it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from .config import Architecture


class Block(NamedTuple):
    """Consecutive rows or columns of a Hugging Face tensor, as a block of a Megatron parameter; or
    padding if `name` is None.
    """

    name: str | None
    start: int
    size: int


class SlotPart(NamedTuple):
    """The part of a Hugging Face tensor that one rank's shard of a Megatron parameter has: a range
    along `dim`.
    """

    name: str
    dim: int
    start: int
    size: int
    segments: tuple[tuple[int, int], ...]
    """The ranges of the part in the shard, in order: start and size along `dim`."""

    @property
    def place(self) -> tuple[str, int, int, int]:
        """The tensor's name, and the part's dimension, start and size: a key that is equal on all
        ranks that have the same elements.
        """
        return self.name, self.dim, self.start, self.size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSlot:
    """One matrix or vector in a Megatron parameter, and the blocks of Hugging Face tensors that
    make up this matrix or vector.

    Example:
        ParameterSlot(parameter="decoder.final_layernorm.weight", blocks=(Block("n", 0, 64),))
    """

    parameter: str
    """Megatron's name of the parameter in the chunk."""
    blocks: tuple[Block, ...]
    """The blocks of the unsharded parameter, concatenated along `dim`."""
    dim: int = 0
    rank: int = 0
    """The index of this shard of the parameter."""
    count: int = 1
    """The number of shards of the parameter."""
    grouped: tuple[int, int] | None = None
    """The expert's index and the number of experts, if the parameter is the old GroupedMLP's
    weight of all local experts; None if the parameter is just this matrix."""

    @property
    def size(self) -> int:
        """The size of the unsharded matrix or vector along `dim`, with padding."""
        return sum(block.size for block in self.blocks)

    @property
    def local_size(self) -> int:
        """The size along `dim` of this rank's shard of the matrix or vector."""
        return self.size // self.count

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the slot's matrix or vector, as a view of the parameter
        `tensor`. A matrix is [outputs, inputs], as in Hugging Face.
        """
        if self.grouped is None:
            return tensor
        expert, experts = self.grouped
        inputs, outputs = tensor.shape
        if self.dim == 0:  # [H, E x 2F], used as [E, H, 2F]
            return tensor.view(experts, inputs, outputs // experts)[expert].T
        return tensor.view(experts, inputs // experts, outputs)[expert].T

    def shares(self) -> tuple[SlotPart, ...]:
        """Return the part of each Hugging Face tensor that this rank's shard has, in the order of
        `blocks`; padding is left out.
        """
        pieces_of: dict[str, list[tuple[int, int, int]]] = {}
        for name, start, local, size in self._pieces():
            if name is not None:
                pieces_of.setdefault(name, []).append((start, local, size))
        parts = []
        for name, pieces in pieces_of.items():
            first, end = pieces[0][0], pieces[0][0]
            for start, _, size in pieces:
                # Blocks follow a tensor's order, and shards are contiguous, so there are no gaps.
                assert start == end, f"{self.parameter}: parts of {name} are not consecutive"
                end += size
            segments = tuple((local, size) for _, local, size in pieces)
            parts.append(SlotPart(name, self.dim, first, end - first, segments))
        return tuple(parts)

    def padding(self) -> tuple[tuple[int, int], ...]:
        """Return the start and size of each range of padding rows in this rank's shard."""
        return tuple((local, size) for name, _, local, size in self._pieces() if name is None)

    def _pieces(self) -> Iterable[tuple[str | None, int, int, int]]:
        low = self.rank * self.local_size
        high = low + self.local_size
        offset = 0
        for block in self.blocks:
            first, last = max(low, offset), min(high, offset + block.size)
            if first < last:
                yield block.name, block.start + first - offset, first - low, last - first
            offset += block.size


class Placed(NamedTuple):
    """A `ParameterSlot`, and the parameter of this rank that contains it."""

    slot: ParameterSlot
    parameter: torch.nn.Parameter

    @property
    def view(self) -> torch.Tensor:
        """This rank's shard of the slot's matrix or vector, as a view of the parameter's memory. A
        matrix is [outputs, inputs], as in Hugging Face.
        """
        return self.slot.view(self.parameter.detach())


EMBEDDING, OUTPUT, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"

Kind = Literal["whole", "columns", "qkv", "gate_up"]
_QKV = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
#: For each name in a layer, its layout and the names in a Hugging Face layer.
_LAYER: dict[str, tuple[Kind, tuple[str, ...]]] = {
    "input_layernorm.weight": ("whole", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": ("whole", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": (
        "qkv",
        tuple(f"{projection}.weight" for projection in _QKV),
    ),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"{projection}.bias" for projection in _QKV)),
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
    """This process's tensor-parallel ranks and group sizes, for dense layers and experts.
    Example: `Ranks(0, 2, 0, 1)`.
    """

    tensor: int
    """The tensor-parallel rank."""
    tensor_count: int
    expert: int
    """The tensor-parallel rank within an expert."""
    expert_count: int

    @classmethod
    def here(cls) -> Ranks:
        """Return this process's ranks and group sizes from Megatron's parallel state."""
        from megatron.core import parallel_state as state

        return cls(
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
            state.get_expert_tensor_parallel_rank(),
            state.get_expert_tensor_parallel_world_size(),
        )


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a Hugging Face checkpoint of this architecture, by name,
    in transformers' order of modules.
    """
    hidden, ffn = arch.hidden, arch.ffn
    queries, keys = arch.heads * arch.head_dim, arch.query_groups * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (arch.vocab_size, hidden)}
    for layer in range(arch.layers):
        prefix = f"model.layers.{layer}."
        for name, rows in zip(_QKV, (queries, keys, keys), strict=True):
            shapes[f"{prefix}{name}.weight"] = (rows, hidden)
            if arch.qkv_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, queries)
        if arch.qk_norm:
            shapes[f"{prefix}self_attn.q_norm.weight"] = (arch.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (arch.head_dim,)
        if arch.experts:
            shapes[f"{prefix}mlp.gate.weight"] = (arch.experts, hidden)
        experts = [f"experts.{expert}." for expert in range(arch.experts)]
        inner = arch.expert_ffn if arch.experts else ffn
        for expert in experts or [""]:
            shapes[f"{prefix}mlp.{expert}gate_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}mlp.{expert}up_proj.weight"] = (inner, hidden)
            shapes[f"{prefix}mlp.{expert}down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
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
    """Describes the LoRA adapters that Megatron-Bridge has put into a model: their rank, and the
    layers that have adapters.

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
        """Return the shape of each adapter tensor of a model of this architecture, by the tensor's
        name in PEFT.
        """
        targets = tuple(
            f".{projection}.weight" for layer in self.layers for projection in _PROJECTIONS[layer]
        )
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in hf_shapes(arch).items():
            if name.endswith(targets):
                shapes[_peft(name, "A")] = (self.rank, shape[1])
                shapes[_peft(name, "B")] = (shape[0], self.rank)
        return shapes


def _peft(name: str, factor: str) -> str:
    return f"base_model.model.{name.removesuffix('weight')}lora_{factor}.weight"


class Names:
    """Finds the Hugging Face tensors whose parts make up each parameter of a Megatron model on one
    rank.

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
        """Return the slots of a parameter, i.e. the parts of Hugging Face tensors that make up the
        parameter; () if no Hugging Face tensor corresponds to the parameter's name.

        Args:
            name: the parameter's name in the chunk.
            rows: the parameter's rows on this rank, which determine a vocabulary's padding.
            layers: the model-wide indices, from 0, of this chunk's layers.
            experts: the model-wide indices of this rank's experts in the parameter's layer.
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
            prefix = f"model.layers.{layers[int(match[1])]}."
            if factor := _ADAPTER.fullmatch(match[2]):
                return self._factor(name, factor[1], "AB"[factor[2] == "out"], prefix, rows)
            return self._in_layer(name, match[2], prefix) or self._experts(
                name, match[2], prefix, experts
            )
        return ()

    def _in_layer(self, name: str, inner: str, prefix: str) -> tuple[ParameterSlot, ...]:
        kind, names = _LAYER.get(inner, ("whole", ()))
        targets = [prefix + target_name for target_name in names]
        if not targets or not all(target in self.shapes for target in targets):
            return ()
        rank, count = (0, 1) if kind == "whole" else self.ranks[:2]
        return (self._slot(name, kind, targets, rank, count),)

    def _factor(
        self, name: str, layer: str, factor: str, prefix: str, rows: int
    ) -> tuple[ParameterSlot, ...]:
        kind, names = _LAYER.get(f"{layer}.weight", ("whole", ()))
        targets = [_peft(prefix + target_name, factor) for target_name in names]
        if not targets or not all(target in self.shapes for target in targets):
            return ()
        rank, count = self.ranks[:2]
        if factor == "B" and kind != "columns":
            return (self._slot(name, kind, targets, rank, count),)
        # Some wrappers shard an A along the adapter's rank, and the B of a row-parallel layer.
        cut = rows < self.shapes[targets[0]][0]
        layout: Kind = "columns" if factor == "A" and kind == "columns" and not cut else "whole"
        rank_and_count = (rank, count) if cut or layout == "columns" else (0, 1)
        # Fused projections share one A.
        return tuple(self._slot(name, layout, [target], *rank_and_count) for target in targets)

    def _experts(
        self, name: str, inner: str, prefix: str, experts: Sequence[int]
    ) -> tuple[ParameterSlot, ...]:
        grouped = None
        if match := _EXPERT.fullmatch(inner):
            local_indices, which = [int(match[1])], match[2]
        elif match := _TE_EXPERT.fullmatch(inner):
            local_indices, which = [int(match[2])], match[1]
        elif match := _ALL_EXPERTS.fullmatch(inner):
            local_indices, which, grouped = list(range(len(experts))), match[1], len(experts)
        else:
            return ()
        kind, last = _OF_EXPERT[which]
        rank, count = self.ranks[2:]
        slots = []
        for local in local_indices:
            targets = [f"{prefix}mlp.experts.{experts[local]}.{suffix}" for suffix in last]
            position = None if grouped is None else (local, grouped)
            slots.append(self._slot(name, kind, targets, rank, count, position))
        return tuple(slots)

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
        if kind == "qkv":  # for each query group: its queries, its key and its value
            query, key, value = targets
            wide, rows = arch.heads // arch.query_groups * arch.head_dim, arch.head_dim
            blocks = []
            for group in range(arch.query_groups):
                blocks.append(Block(query, group * wide, wide))
                blocks.append(Block(key, group * rows, rows))
                blocks.append(Block(value, group * rows, rows))
        elif kind == "gate_up":  # each shard has its slice of the gate, then of `up`
            rows = shape[0] // count
            blocks = [Block(target, n * rows, rows) for n in range(count) for target in targets]
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
