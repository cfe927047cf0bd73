"""A Hugging Face checkpoint into the chunks of a Megatron model, each rank its own slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_idempotent.window.agreement import DEADLINE_S

from .checkpoint import Checkpoint
from .chunks import Placed, placed_slots, sync
from .errors import CheckpointMismatch, agree_on, listed
from .families import Architecture
from .layout import Share
from .naming import EMBEDDING, OUTPUT, hf_shapes

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
        directory: with config.json, and model.safetensors or model.safetensors.index.json.
        chunks: this rank's chunks, bare or in DDP and Float16Module.
        optimizer: Megatron's, whose float32 master weights are taken from the model again. Its
            moments and steps stay. Left out, a half-precision model's next step would go on from
            the masters that are there.
        allow_rounding: let tensors of a wider type than the parameters be rounded.
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
    sync(chunks)
    with checkpoint:
        try:
            _fill(checkpoint, placed)
        except (ValueError, OSError) as bad:
            error = bad
    agree_on(error, "the model is loaded in part only, load it again", deadline_s=deadline_s)
    if optimizer is not None:
        optimizer.reload_model_params()


def _check_names(checkpoint: Checkpoint, arch: Architecture) -> None:
    """Names and shapes, which are the same for all ranks."""
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
    """An output layer that came although it is tied has to be the embedding."""
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


def _read(checkpoint: Checkpoint, share: Share) -> torch.Tensor:
    return checkpoint.read(share.name, dim=share.dim, start=share.start, size=share.size)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
