"""A run that began from `--pretrained-checkpoint` cannot be rolled back to a checkpoint.

Symptom:
    A run begins with the weights of `--pretrained-checkpoint`, saves, and then loads in the same
    process: `load_checkpoint` returns iteration 0, and optimizer, scheduler and random states do
    not change. Only the weights come from the checkpoint. No error.

Cause:
    The first load sets `args.finetune`, because there was nothing to resume, and leaves it set.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only.
    Megatron-Bridge does the same with `cfg.checkpoint.finetune`; for that see
    `bridge-finetune-left-set`. What the patch does: after a load `args.finetune` has the user's
    value again.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/checkpointing.py,
    `load_checkpoint`; no thread found.

Remove when:
    `load_checkpoint` leaves `args.finetune` as it was. `upstream/finetune-left-set` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, program, target


def load_checkpoint(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run upstream's load, then restore `args.finetune`, which it may have set."""
    from megatron.training import get_args

    options = get_args()
    finetune = options.finetune
    try:
        return original(*args, **kwargs)
    finally:
        options.finetune = finetune


def reproduce() -> None:
    """Load a pretrained checkpoint, save a step, and load that step.
    On stock Megatron the last load returns iteration 0: `args.finetune` is still set.
    """
    import tempfile
    from pathlib import Path

    from megatron.training import checkpointing

    running = program(["--ckpt-format", "torch"])
    saved = [running.chunks, running.optimizer, running.scheduler]
    with tempfile.TemporaryDirectory() as folder:
        running.args.save = running.args.pretrained_checkpoint = str(Path(folder, "pretrained"))
        running.train(1)
        checkpointing.save_checkpoint(1, *saved, 0)
        running.args.save = running.args.load = str(Path(folder, "run"))
        running.load()
        checkpointing.save_checkpoint(1, *saved, 0)
        iteration = running.load()
    if iteration != 1:
        raise Fault(f"saved at iteration 1, loaded at iteration {iteration}")


PATCH = Patch(
    "after a start from pretrained_checkpoint each load resets iteration, not optimizer",
    target("checkpointing.load_checkpoint", load_checkpoint, "args.finetune = True"),
    ranks=1,
    fixed_by=((address("checkpointing.load_checkpoint"), "args.finetune = finetune"),),
)
