"""A load by slime that fails on one rank leaves the others waiting.

Symptom:
    One rank cannot read the checkpoint's folder, or does not see it. It raises, and the others
    wait for it until their collective's timeout.

Cause:
    In slime's `load_checkpoint` each rank checks the folder and its contents separately, and then
    calls Megatron's collectives.

Affects:
    Every release that has `slime.backends.megatron_utils.checkpoint.load_checkpoint`, and main of
    August 2026. What the patch does: ranks exchange failures when Megatron's load begins
    (`spoilt-checkpoint-ends-well`) and at the end; if one has failed, all raise. All ranks must
    call it.

Upstream:
    https://github.com/THUDM/slime/blob/main/slime/backends/megatron_utils/checkpoint.py,
    `load_checkpoint`; no thread found.

Remove when:
    it raises on all ranks if one fails.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches import _checkpoints
from megatron_idempotent.patches._case import Patch, program, shared_folder, target

_MODULE = "slime.backends.megatron_utils.checkpoint"


def reproduce() -> None:
    """Load with slime while rank 1 cannot open files.
    Without the patch rank 1 raises, and rank 0 waits for it.
    """
    _checkpoints.expect_told(_saved())


def control() -> object:
    """Load a checkpoint with slime, as a control; return its iteration."""
    return _saved()()[0]


def _saved() -> Any:
    """Save with Megatron, and return a function that loads the checkpoint with slime."""
    from ._standins import import_alone

    slime = import_alone(_MODULE)  # before Megatron, as slime's program does
    from megatron.training import checkpointing

    running = program(["--ckpt-format", "torch", "--no-save-optim", "--no-load-optim"])
    running.args.save = running.args.load = shared_folder()
    checkpointing.save_checkpoint(3, running.chunks, None, None, 0)
    return lambda: slime.load_checkpoint(running.chunks, None, None, {}, False)


PATCH = Patch(
    "a load by slime that fails on one rank leaves the others waiting",
    target(f"{_MODULE}:load_checkpoint", _checkpoints.load, "_load_checkpoint_megatron"),
    since="0.1",
    loudness="loud",
)
