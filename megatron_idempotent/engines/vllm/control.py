"""The commands that the client needs of a vLLM, over HTTP or in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron_idempotent.engines.protocol import PauseMode

SERVER_HELP = (
    "start the server with VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --weight-transfer-config "
    '\'{"backend": "megatron_idempotent"}\' and --worker-extension-cls '
    "megatron_idempotent.engines.vllm.worker.StagingExtension, on a private network only"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Seconds after which a call is an `EngineTimeout`. Example: `Timeouts(commit_s=600)`."""

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
    """Without a bucket, after which workers give up an update whose trainer is gone."""
    health_s: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"Timeouts() got {field.name}={value}; allowed: seconds above 0")


class Control(Protocol):
    """Commands to one vLLM. All raise EngineDead, EngineTimeout, EngineUnsupported, EngineError."""

    async def rpc(self, command: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Sends a command of `Inbox.answer` to each worker; returns their answers."""
        ...

    async def alive(self) -> None:
        """Raises where it is not."""
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
