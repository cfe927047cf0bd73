"""vLLM as a rollout engine: over HTTP, in process, and the plugin for its workers."""

from .control import Timeouts
from .http import VllmEngine
from .local import VllmLocalEngine
from .server import CPU_ENVIRONMENT, VllmServer

__all__ = ["CPU_ENVIRONMENT", "Timeouts", "VllmEngine", "VllmLocalEngine", "VllmServer"]
