"""A rank's model chunks, taken apart into the slots of their parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron_idempotent.window.params import ensure_params_synced

from .errors import CheckpointMismatch, listed
from .families import Architecture
from .layout import Slot
from .naming import EMBEDDING, NORM, OUTPUT, Names, Ranks

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


class Placed(NamedTuple):
    """A slot, and the parameter that it is in."""

    slot: Slot
    parameter: torch.nn.Parameter

    @property
    def view(self) -> torch.Tensor:
        """The slot's elements as they are in memory now, oriented as Hugging Face has them."""
        return self.slot.view(self.parameter.detach())


def placed_slots(chunks: Sequence[Any], arch: Architecture) -> list[Placed]:
    """Every slot of the chunks of this rank, in the order of the parameters.

    Args:
        chunks: GPTModels, in whatever wrappers.
        arch: what they compute.

    Raises:
        CheckpointMismatch: the chunks are not of this architecture, listing all that differs:
            parameters without a counterpart or of another shape, tensors without a parameter.
    """
    names = Names(arch, Ranks.here())
    placed: list[Placed] = []
    wrong: list[str] = []
    for chunk in chunks:
        found = _of_chunk(unwrapped(chunk), names, wrong)
        placed += found
        wrong += _unused(unwrapped(chunk), names, found)
    if wrong:
        raise CheckpointMismatch(f"the model is not the checkpoint's {arch.name}: {listed(wrong)}")
    return placed


def sync(chunks: Sequence[Any]) -> None:
    """Have all pending gathers of parameters done, in chunks that Megatron's DDP wraps.

    All ranks of their data-parallel groups take part.
    """
    ensure_params_synced([chunk for chunk in chunks if hasattr(chunk, "bucket_groups")])


def unwrapped(chunk: Any) -> Any:
    """The GPTModel in DDP, Float16Module and the like."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _of_chunk(model: Any, names: Names, wrong: list[str]) -> list[Placed]:
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    config, arch = model.config, names.arch
    for field, found, wanted in (
        ("num_layers", config.num_layers, arch.layers),
        ("num_moe_experts", config.num_moe_experts or 0, arch.experts),
        # Gate and the other projection would alternate.
        ("moe_mlp_glu_interleave_size", getattr(config, "moe_mlp_glu_interleave_size", None), None),
    ):
        if found != wanted:
            wrong.append(f"{field}={found}, the checkpoint has {wanted}")
    if wrong:
        return []
    placed = []
    for name, parameter in model.named_parameters():
        match = _LAYER.match(name)
        mlp = model.decoder.layers[int(match[1])].mlp if match else None
        experts = getattr(mlp, "local_expert_indices", ())
        found = names.slots(name, parameter.shape[0], layers=layers, experts=experts)
        if not found:
            wrong.append(f"{name} {list(parameter.shape)} has no counterpart")
        for slot in found:
            each = Placed(slot, parameter)
            problem = _misshapen(each, names)
            if problem is None:
                placed.append(each)
            else:
                wrong.append(problem)
    return placed


def _misshapen(placed: Placed, names: Names) -> str | None:
    slot = placed.slot
    name = next(block.name for block in slot.blocks if block.name is not None)
    shape = list(names.shapes[name])
    shape[slot.dim] = slot.size // slot.count
    found = list(placed.parameter.shape)
    if slot.grouped is not None:
        (rows, columns), experts = shape, slot.grouped[1]
        shape = [columns, rows * experts] if slot.dim == 0 else [columns * experts, rows]
    if slot.size % slot.count == 0 and found == shape:
        return None
    return f"{slot.parameter} is {found}, shard {slot.rank} of {slot.count} has {shape}"


def _unused(model: Any, names: Names, placed: Sequence[Placed]) -> list[str]:
    """Tensors of this chunk's layers that no parameter takes."""
    layers = {f"model.layers.{layer.layer_number - 1}.": layer for layer in model.decoder.layers}
    taken = {block.name for each in placed for block in each.slot.blocks}
    wanted = [EMBEDDING] if model.pre_process else []
    wanted += [NORM] if model.post_process else []
    wanted += [OUTPUT] if model.post_process and not names.arch.tied else []
    for name in names.shapes:
        at = re.match(r"model\.layers\.\d+\.", name)
        if at is None or at[0] not in layers:
            continue
        expert = _EXPERT.search(name)
        here = getattr(layers[at[0]].mlp, "local_expert_indices", ())
        if expert is None or int(expert[1]) in here:
            wanted.append(name)
    return [f"no parameter takes {name}" for name in wanted if name not in taken]
