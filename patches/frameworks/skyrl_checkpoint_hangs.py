"""A save or load by SkyRL that fails on one rank leaves the others waiting.

Symptom:
    One rank cannot create the checkpoint's folder, cannot read it, or does not see it. It
    raises, and the others wait for it until their collective's timeout.

Cause:
    `MegatronStrategy.save_checkpoint` calls a barrier after one rank of each node has created the
    folder. In `load_checkpoint` each rank checks the folder and reads its format separately, and
    then calls Megatron's collectives.

Affects:
    Main of August 2026. What the patch does: ranks exchange failures at that barrier, when Megatron
    begins to load (`failed-load-half-done`) and at the end; if one has failed, all raise. All ranks
    must call saves and loads.

Upstream:
    https://github.com/NovaSky-AI/SkyRL/blob/main/skyrl/backends/skyrl_train/distributed/megatron/megatron_strategy.py,
    `MegatronStrategy.load_checkpoint`; no thread found.

Remove when:
    both raise on all ranks if one fails.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches import _checkpoints
from megatron_idempotent.patches._case import Patch, bench, shared_folder, target

from ._skyrl import STRATEGY


def reproduce() -> None:
    """Load with SkyRL while rank 1 cannot open files.
    Without the patch rank 1 raises, and rank 0 waits for it.
    """
    folder, strategy, model = _saved()
    _checkpoints.expect_told(lambda: strategy.load_checkpoint(model, folder))


def control() -> object:
    """Save with SkyRL, zero the weights, and load, as a control; return the weights' bytes."""
    folder, strategy, model = _saved()
    weights = model.actor_module[0].parameters()
    return _checkpoints.loaded_over(weights, lambda: strategy.load_checkpoint(model, folder))


def _saved() -> tuple[str, Any, Any]:
    from ._skyrl import import_strategy, strategy_of

    import_strategy()  # before Megatron, as SkyRL's program does
    strategy, model = strategy_of(bench().chunks)
    folder = shared_folder()
    strategy.save_checkpoint(model, folder, 0)
    return folder, strategy, model


_OF = f"{STRATEGY}:MegatronStrategy"
PATCH = Patch(
    "a save or load by SkyRL that fails on one rank leaves the others waiting",
    target(f"{_OF}.load_checkpoint", _checkpoints.load, "dist_checkpointing.load"),
    target(f"{_OF}.save_checkpoint", _checkpoints.save, "dist.barrier()"),
    since="0.1",
    loudness="loud",
)
