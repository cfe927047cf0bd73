"""Makes vLLM a rollout engine, over HTTP, with a plugin for its workers."""

from .control import Timeouts
from .engine import VllmEngine
from .server import CPU_ENVIRONMENT, VllmServer

__all__ = ["CPU_ENVIRONMENT", "Timeouts", "VllmEngine", "VllmServer"]
