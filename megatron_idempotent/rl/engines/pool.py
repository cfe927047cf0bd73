"""Uses several engines as one: each request goes to the serving engine that runs the fewest."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias, cast

from .protocol import EngineDead, EngineError, Request, RolloutEngine, Sample

Pick: TypeAlias = "Callable[[Request], RolloutEngine | Awaitable[RolloutEngine]]"
"""A function that chooses an engine for the rest of a request."""

#: A pause between attempts never gets longer.
_LONGEST_WAIT_S = 5.0


async def generate_whole(
    engine: RolloutEngine | Pick,
    request: Request,
    *,
    attempts: int = 8,
    wait_s: float = 0.05,
) -> Sample:
    """Sample a response; one that comes back as a part is continued, by the same engine or another.

    A part's tokens become the end of the next prompt, so each token is drawn, and counted, once;
    with a seed the response is the one that was never interrupted, if the weights are the same.
    A paused engine lets the rest wait, so this waits with it.

    Args:
        engine: one engine, or a function that chooses one for each attempt.
        request: the whole response; its id is that of all parts.
        attempts: the number of attempts in a row without a token after which it gives up; a part
            with a token starts the count again, because an engine may be stopped for every update
            of its weights.
        wait_s: seconds before an attempt that follows one without a token; twice as long each time,
            up to 5 s.

    Errors: those of `generate`. `EngineDead` only if there is no other engine to choose, or after
        so many attempts; `EngineError` after so many parts without a token.
    """
    done = Sample(request_id=request.id, tokens=(), logprobs=(), versions=(), finish_reason="abort")
    without = 0
    while True:
        rest = _rest(request, done)
        if callable(engine):
            found = engine(rest)
            chosen = await found if isinstance(found, Awaitable) else found
        else:
            chosen = engine
        try:
            part = await chosen.generate(rest)
        except EngineDead:
            without += 1
            if not callable(engine) or without >= attempts:
                raise
        else:
            without = 0 if part.tokens else without + 1
            done = _joined(request, done, part)
            if done.finish_reason != "abort":
                return done
            if without >= attempts:
                raise EngineError(
                    f"{chosen.name} gave back request {request.id!r} {without} times without a "
                    f"token, after {len(done.tokens)} of them; is it resumed?"
                )
        if without:
            await asyncio.sleep(min(wait_s * 2 ** (without - 1), _LONGEST_WAIT_S))


def _rest(request: Request, done: Sample) -> Request:
    """Return a request for the rest of the response."""
    if not done.tokens:
        return request
    return dataclasses.replace(
        request,
        prompt=(*request.prompt, *done.tokens),
        max_tokens=request.max_tokens - len(done.tokens),
        continued=request.continued + len(done.tokens),
    )


def _joined(request: Request, done: Sample, part: Sample) -> Sample:
    whole = dataclasses.replace(
        done,
        tokens=done.tokens + part.tokens,
        logprobs=done.logprobs + part.logprobs,
        versions=done.versions + part.versions,
        finish_reason=part.finish_reason,
    )
    # An engine that was stopped after the last token may not say that it was the last.
    if whole.tokens and whole.tokens[-1] in request.stop_tokens:
        return dataclasses.replace(whole, finish_reason="stop")
    if len(whole.tokens) >= request.max_tokens:
        return dataclasses.replace(whole, finish_reason="length")
    return whole


class Quarantine(Protocol):
    """Knows which engines must not be used, by name, and why. `sync.WeightSync` does."""

    @property
    def quarantined(self) -> Mapping[str, str]:
        """The reasons by name: a new mapping whenever they change, as a pool reads it often."""
        ...


class EnginePool:
    """Sends requests to engines; those of an engine that dies go to the others.

    Example: `sample = await EnginePool(engines, sync=weight_sync).generate(request)`.
    """

    def __init__(self, engines: Sequence[RolloutEngine], *, sync: Quarantine | None = None) -> None:
        if not engines:
            raise ValueError("EnginePool() got no engines; give at least one")
        self._counted = [_Counted(engine, self) for engine in engines]
        self._sync = sync
        self._dead: dict[str, str] = {}

    async def generate(self, request: Request) -> Sample:
        """Return a whole response.

        The other engines continue what one hands back as a part, or loses.

        Errors: `EngineError` naming every engine if none is left; `ValueError` for a request that
            can never be answered.
        """
        return await generate_whole(lambda _: cast("RolloutEngine", self._pick()), request)

    @property
    def usable(self) -> bool:
        """True if an engine is left that requests can go to."""
        return bool(self._serving())

    async def reprobe(self) -> None:
        """Ask engines that were lost for their health, and use again those that answer."""
        lost = [each for each in self._counted if each.name in self._dead]
        for each, health in zip(
            lost, await asyncio.gather(*(each.engine.health() for each in lost)), strict=True
        ):
            if health.status in ("SERVING", "PAUSED"):
                self._dead.pop(each.name, None)

    def _serving(self) -> list[_Counted]:
        """Return the engines that requests can go to."""
        out = self._out
        return [each for each in self._counted if each.name not in out]

    @property
    def _out(self) -> Mapping[str, str]:
        """The reason for each engine that must not be used, by name."""
        quarantined = self._sync.quarantined if self._sync else {}
        return {**self._dead, **quarantined} if self._dead else quarantined

    def _pick(self) -> _Counted:
        """Return the engine that runs the fewest requests, and the first of those."""
        serving = self._serving()
        if serving:
            return min(serving, key=lambda each: each.running)
        reasons = "; ".join(f"{name}: {why}" for name, why in self._out.items())
        raise EngineError(f"no engine is left: {reasons}; start one of them again")


class _Counted:
    """Counts an engine's running requests, and takes an engine that dies out of its pool."""

    def __init__(self, engine: RolloutEngine, pool: EnginePool) -> None:
        self.engine = engine
        self.name = engine.name
        self.running = 0
        self._pool = pool

    async def generate(self, request: Request) -> Sample:
        self.running += 1
        try:
            return await self.engine.generate(request)
        except EngineDead as error:
            self._pool._dead[self.name] = str(error)
            raise
        finally:
            self.running -= 1
