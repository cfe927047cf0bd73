"""vLLM as a rollout engine: over HTTP, in process, and the plugin for its workers."""

from .control import Timeouts
from .http import VllmEngine
from .launch import CPU_ENVIRONMENT, VllmServer
from .local import VllmLocalEngine

__all__ = ["CPU_ENVIRONMENT", "Timeouts", "VllmEngine", "VllmLocalEngine", "VllmServer"]
