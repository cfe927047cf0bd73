"""Calls an inference server over HTTP.

The client never retries, because only the caller knows whether a second call is safe. Every call
opens a new connection: servers close connections that are idle for some seconds, and a POST on a
connection that is just being closed looks like a dead server. The engine interprets the HTTP
status.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_idempotent.json_text import parse_json
from megatron_idempotent.lazy import naming_the_remedy
from megatron_idempotent.rl.weights.urls import refuse_secrets

from .protocol import EngineDead, EngineTimeout

if TYPE_CHECKING:
    import aiohttp


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HttpResponse:
    """The status and the parsed body of a server's HTTP response.
    Example: `HttpResponse(status=400, body={"message": "…"})`.
    """

    status: int
    body: Any
    """The response body: parsed JSON, text if it is not JSON, or None if it is empty."""

    @property
    def message(self) -> str:
        """The error message in the response's body, up to 2,000 characters: the text under `error`,
        `detail` or `message`, where vLLM-like servers write it; without these fields, the entire
        body as text.
        """
        body = self.body
        if isinstance(body, dict):
            body = body.get("error", body.get("detail", body))
        if isinstance(body, dict):
            body = body.get("message", body)
        return str(body).strip()[:2000]


class HttpClient:
    """Sends HTTP requests to one inference server, and never retries a failed request.
    Example: `await client.call("GET", "/health", timeout_s=5)`.
    """

    def __init__(self, url: str, *, engine: str, api_key: str | None = None) -> None:
        """Make a client of the server at `url`; the first call connects.

        Args:
            url: the server's address, such as "http://10.0.0.7:30000".
            engine: the engine's name, for errors.
            api_key: sent as a bearer token.

        Raises:
            ModuleNotFoundError: aiohttp is not installed.
            ValueError: the URL has a password, which names, errors and reports would show.
        """
        refuse_secrets("the URL of an engine", url, "give it without, and a key as api_key")
        with naming_the_remedy("an engine over HTTP"):
            import aiohttp
        self._aiohttp = aiohttp
        self.url = url.rstrip("/")
        self.where = f"engine {engine} at {self.url}"
        """The engine's name and address, for errors."""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        timeout_s: float | None,
    ) -> HttpResponse:
        """Send one HTTP request, and return the response, whatever its status. Raise
        `EngineTimeout` or `EngineDead` if no response comes.

        Args:
            method: "GET", "POST" and the like.
            path: the path below the server's URL.
            body: sent as JSON; None for no body.
            query: the parameters after the path.
            timeout_s: seconds from connecting to the last byte of the response; None for no limit.

        Raises:
            EngineDead: the server cannot be reached, the connection breaks before the response is
                complete, or this client was closed.
            EngineTimeout: the response is not complete after `timeout_s` seconds.
        """
        limits = self._aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._open().request(
                method, self.url + path, json=body, params=query, timeout=limits
            ) as response:
                text = await response.text()
        except asyncio.TimeoutError as error:
            raise EngineTimeout(
                f"{self.where} has not answered {path} in {timeout_s} s; ask its health what it did"
            ) from error
        except (self._aiohttp.ClientError, OSError) as error:
            raise EngineDead(
                f"{self.where} does not answer {path}: {error!r}; start the server again and make "
                "a new engine for it"
            ) from error
        try:
            parsed = parse_json(text) if text else None
        except ValueError:
            parsed = text
        return HttpResponse(status=response.status, body=parsed)

    async def close(self) -> None:
        """Close all connections; afterwards `call` raises `EngineDead`. A second `close` is a
        no-op.
        """
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineDead(f"{self.where} was closed by this client; make a new engine for it")
        if self._session is None:
            self._session = self._aiohttp.ClientSession(
                connector=self._aiohttp.TCPConnector(limit=0, force_close=True),
                headers=self._headers,
            )
        return self._session
