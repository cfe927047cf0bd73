"""Gives commands to one vLLM server over HTTP, and turns its failures into errors of engines."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.engines.http import HttpClient, HttpResponse
from megatron_idempotent.rl.engines.protocol import (
    EngineDead,
    EngineError,
    EngineUnsupported,
    PauseMode,
)
from megatron_idempotent.rl.vllm_plugin import EXTENSION

SERVER_HELP = (
    "start the server with VLLM_SERVER_DEV_MODE=1, --enable-scale-out, --weight-transfer-config "
    '\'{"backend": "megatron_idempotent"}\' and --worker-extension-cls '
    f"{EXTENSION}, on a private network only"
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
_DYING_S = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds between the looks at a server that may be dying."""


class BadRequest(EngineError):
    """The server calls the request bad, and would again."""


class Control:
    """Gives commands to one vLLM server.

    All raise `EngineDead`, `EngineTimeout`, `EngineUnsupported` or `EngineError`.
    Example: `await Control("http://127.0.0.1:8000", Timeouts(), engine="a").pause("keep")`.
    """

    def __init__(
        self, url: str, timeouts: Timeouts, *, engine: str, api_key: str | None = None
    ) -> None:
        """Make a client; nothing is sent yet. Errors: `ModuleNotFoundError` without aiohttp."""
        self._client = HttpClient(url, engine=engine, api_key=api_key)
        self.url = self._client.url
        self._timeouts, self._engine = timeouts, engine
        self._schema: Mapping[str, Any] | None = None
        self._asking = asyncio.Lock()

    async def get(self, path: str, *, timeout_s: float | None) -> Any:
        """Return the JSON answer. Errors: as in `post`."""
        return await self._call("GET", path, timeout_s=timeout_s)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None,
        **query: str,
    ) -> Any:
        """Return the JSON answer, or None if it is empty.

        The call is tried once: only its caller knows what a second one would do.

        Errors: `BadRequest`, `EngineDead`, `EngineTimeout`, `EngineUnsupported`, `EngineError`.
        """
        return await self._call("POST", path, body, query, timeout_s=timeout_s)

    async def need(self, *paths: str) -> Mapping[str, Any]:
        """Return the server's OpenAPI schema.

        Errors: `EngineUnsupported` naming the paths it lacks.
        """
        async with self._asking:  # it is long, and a thousand requests may begin at once
            if self._schema is None:
                self._schema = await self._short("GET", "/openapi.json")
        missing = [path for path in paths if path not in self._schema["paths"]]
        if missing:
            raise EngineUnsupported(
                f"{self._client.where} lacks {', '.join(missing)}; {SERVER_HELP}"
            )
        return self._schema

    async def _short(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, **query: str
    ) -> Any:
        return await self._call(method, path, body, query, timeout_s=self._timeouts.control_s)

    async def close(self) -> None:
        """Close the connection. Twice: no-op. Later calls raise `EngineDead`."""
        await self._client.close()

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None,
    ) -> Any:
        answer = await self._client.call(method, path, body, query=query, timeout_s=timeout_s)
        if answer.status == 200:
            return answer.body
        raise await self._failure(path, answer)

    async def _failure(self, path: str, answer: HttpResponse) -> Exception:
        status, message = answer.status, answer.message
        said = f"{self._client.where} answered {path} with {status}: {message}"
        if status == 400 or status == 422:
            return BadRequest(said)
        if status in (403, 404, 405):
            return EngineUnsupported(f"{said}; {SERVER_HELP}")
        if status == 503 or path == "/health":
            return EngineDead(said)
        # A server outlives its engine for a moment, and answers for it. Calls to a worker that dies
        # are cancelled, some time before the server notices what that means.
        for wait_s in _DYING_S if "cancelled" in message else (0.0,):
            await asyncio.sleep(wait_s)
            try:
                await self.get("/health", timeout_s=5.0)
            except EngineError as error:
                return EngineDead(f"{said}; {error}")
        return EngineError(said)

    async def rpc(self, command: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Send a command of `Inbox.answer` to each worker, and return their answers."""
        await self.need(*_PATHS)
        body = {"method": "megatron_idempotent", "args": [json.dumps(command)]}
        try:
            answer = await self._short("POST", "/collective_rpc", body)
        except EngineError as error:
            if "no attribute 'megatron_idempotent'" in str(error):
                raise EngineUnsupported(
                    f"engine {self._engine} was started without --worker-extension-cls "
                    f"{EXTENSION}; start it with that option"
                ) from error
            raise
        results: list[Mapping[str, Any]] = answer["results"]
        return results

    async def pause(self, mode: PauseMode) -> None:
        """Stop drawing tokens; caches stay."""
        limit_s = self._timeouts.wait_s if mode == "wait" else self._timeouts.control_s
        await self.post("/pause", timeout_s=limit_s, mode=mode, clear_cache="false")

    async def resume(self) -> None:
        """Draw tokens again."""
        await self._short("POST", "/resume")

    async def is_paused(self) -> bool:
        """Return True from the beginning of a pause on."""
        await self.need(*_PATHS)
        return bool((await self._short("GET", "/is_paused"))["is_paused"])

    async def load(self, info: Mapping[str, Any], stamp: str) -> None:
        """Load staged weights. Running requests compute their caches again after it."""
        # First, and while nothing is computed: a failure further down leaves no stale cache.
        answer = await self._short(
            "POST", "/reset_prefix_cache", reset_running_requests="true", reset_external="true"
        )
        if answer is not None and not answer["success"]:
            raise EngineError(
                f"engine {self._engine} could not clear its key-value cache, which the old "
                "weights computed; try again"
            )
        await self._short("POST", "/reset_encoder_cache")
        await self._short("POST", "/start_weight_update")
        limit_s = self._timeouts.commit_s
        await self.post("/update_weights", {"update_info": dict(info)}, timeout_s=limit_s)
        await self.post("/finish_weight_update", {"weight_version": stamp}, timeout_s=limit_s)

    async def stamp(self) -> str:
        """Return the stamp of tokens that are drawn now."""
        return str((await self._short("GET", "/weight_info"))["weight_version"])

    async def set_stamp(self, stamp: str) -> None:
        """Stamp tokens with this from now on."""
        await self._short("POST", "/update_weight_version", {"new_version": stamp})
