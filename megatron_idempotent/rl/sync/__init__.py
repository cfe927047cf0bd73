"""Brings new weights to serving engines: stages them beside the old ones, switches in a pause."""

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
