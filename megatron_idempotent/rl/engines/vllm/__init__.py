"""Makes vLLM a rollout engine: over HTTP or in process, with a plugin for its workers."""

from .control import Timeouts
from .http import VllmEngine
from .local import VllmLocalEngine
from .server import CPU_ENVIRONMENT, VllmServer

__all__ = ["CPU_ENVIRONMENT", "Timeouts", "VllmEngine", "VllmLocalEngine", "VllmServer"]
