"""Calls one SGLang server over HTTP, and turns its failures into errors of engines."""

from __future__ import annotations

from typing import Any

from megatron_idempotent.rl.engines.http import HttpClient, HttpResponse
from megatron_idempotent.rl.engines.protocol import EngineError, EngineUnsupported

#: The release in which all endpoints below, and spans of versions, were read; older ones lack some.
NEWEST_READ = "0.5.23"


def is_done(answer: HttpResponse) -> bool:
    """Returns whether the server says that it has done a call, in its status and in its body."""
    said = answer.body.get("success", True) if isinstance(answer.body, dict) else True
    return answer.status < 300 and bool(said)


class Api:
    """Calls one server. Example: `answer = await api.call("POST", "/flush_cache")`."""

    def __init__(
        self, url: str, *, name: str, api_key: str | None = None, timeout_s: float = 60.0
    ) -> None:
        """
        Args:
            url: the server's address, as in "http://10.0.0.7:30000".
            name: the engine's name, for errors.
            api_key: sent as a bearer token; the admin key if the server has one.
            timeout_s: seconds for a call that gives no other limit.
        """
        self._client = HttpClient(url, engine=name, api_key=api_key, connect_s=timeout_s)
        self.url = self._client.url
        self.name = name
        self._timeout_s = timeout_s

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
            method: "GET" or "POST".
            path: the path below the server's URL.
            body: sent as JSON; None for no body.
            timeout_s: seconds from the connection to the last byte of the answer; None for as long
                as the connection holds; below 0 for this object's own limit.
            tolerated: statuses that are returned, instead of an `EngineUnsupported`.

        Errors: those of `HttpClient.call`; `EngineUnsupported` for an endpoint that the server
            lacks, or whose key it was not given.
        """
        limit_s = self._timeout_s if timeout_s is not None and timeout_s < 0 else timeout_s
        answer = await self._client.call(method, path, body, timeout_s=limit_s)
        if answer.status not in tolerated:
            self._check_known(path, answer)
        return answer

    async def done(
        self, method: str, path: str, body: Any = None, *, timeout_s: float | None = -1.0
    ) -> Any:
        """Send a request, and return the answer's body.

        Errors: those of `call`; `EngineError` if the server says that it has not done it.
        """
        answer = await self.call(method, path, body, timeout_s=timeout_s)
        if not is_done(answer):
            raise EngineError(
                f"engine {self.name}: {path} failed with status {answer.status}: {answer.message}"
            )
        return answer.body

    async def close(self) -> None:
        """End all connections. Twice: no-op. Later calls raise `EngineDead`."""
        await self._client.close()

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
