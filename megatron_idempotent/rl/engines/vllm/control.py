"""Defines the commands that the client gives to a vLLM, over HTTP or in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron_idempotent.rl.engines.protocol import PauseMode

SERVER_HELP = (
    "start the server with VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --weight-transfer-config "
    '\'{"backend": "megatron_idempotent"}\' and --worker-extension-cls '
    "megatron_idempotent.rl.engines.vllm.worker.StagingExtension, on a private network only"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Limits calls, in seconds; longer ones end with `EngineTimeout`. Example: `Timeouts()`."""

    generate_s: float | None = None
    """Seconds for one response, waiting while the engine is paused included; None for ever."""
    control_s: float = 60.0
    """Seconds for one short command, such as pause or resume."""
    wait_s: float = 1800.0
    """Seconds for a pause in mode "wait": until running requests have ended."""
    commit_s: float = 600.0
    """Seconds for loading staged weights into the model."""
    bucket_s: float = 300.0
    """Seconds from announcing a bucket until all workers have it."""
    silence_s: float = 300.0
    """Seconds without a bucket after which workers take the trainer for gone, and give up."""
    health_s: float = 10.0
    """Seconds for an answer to `health`."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"Timeouts() got {field.name}={value}; allowed: seconds above 0")


class Control(Protocol):
    """Gives commands to one vLLM.

    All raise `EngineDead`, `EngineTimeout`, `EngineUnsupported` or `EngineError`.
    """

    async def rpc(self, command: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Sends a command of `Inbox.answer` to each worker; returns their answers."""
        ...

    async def alive(self) -> None:
        """Raise an error unless vLLM is alive."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens; caches stay."""
        ...

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    async def reset_caches(self) -> None:
        """Drops what was computed from weights; running requests compute it again."""
        ...

    async def start_update(self) -> None: ...

    async def update(self, info: Mapping[str, Any]) -> None: ...

    async def finish_update(self, stamp: str) -> None: ...

    async def stamp(self) -> str:
        """Returns the stamp of tokens that are drawn now."""
        ...

    async def set_stamp(self, stamp: str) -> None: ...
