"""Implements the part of a vLLM engine that is the same over HTTP and in process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.engines.protocol import (
    EngineDead,
    EngineError,
    EngineHealth,
    FinishReason,
    PauseMode,
    Request,
    Sample,
)
from megatron_idempotent.rl.weights import Bucket, WeightUpdate
from megatron_idempotent.rl.weights.transports.base import Sender

from .control import Control, Timeouts
from .updates import UpdateStager

_ABORT_S = 0.1


class StagedEngine:
    """Implements `RolloutEngine`; subclasses send requests to vLLM, and release it."""

    def __init__(
        self,
        control: Control,
        *,
        name: str,
        transport: Callable[[], Sender] | None,
        timeouts: Timeouts,
        initial_version: int,
        keep_copy: bool,
    ) -> None:
        self._control = control
        self._name = name
        self._timeouts = timeouts
        self._closed = False
        self._count = itertools.count()
        self._running: dict[str, asyncio.Future[Sample]] = {}
        self._pausing = asyncio.Lock()
        self._updates = UpdateStager(
            control,
            engine=name,
            transport=transport,
            timeouts=timeouts,
            initial_version=initial_version,
            keep_copy=keep_copy,
        )

    @property
    def name(self) -> str:
        """See `RolloutEngine.name`."""
        return self._name

    async def _draw(self, sent_id: str, request: Request) -> Sample:
        """Send a request under an id; if the call is cancelled, vLLM frees the request."""
        raise NotImplementedError

    async def _abort(self, sent_ids: Sequence[str]) -> None:
        """Make requests come back as partials."""
        raise NotImplementedError

    async def _release(self) -> None:
        """Release vLLM: close connections, or end it if it is this process's own."""
        raise NotImplementedError

    async def generate(self, request: Request) -> Sample:
        """See `RolloutEngine.generate`."""
        if self._closed:
            raise EngineDead(f"engine {self._name} was closed by this client; make a new engine")
        # Its own id: the same request may be sent again while vLLM still ends the first.
        sent_id = f"{request.id}-{next(self._count)}"
        drawing = asyncio.ensure_future(self._draw(sent_id, request))
        self._running[sent_id] = drawing
        try:
            return await drawing
        except asyncio.CancelledError:
            if not self._closed:
                raise
            return Sample(
                request_id=request.id, tokens=(), logprobs=(), versions=(), finish_reason="abort"
            )
        finally:
            drawing.cancel()
            del self._running[sent_id]

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self._closed:
            return
        self._closed = True
        running = dict(self._running)
        try:
            await asyncio.wait_for(self._abort_all(running), self._timeouts.health_s)
        except (EngineError, asyncio.TimeoutError):
            pass  # one that cannot be told is let go of all the same
        finally:
            for drawing in running.values():
                drawing.cancel()
            await self._release()

    async def _abort_all(self, running: Mapping[str, asyncio.Future[Sample]]) -> None:
        waiting = dict(running)
        while waiting:
            # Again and again: a request may be on its way still, where an abort does not meet it.
            await self._abort(list(waiting))
            await asyncio.wait(waiting.values(), timeout=_ABORT_S)
            waiting = {sent: drawing for sent, drawing in waiting.items() if not drawing.done()}

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See `RolloutEngine.pause`. The caches stay: only a commit makes them wrong.

        Requests that come while it is paused wait inside vLLM.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"pause() got mode={mode!r}; allowed: 'keep', 'abort' or 'wait'")
        async with self._pausing:  # vLLM is "paused" from a pause's begin on, not from its end
            # Asked first: another pause would abort what the first one kept.
            if not await self._control.is_paused():
                await self._control.pause(mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        wrong = await self._updates.must_not_serve(await self._updates.state())
        if wrong:
            raise EngineError(
                f"engine {self._name} is DIRTY and stays paused: {wrong}; commit again, or "
                "roll back"
            )
        await self._control.resume()

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        """See `RolloutEngine.stage`. Each worker takes all tensors into its host's memory."""
        await self._updates.stage(update, buckets)

    async def commit(self, update_id: str) -> int:
        """See `RolloutEngine.commit`."""
        return await self._updates.commit(update_id)

    async def rollback(self, update_id: str) -> None:
        """See `RolloutEngine.rollback`.

        Torn weights are replaced by the copy that workers keep of the version before them, or by
        the checkpoint that they were started from.
        Errors: `EngineError` if there is neither, or it fails; then the engine is DIRTY.
        """
        await self._updates.rollback(update_id)

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`."""
        running = len(self._running)
        try:
            return await asyncio.wait_for(self._health(running), self._timeouts.health_s)
        except asyncio.TimeoutError:
            detail = f"no answer in {self._timeouts.health_s:g} s"
        except Exception as error:  # noqa: BLE001 (whatever it is, health is an answer to it)
            detail = str(error) or repr(error)
        return EngineHealth(status="DEAD", version=None, detail=detail, running=running)

    async def _health(self, running: int) -> EngineHealth:
        await self._control.alive()
        state = await self._updates.state()
        wrong = await self._updates.must_not_serve(state)
        if wrong:
            return EngineHealth(status="DIRTY", version=None, detail=wrong, running=running)
        return EngineHealth(
            status="PAUSED" if await self._control.is_paused() else "SERVING",
            version=state.version,
            running=running,
        )


LOWEST_TEMPERATURE = 0.01
"""The lowest temperature that vLLM keeps: it silently raises lower ones to this, and below 1e-5
takes the likeliest token."""
_NO_LOGPROB = -9999.0
"""The value that vLLM writes for a log-prob that is absent or not a number."""
_REASONS: Mapping[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}
_MASK = (1 << 64) - 1


def sampling_params(request: Request) -> dict[str, Any]:
    """Returns vLLM's SamplingParams by name, so that no default of server or checkpoint counts.

    Only the request's stop tokens end a response: the checkpoint's own end token does not.
    """
    return {
        "n": 1,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": list(request.stop_tokens),
        "ignore_eos": True,
        "seed": None if request.seed is None else seed_at(request.seed, request.continued),
        "logprobs": 0,
        "detokenize": False,
    }


def seed_at(seed: int, continued: int) -> int:
    """Return the seed of a response's part that begins at its token `continued`, 63 bits.

    vLLM's generator starts again with every request. With one seed for all parts, the numbers that
    drew the first tokens would draw the later ones again, which would then depend on them.
    Mixed as in SplitMix64 (Steele, Lea and Flood 2014).
    """
    state = (seed + (continued + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1


def check_request(request: Request, *, longest: int | None) -> None:
    """Raise `ValueError` for a temperature or length that vLLM would silently change."""
    if request.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"request {request.id!r} has temperature={request.temperature}; allowed: "
            f"{LOWEST_TEMPERATURE} or more, below which vLLM would draw at that"
        )
    positions = len(request.prompt) + request.max_tokens
    if longest is not None and positions > longest:
        raise ValueError(
            f"request {request.id!r} has {len(request.prompt)} tokens and may get "
            f"{request.max_tokens} more; the model has {longest} positions: ask for fewer tokens"
        )


def to_sample(
    request: Request,
    *,
    tokens: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[Mapping[str, Any]] | None,
    finish_reason: str | None,
    version_of: Callable[[str], int],
    engine: str,
) -> Sample:
    """Return a response, each token with its version.

    Args:
        request: the request that vLLM has answered.
        tokens: the response's tokens.
        logprobs: a log-prob for each token.
        spans: vLLM's `weight_versions`: contiguous, by index of the token.
        finish_reason: vLLM's word for the response's end.
        version_of: returns the version that a span's stamp stands for.
        engine: the engine's name, for errors.

    Errors: `EngineError` for a response that is not whole, or that ended in an unknown way.
    """
    if finish_reason not in _REASONS:
        raise EngineError(
            f"engine {engine}: request {request.id!r} ended with {finish_reason!r}; allowed: stop, "
            "length, abort"
        )
    if len(logprobs) != len(tokens) or any(value <= _NO_LOGPROB for value in logprobs):
        raise EngineError(
            f"engine {engine}: request {request.id!r} has {len(tokens)} tokens, and not all "
            "of them have a log-prob; are its weights finite?"
        )
    versions = [
        version_of(str(span["version"]))
        for span in spans or ()
        for _ in range(int(span["start"]), int(span["end"]))
    ]
    if len(versions) != len(tokens):
        raise EngineError(
            f"engine {engine}: request {request.id!r} has {len(tokens)} tokens and weight versions "
            f"of {len(versions)}; use a vLLM that answers with weight_versions, as 0.32"
        )
    return Sample(
        request_id=request.id,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        finish_reason=_REASONS[finish_reason],
    )
