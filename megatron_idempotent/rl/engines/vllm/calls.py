"""Calls one vLLM server over HTTP, and turns its failures into errors of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from megatron_idempotent.rl.engines.http import HttpClient, HttpResponse
from megatron_idempotent.rl.engines.protocol import EngineDead, EngineError, EngineUnsupported

from .control import SERVER_HELP

_DYING_S = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)


class BadRequest(EngineError):
    """The server calls the request bad, and would again."""


class Calls:
    """Calls one vLLM server over HTTP.

    Example: `await Calls("http://127.0.0.1:8000", engine="a").get("/health", timeout_s=5)`.
    """

    def __init__(self, url: str, *, engine: str, api_key: str | None = None) -> None:
        """Make a client; nothing is sent yet. Errors: `ModuleNotFoundError` without aiohttp."""
        self._client = HttpClient(url, engine=engine, api_key=api_key)
        self.url = self._client.url
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

    async def need(self, *paths: str, timeout_s: float | None) -> Mapping[str, Any]:
        """Return the server's OpenAPI schema.

        Errors: `EngineUnsupported` naming the paths it lacks.
        """
        async with self._asking:  # it is long, and a thousand requests may begin at once
            if self._schema is None:
                self._schema = await self.get("/openapi.json", timeout_s=timeout_s)
        missing = [path for path in paths if path not in self._schema["paths"]]
        if missing:
            raise EngineUnsupported(
                f"{self._client.where} lacks {', '.join(missing)}; {SERVER_HELP}"
            )
        return self._schema

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
