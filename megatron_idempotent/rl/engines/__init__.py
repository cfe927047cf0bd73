"""Drives engines, which sample responses and take new weights meanwhile, by one protocol."""

from megatron_idempotent.lazy import naming_the_remedy

with naming_the_remedy(__name__):
    from .pool import EnginePool, generate_whole
    from .protocol import (
        ColocatedEngine,
        EngineDead,
        EngineError,
        EngineHealth,
        EngineTimeout,
        EngineUnsupported,
        FinishReason,
        PauseMode,
        Request,
        RolloutEngine,
        Sample,
    )

__all__ = [
    "ColocatedEngine",
    "EngineDead",
    "EngineError",
    "EngineHealth",
    "EnginePool",
    "EngineTimeout",
    "EngineUnsupported",
    "FinishReason",
    "PauseMode",
    "Request",
    "RolloutEngine",
    "Sample",
    "generate_whole",
]
