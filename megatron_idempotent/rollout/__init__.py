"""Engines that sample responses and take new weights while they do: one protocol for all."""

from megatron_idempotent.missing import naming_the_remedy

with naming_the_remedy(__name__):
    from .errors import EngineDead, EngineError, EngineTimeout, EngineUnsupported
    from .pool import EnginePool
    from .protocol import ColocatedEngine, RolloutEngine
    from .records import EngineHealth, FinishReason, PauseMode, Request, Sample
    from .resubmit import generate_whole

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
