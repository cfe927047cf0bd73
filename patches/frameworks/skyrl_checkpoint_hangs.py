"""A save or load by SkyRL that fails on one rank leaves the others waiting.

Symptom:
    One rank cannot make the checkpoint's folder, cannot look into it, or does not see it. It
    raises, and the others wait for it until their collective's timeout.

Cause:
    `MegatronStrategy.save_checkpoint` has a barrier after one rank of each node has made the
    folder. `load_checkpoint` looks for the folder, and reads which format it has, on each rank
    alone, and then calls Megatron, where ranks meet.

Affects:
    Main of August 2026. What the patch does: ranks tell each other whether they have failed, at
    that barrier, where Megatron begins to load (`failed-load-half-done`) and at the end, and all
    raise. Saves and loads must be called on all ranks.

Upstream:
    https://github.com/NovaSky-AI/SkyRL/blob/main/skyrl/backends/skyrl_train/distributed/megatron/megatron_strategy.py,
    `MegatronStrategy.load_checkpoint`; no thread found.

Remove when:
    both raise on all ranks where one fails.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches import _checkpoints
from megatron_idempotent.patches._case import Patch, bench, shared_folder, target

from ._skyrl import STRATEGY


def reproduce() -> None:
    """Load where rank 1 cannot open files."""
    folder, strategy, held = _saved()
    _checkpoints.expect_told(lambda: strategy.load_checkpoint(held, folder))


def neighbour() -> object:
    """Save, write over the weights, and load; return the weights."""
    folder, strategy, held = _saved()
    weights = held.actor_module[0].parameters()
    return _checkpoints.loaded_over(weights, lambda: strategy.load_checkpoint(held, folder))


def _saved() -> tuple[str, Any, Any]:
    from ._skyrl import import_strategy, strategy_of

    import_strategy()  # before Megatron, as SkyRL's program does
    strategy, held = strategy_of(bench().chunks)
    folder = shared_folder()
    strategy.save_checkpoint(held, folder, 0)
    return folder, strategy, held


_OF = f"{STRATEGY}:MegatronStrategy"
PATCH = Patch(
    "a save or load by SkyRL that fails on one rank leaves the others waiting",
    target(f"{_OF}.load_checkpoint", _checkpoints.load, "dist_checkpointing.load"),
    target(f"{_OF}.save_checkpoint", _checkpoints.save, "dist.barrier()"),
    since="0.1",
)
