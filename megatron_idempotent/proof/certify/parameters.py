"""Names a rank's parameters by their place in the whole model, and puts the whole together."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from . import experts
from .half import Main
from .layouts import EXPERTS, Layout
from .oracle import INNER
from .protocol import Wrong

_EMBEDDING = "embedding.word_embeddings.weight"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPart:
    """Holds a parameter of this rank, and its place in the whole model."""

    name: str
    dimension: int | None
    """The dimension that ranks share; None if each has all of it."""
    rank: int
    size: int
    value: Tensor
    main: Main | None = None
    """The part that the rank has of what the optimizer updates in float32; None without."""


def parts(chunk: Any, layout: Layout) -> Iterator[ParameterPart]:
    """Yield the parameters of a chunk, by Megatron's names in a model that one rank has.

    An output layer that shares the embedding's weight has the embedding's name.
    """
    from megatron.core import parallel_state as ps

    dense = ps.get_tensor_model_parallel_rank(), layout.sizes["tp"]
    routed = dense
    if layout.experts:
        routed = ps.get_expert_tensor_parallel_rank(), layout.sizes["etp"]
    module = chunk.module
    if not hasattr(module, "decoder"):
        module = module.module  # in Float16Module
    for name, parameter in module.named_parameters():
        words = name.split(".")
        rank, size = dense
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(module.decoder.layers[int(words[2])].layer_number - 1)
        if "local_experts" in words:
            rank, size = routed
            place = words.index("local_experts") + 1
            local = EXPERTS // layout.sizes["ep"]
            words[place] = str(int(words[place]) + local * ps.get_expert_model_parallel_rank())
        # As releases before 0.17 call it.
        whole = ".".join(words).replace("mtp_model_layer", INNER)
        if whole == "output_layer.weight" and "tied" in layout.flags:
            if getattr(module, "mtp_process", False):
                continue  # nobody reads it: the stage has the embedding too, for the MTP layer
            whole = _EMBEDDING
        sharded = getattr(parameter, "tensor_model_parallel", False) and size > 1
        yield ParameterPart(
            name=whole,
            dimension=parameter.partition_dim if sharded else None,
            rank=rank if sharded else 0,
            size=size if sharded else 1,
            value=parameter,
        )


def spread(chunk: Any, layout: Layout) -> None:
    """Change weights so that what goes wrong with one is seen; copies of one change alike.

    Biases, norms and experts differ from each other then, and routers decide by wide margins.
    """
    with torch.no_grad():
        for part in parts(chunk, layout):
            shape = list(part.value.shape)
            if part.dimension is not None:
                shape[part.dimension] *= part.size
            added = torch.zeros(shape, dtype=torch.float64)
            generator = torch.Generator().manual_seed(zlib.crc32(part.name.encode()))
            if len(shape) == 1:
                added += 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
            elif "local_experts" in part.name:
                added += 0.02 * torch.randn(shape, generator=generator, dtype=torch.float64)
            if layout.experts:
                added += experts.decided(part.name, added)
            if part.dimension is not None:
                added = added.chunk(part.size, part.dimension)[part.rank]
            part.value.add_(added.to(part.value))


def joined(shards: Sequence[ParameterPart]) -> Tensor:
    """Join the shards of one parameter, of which each rank has one.

    Raises:
        Wrong: one is missing.
    """
    ordered = sorted(shards, key=lambda part: part.rank)
    if len(ordered) != ordered[0].size:
        raise Wrong(f"{ordered[0].name} has {len(ordered)} of its {ordered[0].size} shards")
    if ordered[0].dimension is None:
        return ordered[0].value
    return torch.cat([part.value for part in ordered], ordered[0].dimension)
