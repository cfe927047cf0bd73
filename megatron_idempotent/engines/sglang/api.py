"""Calls to one SGLang server over HTTP, and what its answers mean."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from megatron_idempotent.engines.protocol import (
    EngineDead,
    EngineError,
    EngineTimeout,
    EngineUnsupported,
)

if TYPE_CHECKING:
    import aiohttp

#: Where all of the endpoints below, and spans of versions, were read; older releases lack some.
NEWEST_READ = "0.5.23"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HttpResponse:
    """The answer of a server. Example: `HttpResponse(status=400, body={"message": "…"})`."""

    status: int
    body: Any
    """Parsed JSON, or text where it is none."""

    @property
    def ok(self) -> bool:
        """Done, as far as the server says: some endpoints say so in the body too."""
        said = self.body.get("success", True) if isinstance(self.body, dict) else True
        return self.status < 300 and bool(said)

    @property
    def message(self) -> str:
        """The server's words, from any of the shapes in which SGLang puts them."""
        body = self.body
        if isinstance(body, dict):
            body = body.get("error", body)
        if isinstance(body, dict):
            body = body.get("message", body)
        return str(body).strip()[:2000]


class Api:
    """One server. Example: `answer = await api.call("POST", "/flush_cache")`."""

    def __init__(
        self, url: str, *, name: str, api_key: str | None = None, timeout_s: float = 60.0
    ) -> None:
        """
        Args:
            url: as in "http://10.0.0.7:30000".
            name: the engine's, for errors.
            api_key: sent as a bearer token; the admin key where the server has one.
            timeout_s: of a call that names no other.
        """
        self.url = url.rstrip("/")
        self.name = name
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float | None = -1.0,
        tolerated: tuple[int, ...] = (),
    ) -> HttpResponse:
        """Send a request and wait for its answer, whatever its status is.

        Args:
            timeout_s: from the connection to the last byte of the answer; None for as long as
                the connection holds; below 0 for this object's own.
            tolerated: statuses that are an answer though they would be `EngineUnsupported`.
        Errors: `EngineDead` where there is no connection, or it ends before the answer does;
            `EngineTimeout`; `EngineUnsupported` for an endpoint that the server lacks, or whose
            key it was not given.
        """
        aiohttp = _aiohttp()
        limit_s = self._timeout_s if timeout_s is not None and timeout_s < 0 else timeout_s
        limits = aiohttp.ClientTimeout(total=limit_s, sock_connect=self._timeout_s)
        try:
            async with self._open().request(
                method, self.url + path, json=body, timeout=limits
            ) as response:
                text = await response.text()
        except asyncio.TimeoutError as error:
            waited_s = self._timeout_s if limit_s is None else limit_s
            raise EngineTimeout(
                f"engine {self.name}: {path} has not answered in {waited_s:g} s; ask its health"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDead(
                f"engine {self.name}: {self.url}{path} does not answer: {error!r}; start the "
                "server again and make a new engine for it"
            ) from error
        answer = HttpResponse(status=response.status, body=_parsed(text))
        if answer.status not in tolerated:
            self._check_known(path, answer)
        return answer

    async def done(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = -1.0
    ) -> Any:
        """The body of an answer that says that it is done. Errors: `EngineError` for any other."""
        answer = await self.call(method, path, body, timeout_s=timeout_s)
        if not answer.ok:
            raise EngineError(
                f"engine {self.name}: {path} failed with status {answer.status}: {answer.message}"
            )
        return answer.body

    async def close(self) -> None:
        """End all connections. Twice: no-op."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            aiohttp = _aiohttp()
            # A connection of its own for each call: SGLang closes those that are idle for 5 s, and
            # a POST on one that is just being closed looks like a server that died.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        return self._session

    def _check_known(self, path: str, answer: HttpResponse) -> None:
        if answer.status in (404, 405, 501):
            raise EngineUnsupported(
                f"engine {self.name}: the server has no endpoint {path} (status {answer.status}); "
                f"SGLang {NEWEST_READ} has it: is this one older, or a router in front of it?"
            )
        if answer.status in (401, 403):
            raise EngineUnsupported(
                f"engine {self.name}: {path} wants a key (status {answer.status}); give api_key=, "
                "the admin key where the server was started with --admin-api-key"
            )


def _aiohttp() -> Any:
    try:
        import aiohttp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "SglangEngine needs aiohttp, which is not installed; "
            "pip install 'megatron-idempotent[http]'"
        ) from error
    return aiohttp


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
