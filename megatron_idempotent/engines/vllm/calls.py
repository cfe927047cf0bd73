"""HTTP calls to one vLLM server, and what their failures mean."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_idempotent.engines.protocol import (
    EngineDead,
    EngineError,
    EngineTimeout,
    EngineUnsupported,
)

from .control import SERVER_HELP

if TYPE_CHECKING:
    import aiohttp

_DYING_S = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)


class BadRequest(EngineError):
    """A request that the server calls bad; sent again it will be so again."""


class Calls:
    """Example: `await Calls("http://127.0.0.1:8000", engine="a").get("/health", timeout_s=5)`."""

    def __init__(self, url: str, *, engine: str, api_key: str | None = None) -> None:
        """Errors: `ImportError` without aiohttp."""
        try:
            import aiohttp  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "VllmEngine needs aiohttp: pip install 'megatron-idempotent[http]'"
            ) from error
        self.url = url.rstrip("/")
        self._engine = engine
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None
        self._schema: Mapping[str, Any] | None = None
        self._asking = asyncio.Lock()
        self._closed = False

    async def get(self, path: str, *, timeout_s: float | None) -> Any:
        """The JSON answer. Errors: as in `post`."""
        return await self._call("GET", path, timeout_s=timeout_s)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None,
        **query: str,
    ) -> Any:
        """The JSON answer, or None for none. Tried once: only the caller knows what twice would do.

        Errors: `BadRequest`, `EngineDead`, `EngineTimeout`, `EngineUnsupported`, `EngineError`.
        """
        return await self._call("POST", path, body, query, timeout_s=timeout_s)

    async def need(self, *paths: str, timeout_s: float | None) -> Mapping[str, Any]:
        """The server's OpenAPI schema. Errors: `EngineUnsupported` naming the paths it lacks."""
        async with self._asking:  # it is long, and a thousand requests may begin at once
            if self._schema is None:
                self._schema = await self.get("/openapi.json", timeout_s=timeout_s)
        missing = [path for path in paths if path not in self._schema["paths"]]
        if missing:
            raise EngineUnsupported(
                f"engine {self._engine} at {self.url} lacks {', '.join(missing)}; {SERVER_HELP}"
            )
        return self._schema

    async def close(self) -> None:
        """Close the connection. Twice: no-op. Later calls raise `EngineDead`."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None,
    ) -> Any:
        import aiohttp

        where = f"engine {self._engine} at {self.url}"
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._opened().request(
                method, path, json=body, params=query, timeout=limit
            ) as answer:
                status, text = answer.status, await answer.text()
        except asyncio.TimeoutError as error:
            raise EngineTimeout(
                f"{where} has not answered {path} in {timeout_s} s; ask its health what it did"
            ) from error
        except aiohttp.ClientError as error:
            raise EngineDead(f"{where} does not answer {path}: {error!r}") from error
        if status == 200:
            return json.loads(text) if text else None
        raise await self._failure(path, status, _message(text))

    async def _failure(self, path: str, status: int, message: str) -> Exception:
        said = f"engine {self._engine} at {self.url} answered {path} with {status}: {message}"
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

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._closed:
            raise EngineDead(f"engine {self._engine} at {self.url} was closed by this client")
        if self._session is None:
            # A connection each: one that the server closes for being idle while a call begins would
            # look like a server that dies.
            self._session = aiohttp.ClientSession(
                self.url,
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
            )
        return self._session


def _message(text: str) -> str:
    try:
        found = json.loads(text)
        found = found.get("error", found.get("detail", text))
        return str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        return text[:500]
