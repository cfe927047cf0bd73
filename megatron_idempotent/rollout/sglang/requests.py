"""Requests on their way through a server."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid

from megatron_idempotent.rollout.errors import EngineDead, EngineError, EngineUnsupported
from megatron_idempotent.rollout.records import Request, Sample

from .answers import Part, generate_body, goes_on, joined, read_part
from .api import Api
from .facts import Facts, check_temperature
from .liveness import Liveness


class Requests:
    """All requests of one client."""

    def __init__(
        self,
        api: Api,
        facts: Facts,
        *,
        vocabulary: int,
        seeds: bool,
        silence_s: float,
    ) -> None:
        self._api = api
        self._facts = facts
        self._vocabulary = vocabulary
        self._seeds = seeds
        self._liveness = Liveness(api, every_s=silence_s, timeout_s=silence_s)
        self._temperature_checked = False
        self._checking = asyncio.Lock()
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: dict[object, str] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._ended = False

    @property
    def running(self) -> int:
        """The number of requests in the server."""
        return len(self._running)

    async def run(self, request: Request) -> Sample:
        """See `RolloutEngine.generate`."""
        await self._check(request)
        await self._open.wait()
        key = object()
        self._running[key] = ""
        self._idle.clear()
        try:
            parts: list[Part] = []
            drawn: list[int] = []
            while not parts or goes_on(request, parts):
                parts.append(await self._part(request, drawn, key))
                drawn += parts[-1].tokens
            return joined(request, parts)
        finally:
            del self._running[key]
            if not self._running:
                self._idle.set()

    async def drain(self) -> None:
        """Hold new ones back here, and wait until none is in the server; `admit` ends that."""
        self._open.clear()
        await self._idle.wait()

    def admit(self) -> None:
        """Let new ones through to the server, which queues them while it is paused."""
        self._open.set()

    async def end(self, *, timeout_s: float) -> None:
        """Have all of them come back as partials; those without an answer in time, empty."""
        self._ended = True
        self.admit()
        for rid in self._running.values():
            self._abort(rid)
        waits = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait([waits, *self._ending], timeout=timeout_s)
        waits.cancel()

    async def _part(self, request: Request, drawn: list[int], key: object) -> Part:
        # SGLang aborts by prefix: one id must never begin with another.
        rid = self._running[key] = uuid.uuid4().hex
        seed = request.seed
        if seed is None and self._facts.deterministic:
            seed = random.getrandbits(62)  # it would take 42 for every request without one
        elif not self._facts.deterministic:
            seed = None
        body = generate_body(request, drawn, rid=rid, seed=seed)
        call = self._api.call("POST", "/generate", body, timeout_s=None)
        try:
            answer = await self._liveness.run(call)
        except asyncio.CancelledError:
            self._abort(rid)
            raise
        except EngineDead:
            if self._ended:  # its connection was closed here
                return Part(tokens=(), logprobs=(), versions=(), finish_reason="abort")
            raise
        if answer.status == 400:
            raise ValueError(
                f"engine {self._api.name} refused request {request.id!r}: {answer.message}"
            )
        if not answer.ok:
            raise EngineError(
                f"engine {self._api.name}: /generate failed with status {answer.status}: "
                f"{answer.message}"
            )
        return read_part(answer.body, engine=self._api.name)

    async def _check(self, request: Request) -> None:
        # SGLang does not look, and its kernels read beyond the embedding's end.
        for token in (*request.prompt, *request.stop_tokens):
            if not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"request {request.id!r} has token {token}; the model has 0 to "
                    f"{self._vocabulary - 1}"
                )
        if request.seed is not None and self._seeds and not self._facts.deterministic:
            raise EngineUnsupported(
                f"engine {self._api.name}: request {request.id!r} has a seed, and the server draws "
                "without: start it with --enable-deterministic-inference, or give seeds=False to "
                "sample at random"
            )
        if request.temperature == 1.0:
            return
        async with self._checking:
            if not self._temperature_checked:
                self._temperature_checked = await check_temperature(
                    self._api, request.prompt, vocabulary=self._vocabulary
                )

    def _abort(self, rid: str) -> None:
        """Free what a request holds; that it may have ended meanwhile is no error."""

        async def end() -> None:
            with contextlib.suppress(EngineError):  # a server that is gone holds nothing
                await self._api.call("POST", "/abort_request", {"rid": rid})

        task = asyncio.ensure_future(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
