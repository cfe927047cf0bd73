"""Megatron-Bridge, started from a pretrained checkpoint, drops the optimizer of every later load.

Symptom:
    A run begins with `pretrained_checkpoint`, saves, and is restarted in its process, or loads its
    own checkpoint: the weights come back, but the step is 0, and moments, scheduler and random
    states are not loaded. No error.

Cause:
    Where `checkpoint.load` has no checkpoint yet, `load_checkpoint` takes the pretrained one and
    sets `checkpoint.finetune`, for ever: the configuration belongs to the caller, and a restart in
    the process keeps it.

Affects:
    Every release, read from 0.3.0 to 0.6.0, and main of August 2026. Runs with PEFT are not
    affected: there `setup` sets it back. What the patch does: after `load_checkpoint` the setting
    is what it was before.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/checkpointing.py,
    `load_checkpoint`; no thread found.

Remove when:
    `load_checkpoint` decides for itself alone, or sets the option back.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, target


def load(original: Original, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `load_checkpoint`, and leave `checkpoint.finetune` as it was."""
    checkpoint = state.cfg.checkpoint
    before = checkpoint.finetune
    try:
        return original(state, *args, **kwargs)
    finally:
        checkpoint.finetune = before


def reproduce() -> None:
    """Start from a pretrained checkpoint, save step 4, and load it in the same process."""
    import tempfile
    from pathlib import Path

    from ._bridge import Checkpoints

    run = Checkpoints.after_a_step()
    with tempfile.TemporaryDirectory() as folder:
        own, pretrained = (str(Path(folder, name)) for name in ("own", "pretrained"))
        run.save(pretrained)
        run.checkpoint.pretrained_checkpoint = pretrained
        run.load(own)
        run.state.train_state.step = 4
        run.save(own)
        run.load(own)
        if run.state.train_state.step != 4:
            raise Fault(f"step 4 was saved, and step {run.state.train_state.step} is loaded")


PATCH = Patch(
    "Megatron-Bridge, once started from a pretrained checkpoint, loads no optimizer again",
    target("bridge.training.checkpointing:load_checkpoint", load, "cfg.checkpoint.finetune = True"),
    since="0.3",
    ranks=1,
)
