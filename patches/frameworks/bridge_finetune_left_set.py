"""Megatron-Bridge, started from a pretrained checkpoint, skips the optimizer in every later load.

Symptom:
    A run begins with `pretrained_checkpoint`, saves, and is restarted in its process, or loads its
    own checkpoint: the weights are loaded, but the step is 0, and moments, scheduler and random
    states are not loaded. No error.

Cause:
    If `checkpoint.load` has no checkpoint yet, `load_checkpoint` loads the pretrained one and sets
    `checkpoint.finetune` permanently: the configuration belongs to the caller, and a restart in the
    process keeps it.

Affects:
    Every release, read from 0.3.0 to 0.6.0, and main of August 2026. Runs with PEFT are not
    affected, because `setup` resets it. What the patch does: after `load_checkpoint` the setting
    has its earlier value.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/checkpointing.py,
    `load_checkpoint`; no thread found.

Remove when:
    `load_checkpoint` does not change the option, or restores it.
    `upstream/bridge-finetune-left-set` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, address, target


def load(original: Original, state: Any, *args: Any, **kwargs: Any) -> Any:
    """Run Bridge's `load_checkpoint`, then restore `checkpoint.finetune`, which it may have set."""
    checkpoint = state.cfg.checkpoint
    finetune = checkpoint.finetune
    try:
        return original(state, *args, **kwargs)
    finally:
        checkpoint.finetune = finetune


def reproduce() -> None:
    """Start from a pretrained checkpoint, save step 4, and load it in the same process.
    Without the patch the load returns step 0.
    """
    import tempfile
    from pathlib import Path

    from ._bridge import Checkpoints

    run = Checkpoints.after_a_step()
    with tempfile.TemporaryDirectory() as folder:
        resumed, pretrained = (str(Path(folder, name)) for name in ("own", "pretrained"))
        run.save(pretrained)
        run.checkpoint.pretrained_checkpoint = pretrained
        run.load(resumed)
        run.state.train_state.step = 4
        run.save(resumed)
        run.load(resumed)
        if run.state.train_state.step != 4:
            raise Fault(f"step 4 was saved, and step {run.state.train_state.step} is loaded")


PATCH = Patch(
    "Megatron-Bridge, once started from a pretrained checkpoint, loads no optimizer again",
    target("bridge.training.checkpointing:load_checkpoint", load, "cfg.checkpoint.finetune = True"),
    since="0.3",
    fixed_by=(
        (
            address("bridge.training.checkpointing:load_checkpoint"),
            "cfg.checkpoint.finetune = finetune",
        ),
    ),
    ranks=1,
)
