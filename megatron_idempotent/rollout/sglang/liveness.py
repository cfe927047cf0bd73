"""Notices a server that is gone without a word, for the requests that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from megatron_idempotent.rollout.errors import EngineDead, EngineError

from .api import Api

_Answer = TypeVar("_Answer")


class Liveness:
    """Runs calls that have no time limit, and fails all of them once the server is silent.

    A process that ends closes its connections, and its requests fail by that. A machine that is
    switched off or cut off does not: so while requests run, the server is asked at intervals for
    what its HTTP process knows by heart. Model and scheduler may be busy for as long as they like.
    """

    def __init__(self, api: Api, *, every_s: float, timeout_s: float) -> None:
        """
        Args:
            every_s: from one question to the next.
            timeout_s: of an answer.
        """
        self._api = api
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._calls = 0
        self._watch: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[EngineDead] | None = None

    async def run(self, call: Coroutine[Any, Any, _Answer]) -> _Answer:
        """The call's result. Errors: those of the call; `EngineDead`."""
        task = asyncio.ensure_future(call)
        self._calls += 1
        if self._gone is None or self._gone.done():
            self._gone = asyncio.get_running_loop().create_future()
            self._watch = asyncio.ensure_future(self._watch_server(self._gone))
        gone = self._gone
        try:
            either: set[asyncio.Future[Any]] = {task, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise gone.result()
            return task.result()
        finally:
            task.cancel()
            self._calls -= 1
            if not self._calls and self._watch is not None:
                self._watch.cancel()
                self._watch = self._gone = None

    async def _watch_server(self, gone: asyncio.Future[EngineDead]) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._api.call("GET", "/model_info", timeout_s=self._timeout_s)
            except EngineError as error:
                message = f"engine {self._api.name} is silent, its requests are given up: {error}"
                gone.set_result(EngineDead(message))
                return
