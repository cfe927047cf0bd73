"""A save or load by Megatron-Bridge that fails on one rank leaves the others waiting.

Symptom:
    One rank cannot open a file of the checkpoint, or rank 0 cannot write one. It raises, and the
    others wait for it until their collective's timeout.

Cause:
    Each rank reads the common state in `_load_base_checkpoint` by itself; if one fails, the others
    go on to a broadcast of the run's configuration. `save_checkpoint` writes files on rank 0, and
    calls barriers after them.

Affects:
    Every release, read from 0.3.0 to 0.6.0, and main of August 2026. NeMo-RL calls these functions.
    What the patch does: ranks exchange failures after they have read the common state, at barriers
    and at the end; if one has failed, all raise. All ranks must call saves and loads.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/checkpointing.py,
    `_load_base_checkpoint`; no thread found.

Remove when:
    both raise on all ranks if one fails.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches import _checkpoints
from megatron_idempotent.patches._case import Original, Patch, shared_folder, target


def load_base(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap Bridge's read of the common state: raise on all ranks if one of them failed."""
    from megatron_idempotent.window import agreement

    loaded = original(*args, **kwargs)
    agreement.meet(_checkpoints.UNCHANGED)
    return loaded


def reproduce() -> None:
    """Load with Bridge while rank 1 cannot open files.
    Without the patch rank 1 raises, and rank 0 waits for it.
    """
    run, folder = _saved()
    _checkpoints.expect_told(lambda: run.load(folder))


def control() -> object:
    """Save with Bridge, zero the weights, and load, as a control; return the weights' bytes."""
    run, folder = _saved()
    return _checkpoints.loaded_over(run.held[0][0].parameters(), lambda: run.load(folder))


def _saved() -> tuple[Any, str]:
    from ._bridge import Checkpoints

    run, folder = Checkpoints.after_a_step(), shared_folder()
    run.save(folder)
    return run, folder


PATCH = Patch(
    "a save or load by Megatron-Bridge that fails on one rank leaves the others waiting",
    target(
        "bridge.training.checkpointing:load_checkpoint",
        _checkpoints.load,
        "_load_checkpoint_from_path",
    ),
    target("bridge.training.checkpointing:_load_base_checkpoint", load_base, "load_dir"),
    target(
        "bridge.training.checkpointing:save_checkpoint",
        _checkpoints.save,
        "torch.distributed.barrier()",
    ),
    since="0.3",
    loudness="loud",
)
