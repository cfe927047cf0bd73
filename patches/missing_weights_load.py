"""Weights that a checkpoint lacks stay random, even with `strict=True`.

Symptom:
    A model with a layer, head or adapter that the checkpoint does not have loads it, and keeps the
    initial values of these weights. The log shows "load_return: None", and names no weight.

Cause:
    If loading with `strict=True` raises, `load_checkpoint` loads again with `strict=False`, because
    of "extra states" of Transformer Engine.

Affects:
    Every release, with `--ckpt-format torch`, and with `--dist-ckpt-strictness log_all` and other
    values with which the distributed format accepts missing weights. Releases before 0.17 carry
    `megatron.training` in a source checkout only. Megatron-Bridge has a copy of this code, which
    this patch does not repair. What the patch does: only extra states may be missing or unexpected.
    For other names the load raises, or warns with the names if `--dist-ckpt-strictness` allows
    them. An error of a load with `strict=False` is raised on all ranks. Megatron-FSDP is left as it
    is.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/6032 is about Megatron-Bridge's copy.

Remove when:
    the second load of `load_checkpoint` raises for all names but those of extra states.
    `upstream/missing-weights-load` has the repair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ._case import Fault, Original, Patch, address, arguments, program, target


def load_checkpoint(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap a load: raise an error that names weights which the checkpoint lacks, on all ranks.
    Upstream loads again with `strict=False` after a failed strict load, and ends without an error.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module
    from megatron.training import get_args

    from megatron_idempotent.window import agreement

    call = arguments(original, args, kwargs)
    # Up to 0.18 upstream itself is not strict if a retriever is added to a model.
    strict = call["strict"] and not getattr(get_args(), "retro_add_retriever", False)
    dropped: list[Exception] = []
    load = _load if strict else functools.partial(_load_not_strictly, dropped)
    chunks = [
        chunk
        for chunk in call["ddp_model"]
        if isinstance(chunk, (DistributedDataParallel, Float16Module))
    ]
    for chunk in chunks:
        vars(chunk)["load_state_dict"] = functools.partial(load, chunk)
    with agreement.as_one("Ranks have loaded the rest."):
        try:
            loaded = original(*args, **kwargs)
        finally:
            for chunk in chunks:
                del vars(chunk)["load_state_dict"]
        if dropped:
            raise dropped[0]
    return loaded


def _load_not_strictly(
    dropped: list[Exception], chunk: Any, state_dict: dict[str, Any], strict: bool
) -> None:
    try:
        type(chunk).load_state_dict(chunk, state_dict, strict=strict)
    except Exception as error:
        dropped.append(error)
        raise


def _load(chunk: Any, state_dict: dict[str, Any], strict: bool) -> None:
    import logging

    from megatron.training import get_args
    from megatron.training.checkpointing import unwrap_model

    if strict:
        type(chunk).load_state_dict(chunk, state_dict, strict=True)
        return
    missing, unexpected = unwrap_model(chunk).load_state_dict(state_dict, strict=False)
    wrong = {
        verb: [name for name in names if not name.endswith("_extra_state")]
        for verb, names in (("lacks", missing), ("has unexpected", unexpected))
    }
    mismatch = "; ".join(f"{verb} {', '.join(names)}" for verb, names in wrong.items() if names)
    if not mismatch:
        return
    message = f"a checkpoint loaded with strict=True {mismatch}"
    if get_args().dist_ckpt_strictness == "assume_ok_unexpected":
        raise RuntimeError(f"{message}; pass strict=False to load the rest")
    logging.getLogger("megatron_idempotent").warning("%s", message)


def _program() -> Any:
    return program(["--ckpt-format", "torch", "--no-save-optim", "--no-load-optim"])


def _load_changed(
    running: Any, change: Callable[[dict[str, Any]], Any], *, strict: bool = True
) -> None:
    """Save the model, apply `change` to the model's state dict in the file, and load the file."""
    import tempfile
    from pathlib import Path

    import torch
    from megatron.training import checkpointing

    with tempfile.TemporaryDirectory() as folder:
        running.args.save = running.args.load = folder
        checkpointing.save_checkpoint(1, running.chunks, None, None, 0)
        (path,) = Path(folder).glob("iter_*/*/*.pt")
        saved = torch.load(path, weights_only=False)
        change(saved["model"])
        torch.save(saved, path)
        checkpointing.load_checkpoint(running.chunks, None, None, strict=strict)


def reproduce() -> None:
    """Load a checkpoint that lacks a weight, and one that has only every second row of it.
    On stock Megatron both loads end without an error.
    """
    name = "embedding.word_embeddings.weight"
    spoilt: dict[str, Callable[[dict[str, Any]], Any]] = {
        f"lacks {name}": lambda saved: saved.pop(name),
        f"size mismatch for {name}": lambda saved: saved.update({name: saved[name][::2]}),
    }
    running = _program()
    for fault, change in spoilt.items():
        try:
            _load_changed(running, change, strict=fault.startswith("lacks"))
        except RuntimeError as error:
            if fault not in str(error):
                raise
        else:
            raise Fault(f"a checkpoint was loaded without an error: {fault}")


def control() -> object:
    """Load a checkpoint with one more `_extra_state`, as a control; return the parameters."""
    running = _program()
    extra = "decoder.final_layernorm._extra_state"
    _load_changed(running, lambda saved: saved.update({extra: None}))
    return running.parameters().numpy().tobytes()


PATCH = Patch(
    "a load with strict=True leaves weights random that the checkpoint lacks",
    target(
        "checkpointing.load_checkpoint",
        load_checkpoint,
        "module.load_state_dict(state_dict, strict=strict)",
        "load_return = module.load_state_dict(state_dict, strict=False)",
    ),
    ranks=1,
    fixed_by=(
        (
            address("checkpointing.load_checkpoint"),
            "args.dist_ckpt_strictness.startswith(('assume_ok', 'raise'))",
        ),
    ),
)
