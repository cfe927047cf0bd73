"""Builds a pipeline stage for a Hugging Face checkpoint, and loads its own slices into it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_idempotent.rl.weights.records import listed
from megatron_idempotent.rl.weights.safetensors_io import Checkpoint
from megatron_idempotent.window.agreement import DEADLINE_S
from megatron_idempotent.window.params import finish_gathers

from .config import Architecture, CheckpointMismatch, agree_on
from .names import EMBEDDING, NORM, OUTPUT, Lora, Names, Placed, Ranks, SlotPart, hf_shapes

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


def placed_slots(
    chunks: Sequence[Any], arch: Architecture, lora: Lora | None = None
) -> list[Placed]:
    """Return every slot of the chunks of this rank, in the order of the parameters.

    Args:
        chunks: GPTModels, in any wrappers.
        arch: the checkpoint's architecture.
        lora: the chunks' adapters, whose slots alone are returned; None for a model without.

    Raises:
        CheckpointMismatch: the chunks are not of this architecture, listing all that differs:
            parameters without a counterpart or of another shape, tensors without a parameter.
    """
    names = Names(arch, Ranks.here(), lora)
    placed: list[Placed] = []
    wrong: list[str] = []
    for chunk in chunks:
        found = _of_chunk(unwrapped(chunk), names, wrong)
        placed += found
        wrong += _unused(unwrapped(chunk), names, found)
    if wrong:
        raise CheckpointMismatch(f"the model is not the checkpoint's {arch.name}: {listed(wrong)}")
    return placed


def unwrapped(chunk: Any) -> Any:
    """Return the GPTModel inside of DDP, Float16Module and other wrappers."""
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
        if names.lora is not None and ".adapter." not in name:
            continue
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
    """List the tensors of this chunk's layers that no parameter takes."""
    layers = {f"model.layers.{layer.layer_number - 1}.": layer for layer in model.decoder.layers}
    taken = {block.name for each in placed for block in each.slot.blocks}
    wanted = [EMBEDDING] if model.pre_process else []
    wanted += [NORM] if model.post_process else []
    wanted += [OUTPUT] if model.post_process and not names.arch.tied else []
    wanted = [name for name in wanted if name in names.shapes]
    for name in names.shapes:
        at = re.search(r"model\.layers\.\d+\.", name)
        if at is None or at[0] not in layers:
            continue
        expert = _EXPERT.search(name)
        here = getattr(layers[at[0]].mlp, "local_expert_indices", ())
        if expert is None or int(expert[1]) in here:
            wanted.append(name)
    return [f"no parameter takes {name}" for name in wanted if name not in taken]


#: Types that hold every value of another.
_HOLDS = {
    torch.float64: {torch.float64, torch.float32, torch.float16, torch.bfloat16},
    torch.float32: {torch.float32, torch.float16, torch.bfloat16},
    torch.float16: {torch.float16},
    torch.bfloat16: {torch.bfloat16},
}
#: Tables that old releases of transformers saved; they are computed from the configuration.
_COMPUTED = ".rotary_emb.inv_freq"


def load_hf(
    directory: str | Path,
    chunks: Sequence[Any],
    *,
    optimizer: Any = None,
    allow_rounding: bool = False,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Load a checkpoint's weights into a model that is there already.

    Each rank reads its own slices, straight into its parameters: no rank has a whole copy, and no
    weights are sent. All ranks call it: they agree before anything is changed, and once more
    afterwards. Rows that pad the vocabulary become zero. Pending gathers of parameters are
    finished first, in chunks that Megatron's DDP wraps.

    Args:
        directory: the checkpoint, with config.json, and model.safetensors or
            model.safetensors.index.json.
        chunks: this rank's chunks, bare or in DDP and Float16Module.
        optimizer: Megatron's optimizer, whose float32 master weights are copied from the model
            again; its moments and step counts stay. Without it the next step of a half-precision
            model starts from the old master weights.
        allow_rounding: True lets tensors of a wider type than the parameters be rounded.
        deadline_s: how long to wait for the slowest rank, in seconds; reading is part of it.

    Raises:
        UnsupportedArchitecture, CheckpointDamaged, CheckpointMismatch: with all that is wrong;
            nothing was changed.
        FailedElsewhere: one of these, on other ranks.
    """
    error: BaseException | None = None
    checkpoint = placed = None
    try:
        arch = Architecture.read(directory)
        checkpoint = Checkpoint(directory)
        _check_names(checkpoint, arch)
        placed = placed_slots(chunks, arch)
        _check_types(checkpoint, placed, allow_rounding)
        _check_tied(checkpoint, arch, placed)
    except (ValueError, OSError) as bad:
        error = bad
    agree_on(error, "nothing was loaded", deadline_s=deadline_s)
    assert checkpoint is not None
    assert placed is not None
    finish_gathers(chunks)
    with checkpoint:
        try:
            _fill(checkpoint, placed)
        except (ValueError, OSError) as bad:
            error = bad
    agree_on(error, "the model is loaded in part only, load it again", deadline_s=deadline_s)
    if optimizer is not None:
        optimizer.reload_model_params()


def _check_names(checkpoint: Checkpoint, arch: Architecture) -> None:
    """Check names and shapes, with the same outcome on all ranks."""
    wanted, found = hf_shapes(arch), checkpoint.tensors
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    for name, info in found.items():
        tied = name == OUTPUT and arch.tied and info.shape == wanted[EMBEDDING]
        if name in wanted and info.shape != wanted[name]:
            wrong.append(f"{name} is {list(info.shape)}, config.json has {list(wanted[name])}")
        elif name not in wanted and not tied and not name.endswith(_COMPUTED):
            wrong.append(f"{name} {list(info.shape)} is unexpected")
    _refuse(checkpoint, wrong)


def _check_types(checkpoint: Checkpoint, placed: Iterable[Placed], allow_rounding: bool) -> None:
    wrong: dict[str, None] = {}
    for each in placed:
        into = each.parameter.dtype
        for share in each.slot.shares():
            dtype = checkpoint.tensors[share.name].dtype
            if dtype not in _HOLDS or into not in _HOLDS:
                wrong[f"{share.name} is {_word(dtype)}, the parameter {_word(into)}"] = None
            elif dtype not in _HOLDS[into] and not allow_rounding:
                text = f"{share.name} is {_word(dtype)} and would be rounded to {_word(into)}"
                wrong[f"{text} (allow_rounding=True lets it)"] = None
    _refuse(checkpoint, list(wrong))


def _check_tied(checkpoint: Checkpoint, arch: Architecture, placed: Iterable[Placed]) -> None:
    """Check that an output layer which a tied checkpoint has anyway equals the embedding."""
    if not arch.tied or OUTPUT not in checkpoint.tensors:
        return
    for each in placed:
        for share in each.slot.shares():
            if share.name != EMBEDDING:
                continue
            both = [_read(checkpoint, share._replace(name=name)) for name in (EMBEDDING, OUTPUT)]
            if not torch.equal(*both):
                _refuse(checkpoint, [f"tie_word_embeddings is true and {OUTPUT} is another weight"])


def _refuse(checkpoint: Checkpoint, wrong: Sequence[str]) -> None:
    if wrong:
        raise CheckpointMismatch(
            f"{checkpoint.directory} does not fit the model in {len(wrong)} places: {listed(wrong)}"
        )


def _fill(checkpoint: Checkpoint, placed: Iterable[Placed]) -> None:
    with torch.no_grad():
        for each in placed:
            view = each.view
            for start, size in each.slot.padding():
                view.narrow(each.slot.dim, start, size).zero_()
            for share in each.slot.shares():
                rows, at = _read(checkpoint, share), 0
                for start, size in share.segments:
                    view.narrow(share.dim, start, size).copy_(rows.narrow(share.dim, at, size))
                    at += size


def _read(checkpoint: Checkpoint, share: SlotPart) -> torch.Tensor:
    return checkpoint.read(share.name, dim=share.dim, start=share.start, size=share.size)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def build_gpt(
    arch: Architecture,
    config: Any,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    max_positions: int | None = None,
    change_spec: Callable[[Any], Any] | None = None,
    **model: Any,
) -> Any:
    """Return one stage of a `GPTModel`, with random weights; `load_hf` puts in the checkpoint's.

    Args:
        arch: the checkpoint's model.
        config: the result of `arch.transformer_config()`.
        pre_process: True if the stage has the embedding.
        post_process: True if the stage has the last norm and the output layer.
        vp_stage: the virtual stage in an interleaved schedule. Before 0.13 the caller sets it as a
            global of Megatron's.
        max_positions: the length of the longest sequence; None for the checkpoint's.
        change_spec: returns the spec of a layer to use, given that of Transformer Engine if it is
            installed, else Megatron's own.
        model: other arguments of GPTModel, such as `parallel_output`.
    """
    from megatron_idempotent.megatron.layer_specs import gpt_stage

    scaling: dict[str, Any] = {}
    if arch.rope_factor is not None:
        scaling = {"rope_scaling": True, "rope_scaling_factor": arch.rope_factor}
    return gpt_stage(
        config,
        vp_stage=vp_stage,
        change_spec=change_spec,
        fused=importlib.util.find_spec("transformer_engine") is not None,
        vocab_size=arch.padded_vocab_size(config.tensor_model_parallel_size),
        max_sequence_length=max_positions or arch.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        **scaling,
        **model,
    )
