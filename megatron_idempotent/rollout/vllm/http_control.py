"""Pausing and updating a vLLM server: its endpoints for reinforcement learning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_idempotent.rollout.errors import EngineError, EngineUnsupported
from megatron_idempotent.rollout.records import PauseMode

from .calls import Calls
from .control import Timeouts
from .plugin import EXTENSION

_PATHS = (
    "/abort_requests",
    "/collective_rpc",
    "/finish_weight_update",
    "/is_paused",
    "/pause",
    "/reset_encoder_cache",
    "/reset_prefix_cache",
    "/resume",
    "/start_weight_update",
    "/update_weight_version",
    "/update_weights",
    "/weight_info",
)


class HttpControl:
    """A `Control` over HTTP. Example: `HttpControl(calls, Timeouts(), engine="a")`."""

    def __init__(self, calls: Calls, timeouts: Timeouts, *, engine: str) -> None:
        self._calls, self._timeouts, self._engine = calls, timeouts, engine

    async def rpc(self, command: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        await self._calls.need(*_PATHS, timeout_s=self._timeouts.control_s)
        body = {"method": "megatron_idempotent", "args": [json.dumps(command)]}
        try:
            answer = await self._calls.post(
                "/collective_rpc", body, timeout_s=self._timeouts.control_s
            )
        except EngineError as error:
            if "no attribute 'megatron_idempotent'" in str(error):
                raise EngineUnsupported(
                    f"engine {self._engine} was started without --worker-extension-cls "
                    f"{EXTENSION}; start it with it"
                ) from error
            raise
        results: list[Mapping[str, Any]] = answer["results"]
        return results

    async def alive(self) -> None:
        await self._calls.get("/health", timeout_s=self._timeouts.health_s)

    async def pause(self, mode: PauseMode) -> None:
        limit_s = self._timeouts.wait_s if mode == "wait" else self._timeouts.control_s
        await self._calls.post("/pause", timeout_s=limit_s, mode=mode, clear_cache="false")

    async def resume(self) -> None:
        await self._calls.post("/resume", timeout_s=self._timeouts.control_s)

    async def is_paused(self) -> bool:
        await self._calls.need(*_PATHS, timeout_s=self._timeouts.control_s)
        answer = await self._calls.get("/is_paused", timeout_s=self._timeouts.control_s)
        return bool(answer["is_paused"])

    async def reset_caches(self) -> None:
        limit_s = self._timeouts.control_s
        answer = await self._calls.post(
            "/reset_prefix_cache",
            timeout_s=limit_s,
            reset_running_requests="true",
            reset_external="true",
        )
        if answer is not None and not answer["success"]:
            raise EngineError(
                f"engine {self._engine} could not forget its key-value cache, which the weights "
                "before were used for; try again"
            )
        await self._calls.post("/reset_encoder_cache", timeout_s=limit_s)

    async def start_update(self) -> None:
        await self._calls.post("/start_weight_update", timeout_s=self._timeouts.control_s)

    async def update(self, info: Mapping[str, Any]) -> None:
        await self._calls.post(
            "/update_weights", {"update_info": dict(info)}, timeout_s=self._timeouts.commit_s
        )

    async def finish_update(self, stamp: str) -> None:
        await self._calls.post(
            "/finish_weight_update", {"weight_version": stamp}, timeout_s=self._timeouts.commit_s
        )

    async def stamp(self) -> str:
        answer = await self._calls.get("/weight_info", timeout_s=self._timeouts.control_s)
        return str(answer["weight_version"])

    async def set_stamp(self, stamp: str) -> None:
        await self._calls.post(
            "/update_weight_version",
            {"new_version": stamp},
            timeout_s=self._timeouts.control_s,
        )
