"""Once a run began from `--pretrained-checkpoint`, it cannot be rolled back to a checkpoint.

Symptom:
    A run that began with the weights of `--pretrained-checkpoint`, saved, and loads in place:
    `load_checkpoint` returns iteration 0, and optimizer, scheduler and random states stay what they
    are. Only the weights are those of the checkpoint. No error.

Cause:
    The first load sets `args.finetune`, because there was nothing to resume, and leaves it set.

Affects:
    Every release. Releases before 0.17 carry `megatron.training` in a source checkout only.
    Megatron-Bridge does the same with `cfg.checkpoint.finetune`, which this does not reach. What
    the patch does: after a load `args.finetune` is what the user has set.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/training/checkpointing.py,
    `load_checkpoint`; no thread found.

Remove when:
    `load_checkpoint` leaves `args.finetune` as it was.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, program, target


def load_checkpoint(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Load, and let `args.finetune` be what it was before."""
    from megatron.training import get_args

    options = get_args()
    asked_for = options.finetune
    try:
        return original(*args, **kwargs)
    finally:
        options.finetune = asked_for


def reproduce() -> None:
    """Begin from a pretrained checkpoint, save a step, and go back to it."""
    import tempfile
    from pathlib import Path

    from megatron.training import checkpointing

    running = program(["--ckpt-format", "torch"])
    whole = [running.chunks, running.optimizer, running.scheduler]
    with tempfile.TemporaryDirectory() as folder:
        running.args.save = running.args.pretrained_checkpoint = str(Path(folder, "pretrained"))
        running.train(1)
        checkpointing.save_checkpoint(1, *whole, 0)
        running.args.save = running.args.load = str(Path(folder, "run"))
        running.load()
        checkpointing.save_checkpoint(1, *whole, 0)
        iteration = running.load()
    if iteration != 1:
        raise Fault(f"saved at iteration 1, loaded at iteration {iteration}")


PATCH = Patch(
    "after a start from pretrained_checkpoint each load resets iteration, not optimizer",
    target("checkpointing.load_checkpoint", load_checkpoint, "args.finetune = True"),
    ranks=1,
)
