"""Uses several engines as one: each request goes to the serving engine that runs the fewest."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from .protocol import EngineDead, EngineError, Request, RolloutEngine, Sample

#: Attempts in a row that may bring nothing, and the pause after the first of them.
_ATTEMPTS, _WAIT_S = 8, 0.05
#: A pause between attempts never gets longer.
_LONGEST_WAIT_S = 5.0


async def generate_whole(
    engine: RolloutEngine,
    request: Request,
    *,
    attempts: int = _ATTEMPTS,
    wait_s: float = _WAIT_S,
) -> Sample:
    """Sample a response; one that comes back as a part is continued.

    A part's tokens become the end of the next prompt, so each token is drawn, and counted, once;
    with a seed the response is the one that was never interrupted, if the weights are the same.
    A paused engine lets the rest wait, so this waits with it. `EnginePool.generate` continues a
    part on another engine, too.

    Args:
        engine: the engine that samples.
        request: the whole response; its id is that of all parts.
        attempts: the number of attempts in a row without a token after which it gives up; a part
            with a token starts the count again, because an engine may be stopped for every update
            of its weights.
        wait_s: seconds before an attempt that follows one without a token; twice as long each time,
            up to 5 s.

    Errors: those of `generate`; `EngineError` after so many parts without a token.
    """
    return await _whole(engine.generate, request, engine.name, attempts=attempts, wait_s=wait_s)


async def _whole(
    draw: Callable[[Request], Awaitable[Sample]],
    request: Request,
    only: str | None,
    *,
    attempts: int,
    wait_s: float,
) -> Sample:
    """Join parts to a whole response. `only` names the engine that draws them, if it is one."""
    done = Sample(request_id=request.id, tokens=(), logprobs=(), versions=(), finish_reason="abort")
    without = 0
    while True:
        try:
            part = await draw(_rest(request, done))
        except EngineDead:
            without += 1
            if only is not None or without >= attempts:
                raise
        else:
            without = 0 if part.tokens else without + 1
            done = _joined(request, done, part)
            if done.finish_reason != "abort":
                return done
            if without >= attempts:
                raise EngineError(
                    f"{only or 'the pool'} gave back request {request.id!r} {without} times "
                    f"without a token, after {len(done.tokens)} of them; is it resumed?"
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
    routes = part.routed_experts
    if (drawn := done.routed_experts) is not None:
        # What a part had in its prompt was computed again: the tokens after it were drawn by the
        # first.
        routes = drawn if routes is None else drawn.then(routes)
    whole = dataclasses.replace(
        done,
        tokens=done.tokens + part.tokens,
        logprobs=done.logprobs + part.logprobs,
        versions=done.versions + part.versions,
        finish_reason=part.finish_reason,
        routed_experts=routes,
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
        self._engines = {engine.name: engine for engine in engines}
        self._running = dict.fromkeys(self._engines, 0)
        self._sync = sync
        self._dead: dict[str, str] = {}

    async def generate(self, request: Request) -> Sample:
        """Return a whole response.

        The other engines continue what one hands back as a part, or loses.

        Errors: `EngineError` naming every engine if none is left; `ValueError` for a request that
            can never be answered.
        """
        return await _whole(self._draw, request, None, attempts=_ATTEMPTS, wait_s=_WAIT_S)

    async def _draw(self, request: Request) -> Sample:
        """Draw with the engine that runs the fewest requests, and the first of those."""
        out = self._out
        serving = [name for name in self._engines if name not in out]
        if not serving:
            reasons = "; ".join(f"{name}: {why}" for name, why in out.items())
            raise EngineError(f"no engine is left: {reasons}; start one of them again")
        name = min(serving, key=self._running.__getitem__)
        self._running[name] += 1
        try:
            return await self._engines[name].generate(request)
        except EngineDead as error:
            self._dead[name] = str(error)
            raise
        finally:
            self._running[name] -= 1

    @property
    def usable(self) -> bool:
        """True if an engine is left that requests can go to."""
        return any(name not in self._out for name in self._engines)

    async def reprobe(self) -> None:
        """Ask engines that were lost for their health, and use again those that answer."""
        lost = list(self._dead)
        healths = await asyncio.gather(*(self._engines[name].health() for name in lost))
        for name, health in zip(lost, healths, strict=True):
            if health.status in ("SERVING", "PAUSED"):
                self._dead.pop(name, None)

    @property
    def _out(self) -> Mapping[str, str]:
        """The reason for each engine that must not be used, by name."""
        quarantined = self._sync.quarantined if self._sync else {}
        return {**self._dead, **quarantined} if self._dead else quarantined
