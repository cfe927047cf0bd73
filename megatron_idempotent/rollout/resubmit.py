"""Whole responses from engines that hand back parts of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from .errors import EngineDead, EngineError
from .protocol import RolloutEngine
from .records import Request, Sample

Pick: TypeAlias = "Callable[[Request], RolloutEngine | Awaitable[RolloutEngine]]"
"""Chooses an engine for what is left of a request."""

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
        attempts: that may bring no token, one after the other; one that brings some starts the
            start again, as an engine may be stopped for every update of its weights.
        wait_s: before an attempt after one that brought nothing; twice as long each time, up to
            5 s.

    Errors: those of `generate`. `EngineDead` only where there is no other engine to choose, or
        after as many attempts; `EngineError` for as many parts without a token.
    """
    done = Sample(request_id=request.id, tokens=(), logprobs=(), versions=(), finish_reason="abort")
    without = 0
    while True:
        chosen = await _choose(engine, request, done)
        try:
            part = await chosen.generate(_rest(request, done))
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
                    f"token, behind {len(done.tokens)} of them; is it resumed?"
                )
        if without:
            await asyncio.sleep(min(wait_s * 2 ** (without - 1), _LONGEST_WAIT_S))


async def _choose(engine: RolloutEngine | Pick, request: Request, done: Sample) -> RolloutEngine:
    if not callable(engine):
        return engine
    chosen = engine(_rest(request, done))
    return await chosen if isinstance(chosen, Awaitable) else chosen


def _rest(request: Request, done: Sample) -> Request:
    """Returns the request for what is left to be sampled."""
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
    # An engine that was stopped behind the last token may not say that it was the last.
    if whole.tokens and whole.tokens[-1] in request.stop_tokens:
        return dataclasses.replace(whole, finish_reason="stop")
    if len(whole.tokens) >= request.max_tokens:
        return dataclasses.replace(whole, finish_reason="length")
    return whole
