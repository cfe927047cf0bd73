"""Engines that sample responses and take new weights while they do: one protocol for all."""

from .errors import EngineDead, EngineError, EngineTimeout, EngineUnsupported
from .protocol import ColocatedEngine, RolloutEngine
from .records import EngineHealth, FinishReason, PauseMode, Request, Sample

__all__ = [
    "ColocatedEngine",
    "EngineDead",
    "EngineError",
    "EngineHealth",
    "EngineTimeout",
    "EngineUnsupported",
    "FinishReason",
    "PauseMode",
    "Request",
    "RolloutEngine",
    "Sample",
]
