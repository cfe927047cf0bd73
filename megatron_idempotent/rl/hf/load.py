"""Builds pipeline stages for a Hugging Face checkpoint, and loads their slices of the weights."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_idempotent.megatron.ddp import innermost
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
    """Return the slots of all parameters in this rank's chunks: for each parameter, the parts of
    Hugging Face tensors that make up the parameter. Raise `CheckpointMismatch` if the model does
    not match `arch`.

    Args:
        chunks: GPTModels, in any wrappers.
        arch: the checkpoint's architecture.
        lora: the chunks' adapters, to return only their slots; None for a model without adapters.

    Raises:
        CheckpointMismatch: the chunks are not of this architecture; the message lists parameters
            without a counterpart or with another shape, and tensors without a parameter.
    """
    names = Names(arch, Ranks.here(), lora)
    placed: list[Placed] = []
    wrong: list[str] = []
    for chunk in chunks:
        model = innermost(chunk)
        slots_of_chunk = _of_chunk(model, names, wrong)
        placed += slots_of_chunk
        wrong += _unused(model, names, slots_of_chunk)
    if wrong:
        raise CheckpointMismatch(f"the model is not the checkpoint's {arch.name}: {listed(wrong)}")
    return placed


def _of_chunk(model: Any, names: Names, wrong: list[str]) -> list[Placed]:
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    config, arch = model.config, names.arch
    for field, actual, expected in (
        ("num_layers", config.num_layers, arch.layers),
        ("num_moe_experts", config.num_moe_experts or 0, arch.experts),
        # Interleaving would alternate rows of the gate and the up projection.
        ("moe_mlp_glu_interleave_size", getattr(config, "moe_mlp_glu_interleave_size", None), None),
    ):
        if actual != expected:
            wrong.append(f"{field}={actual}, the checkpoint has {expected}")
    if wrong:
        return []
    placed = []
    for name, parameter in model.named_parameters():
        if names.lora is not None and ".adapter." not in name:
            continue
        match = _LAYER.match(name)
        mlp = model.decoder.layers[int(match[1])].mlp if match else None
        experts = getattr(mlp, "local_expert_indices", ())
        slots = names.slots(name, parameter.shape[0], layers=layers, experts=experts)
        if not slots:
            wrong.append(f"{name} {list(parameter.shape)} has no counterpart")
        for slot in slots:
            placed_slot = Placed(slot, parameter)
            problem = _misshapen(placed_slot, names)
            if problem is None:
                placed.append(placed_slot)
            else:
                wrong.append(problem)
    return placed


def _misshapen(placed: Placed, names: Names) -> str | None:
    slot = placed.slot
    name = next(block.name for block in slot.blocks if block.name is not None)
    shape = list(names.shapes[name])
    shape[slot.dim] = slot.size // slot.count
    actual = list(placed.parameter.shape)
    if slot.grouped is not None:
        (rows, columns), experts = shape, slot.grouped[1]
        shape = [columns, rows * experts] if slot.dim == 0 else [columns * experts, rows]
    if slot.size % slot.count == 0 and actual == shape:
        return None
    return f"{slot.parameter} is {actual}, shard {slot.rank} of {slot.count} has {shape}"


def _unused(model: Any, names: Names, placed: Sequence[Placed]) -> list[str]:
    """Return an error text for each Hugging Face tensor that no parameter of this chunk takes,
    although the tensor belongs to a layer of the chunk, or to the chunk's embedding, last norm or
    output layer.
    """
    layers = {f"model.layers.{layer.layer_number - 1}.": layer for layer in model.decoder.layers}
    mapped = {block.name for slot_of_parameter in placed for block in slot_of_parameter.slot.blocks}
    expected = [EMBEDDING] if model.pre_process else []
    expected += [NORM] if model.post_process else []
    expected += [OUTPUT] if model.post_process and not names.arch.tied else []
    expected = [name for name in expected if name in names.shapes]
    for name in names.shapes:
        layer_match = re.search(r"model\.layers\.\d+\.", name)
        if layer_match is None or layer_match[0] not in layers:
            continue
        expert = _EXPERT.search(name)
        local_experts = getattr(layers[layer_match[0]].mlp, "local_expert_indices", ())
        if expert is None or int(expert[1]) in local_experts:
            expected.append(name)
    return [f"no parameter takes {name}" for name in expected if name not in mapped]


#: For each dtype, the dtypes whose values it represents exactly.
_HOLDS = {
    torch.float64: {torch.float64, torch.float32, torch.float16, torch.bfloat16},
    torch.float32: {torch.float32, torch.float16, torch.bfloat16},
    torch.float16: {torch.float16},
    torch.bfloat16: {torch.bfloat16},
}
#: Tables in checkpoints of old transformers releases; they follow from the configuration.
_COMPUTED = ".rotary_emb.inv_freq"


def load_hf(
    directory: str | Path,
    chunks: Sequence[Any],
    *,
    optimizer: Any = None,
    allow_rounding: bool = False,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Load a Hugging Face checkpoint's weights into the parameters of an existing Megatron model,
    in place.

    Each rank reads only its slices, directly into its parameters: no rank needs a full copy, and no
    weights are sent. A collective: all ranks check that no rank has an error, before changes begin
    and at the end. The vocabulary's padding rows become zero. If the chunks are in Megatron's DDP,
    pending parameter gathers are finished first.

    Args:
        directory: the checkpoint, with config.json, and model.safetensors or
            model.safetensors.index.json.
        chunks: this rank's chunks, bare or wrapped in DDP and Float16Module.
        optimizer: Megatron's optimizer, whose float32 master weights are refreshed from the model;
            its moments and step counts stay. Without it, the next step of a half-precision model
            starts from the old master weights.
        allow_rounding: True to round tensors of a wider dtype than the parameters'.
        deadline_s: how long to wait for the slowest rank, including reading, in seconds.

    Raises:
        UnsupportedArchitecture: GPTModel would not compute this checkpoint's model exactly.
        CheckpointDamaged: a file of the checkpoint is missing or damaged.
        CheckpointMismatch: the checkpoint does not fit the model; the message lists all reasons.
        FailedElsewhere: another rank raised one of these. If this happens before the model is
            changed, the message says "nothing was loaded".
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
    """Raise `CheckpointMismatch` unless the checkpoint's tensors have the names and shapes that
    config.json implies; the result is the same on all ranks.
    """
    expected, tensors = hf_shapes(arch), checkpoint.tensors
    wrong = [f"{name} is missing" for name in expected if name not in tensors]
    for name, info in tensors.items():
        tied = name == OUTPUT and arch.tied and info.shape == expected[EMBEDDING]
        if name in expected and info.shape != expected[name]:
            wrong.append(f"{name} is {list(info.shape)}, config.json has {list(expected[name])}")
        elif name not in expected and not tied and not name.endswith(_COMPUTED):
            wrong.append(f"{name} {list(info.shape)} is unexpected")
    _refuse(checkpoint, wrong)


def _check_types(checkpoint: Checkpoint, placed: Iterable[Placed], allow_rounding: bool) -> None:
    wrong: dict[str, None] = {}
    for placed_slot in placed:
        into = placed_slot.parameter.dtype
        for share in placed_slot.slot.shares():
            dtype = checkpoint.tensors[share.name].dtype
            if dtype not in _HOLDS or into not in _HOLDS:
                wrong[f"{share.name} is {_word(dtype)}, the parameter {_word(into)}"] = None
            elif dtype not in _HOLDS[into] and not allow_rounding:
                text = f"{share.name} is {_word(dtype)} and would be rounded to {_word(into)}"
                wrong[f"{text} (allow_rounding=True lets it)"] = None
    _refuse(checkpoint, list(wrong))


def _check_tied(checkpoint: Checkpoint, arch: Architecture, placed: Iterable[Placed]) -> None:
    """Raise `CheckpointMismatch` if a checkpoint with tied embeddings also has an output layer
    whose weight differs from the embedding.
    """
    if not arch.tied or OUTPUT not in checkpoint.tensors:
        return
    for placed_slot in placed:
        for share in placed_slot.slot.shares():
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
        for placed_slot in placed:
            view = placed_slot.view
            for start, size in placed_slot.slot.padding():
                view.narrow(placed_slot.slot.dim, start, size).zero_()
            for share in placed_slot.slot.shares():
                rows, offset = _read(checkpoint, share), 0
                for start, size in share.segments:
                    view.narrow(share.dim, start, size).copy_(rows.narrow(share.dim, offset, size))
                    offset += size


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
    """Build one pipeline stage of Megatron's `GPTModel` with random weights; `load_hf` can then
    load a checkpoint's weights.

    Args:
        arch: the checkpoint's model.
        config: the result of `arch.transformer_config()`.
        pre_process: True if the stage has the embedding.
        post_process: True if the stage has the last norm and the output layer.
        vp_stage: the virtual stage in an interleaved schedule. Before Megatron 0.13, the caller
            must set it in Megatron's parallel state.
        max_positions: the length of the longest sequence; None for the checkpoint's.
        change_spec: returns the layer spec to use, given Transformer Engine's spec if that is
            installed, else Megatron's local spec.
        model: further arguments of GPTModel, such as `parallel_output`.
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
