"""Spreads requests over several engines: each goes to the engine that runs the fewest requests."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from .protocol import EngineDead, EngineError, Request, RolloutEngine, Sample

#: Attempts in a row without a token before giving up, and the pause after the first of them.
_ATTEMPTS, _WAIT_S = 8, 0.05
#: The longest pause between two attempts.
_LONGEST_WAIT_S = 5.0


async def generate_whole(engine: RolloutEngine, request: Request) -> Sample:
    """Sample a complete response on one engine. Each time the engine aborts the request midway,
    continue with a new request for the missing tokens.

    The tokens of an aborted part are appended to the prompt of the next request, so every token is
    sampled and counted once. With a seed and unchanged weights, the response equals one that was
    never interrupted. While the engine is paused, this call waits. `EnginePool.generate` may also
    continue a part on another engine.

    Args:
        engine: the engine that samples.
        request: the request for the complete response; all parts have its id.

    Raises:
        EngineError: eight parts in a row had no token.
        Exception: as `RolloutEngine.generate` raises.
    """
    return await _sample_to_end(engine.generate, request, engine.name)


async def _sample_to_end(
    draw: Callable[[Request], Awaitable[Sample]], request: Request, engine_name: str | None
) -> Sample:
    """Sample a response in parts until the response is complete: each call of `draw` gets a request
    for the missing tokens, and returns one part. Return the parts joined to one sample.

    A part with a token resets the count of attempts, because an engine may abort for every update
    of its weights. The pause after an attempt without a token doubles with each further one.
    `engine_name` is the engine that samples all parts, or None if several do.
    """
    response = Sample(
        request_id=request.id, tokens=(), logprobs=(), versions=(), finish_reason="abort"
    )
    fruitless = 0  # attempts in a row without a token
    while True:
        try:
            part = await draw(_remaining_request(request, response))
        except EngineDead:
            fruitless += 1
            if engine_name is not None or fruitless >= _ATTEMPTS:
                raise
        else:
            fruitless = 0 if part.tokens else fruitless + 1
            response = _joined(request, response, part)
            if response.finish_reason != "abort":
                return response
            if fruitless >= _ATTEMPTS:
                raise EngineError(
                    f"{engine_name or 'the pool'} gave back request {request.id!r} {fruitless} "
                    f"times without a token, after {len(response.tokens)} of them; is it resumed?"
                )
        if fruitless:
            await asyncio.sleep(min(_WAIT_S * 2 ** (fruitless - 1), _LONGEST_WAIT_S))


def _remaining_request(request: Request, response: Sample) -> Request:
    """Return a request for the tokens that are still missing from the response; the request's
    prompt ends with the response's tokens so far.
    """
    if not response.tokens:
        return request
    return dataclasses.replace(
        request,
        prompt=(*request.prompt, *response.tokens),
        max_tokens=request.max_tokens - len(response.tokens),
        continued=request.continued + len(response.tokens),
    )


def _joined(request: Request, response: Sample, part: Sample) -> Sample:
    routes = part.routed_experts
    if (drawn := response.routed_experts) is not None:
        # The engine recomputed the routes of the prompt, which include the earlier part's tokens.
        # Keep the earlier routes: the tokens after them were sampled with those.
        routes = drawn if routes is None else drawn.then(routes)
    joined = dataclasses.replace(
        response,
        tokens=response.tokens + part.tokens,
        logprobs=response.logprobs + part.logprobs,
        versions=response.versions + part.versions,
        finish_reason=part.finish_reason,
        routed_experts=routes,
    )
    # An engine that is aborted right after the last token may still report "abort".
    if joined.tokens and joined.tokens[-1] in request.stop_tokens:
        return dataclasses.replace(joined, finish_reason="stop")
    if len(joined.tokens) >= request.max_tokens:
        return dataclasses.replace(joined, finish_reason="length")
    return joined


class Quarantine(Protocol):
    """The protocol of an object that knows which engines must not get requests, such as
    `sync.WeightSync` or `controller.Fleet`.
    """

    @property
    def quarantined(self) -> Mapping[str, str]:
        """The engines that must not get requests: a map from each engine's name to the reason.

        A change makes a new mapping, because a pool reads it often.
        """
        ...


class EnginePool:
    """Sends each request to the engine that is running the fewest requests. If an engine dies, its
    requests continue on the other engines.

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
        """Return a complete response to a request. If an engine aborts or loses the request, the
        pool continues it on the engine that then runs the fewest requests.

        Raises:
            EngineError: no usable engine is left; the message gives the reason for each.
            ValueError: the model can never serve this request.
        """
        return await _sample_to_end(self._draw, request, None)

    async def _draw(self, request: Request) -> Sample:
        """Sample one part of a response on the usable engine that runs the fewest requests. If the
        engine raises `EngineDead`, raise the error, and send the engine no more requests until
        `reprobe` finds the engine alive.
        """
        out = self._out
        serving = [name for name in self._engines if name not in out]
        if not serving:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in out.items())
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
        """True if at least one engine can take requests: it has not died and is not quarantined."""
        return any(name not in self._out for name in self._engines)

    async def reprobe(self) -> None:
        """Ask the engines that died for their health; those that are SERVING or PAUSED get requests
        again.
        """
        lost = list(self._dead)
        healths = await asyncio.gather(*(self._engines[name].health() for name in lost))
        for name, health in zip(lost, healths, strict=True):
            if health.status in ("SERVING", "PAUSED"):
                self._dead.pop(name, None)

    @property
    def _out(self) -> Mapping[str, str]:
        """The engines that must not get requests, because they died or are quarantined: a map from
        each engine's name to the reason.
        """
        quarantined = self._sync.quarantined if self._sync else {}
        return {**self._dead, **quarantined} if self._dead else quarantined
