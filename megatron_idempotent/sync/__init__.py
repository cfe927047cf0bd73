"""New weights for engines that are serving: staged beside the old ones, switched under a pause."""

from megatron_idempotent.lazy import naming_the_remedy

with naming_the_remedy(__name__):
    from .records import (
        EngineOutcome,
        Outcome,
        Phase,
        PhaseTimer,
        SyncError,
        SyncFailed,
        SyncReport,
        SyncSettings,
    )
    from .weight_sync import WeightSync, follow

__all__ = [
    "EngineOutcome",
    "Outcome",
    "Phase",
    "PhaseTimer",
    "SyncError",
    "SyncFailed",
    "SyncReport",
    "SyncSettings",
    "WeightSync",
    "follow",
]
