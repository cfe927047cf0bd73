"""Turns requests into SGLang's terms, runs them, and turns its answers into samples."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.engines.protocol import (
    EngineDead,
    EngineError,
    EngineUnsupported,
    FinishReason,
    Request,
    Sample,
)

from .api import Api, is_done
from .facts import Facts, Liveness, check_temperature


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ResponsePart:
    """Holds the tokens that one call of /generate sampled; a response may take several."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason


def generate_body(
    request: Request, drawn: Sequence[int], *, rid: str, seed: int | None
) -> dict[str, Any]:
    """Makes the body of /generate that goes on after the tokens that were drawn.

    Everything that a server may have other defaults for (--preferred-sampling-params) is named.
    `ignore_eos` also switches stop_token_ids off, so it is set only if there are none.
    """
    params: dict[str, Any] = {
        "max_new_tokens": request.max_tokens - len(drawn),
        "min_new_tokens": 0,
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "stop": None,
        "stop_token_ids": sorted(request.stop_tokens) or None,
        "ignore_eos": not request.stop_tokens,
        "n": 1,
    }
    if seed is not None:
        params["sampling_seed"] = seed
    return {
        "rid": rid,
        "input_ids": [*request.prompt, *drawn],
        "sampling_params": params,
        "return_logprob": True,
        "stream": False,
    }


def read_part(body: Any, *, engine: str) -> ResponsePart:
    """Return the tokens of an answer with their log-probs and versions.

    Errors: `EngineError` for an answer that lacks any of these.
    """
    try:
        meta: Mapping[str, Any] = body["meta_info"]
        tokens = tuple(int(token) for token in body["output_ids"])
        finish = meta["finish_reason"]
        scored = [(float(each[0]), int(each[1])) for each in meta.get("output_token_logprobs", ())]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"engine {engine}: /generate answered {str(body)[:500]}, without meta_info, output_ids "
            "and finish_reason as SGLang has them; is this an SGLang server?"
        ) from error
    if tuple(token for _, token in scored) != tokens:
        raise EngineError(
            f"engine {engine}: its {len(tokens)} tokens and the {len(scored)} that have log-probs "
            "are not the same; does speculative decoding report none for its own?"
        )
    return ResponsePart(
        tokens=tokens,
        logprobs=tuple(logprob for logprob, _ in scored),
        versions=_versions(meta, len(tokens), engine),
        finish_reason=_finish_reason(finish, engine),
    )


def joined(request: Request, parts: Sequence[ResponsePart]) -> Sample:
    """Return one sample of all parts, in order."""
    tokens = tuple(token for part in parts for token in part.tokens)
    finish_reason = parts[-1].finish_reason
    if finish_reason == "stop" and tokens[-1] not in request.stop_tokens:
        finish_reason = "length"  # an end token of the model's own, at the last place
    return Sample(
        request_id=request.id,
        tokens=tokens,
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        versions=tuple(version for part in parts for version in part.versions),
        finish_reason=finish_reason,
    )


def goes_on(request: Request, parts: Sequence[ResponsePart]) -> bool:
    """Returns whether the server stopped unasked, at an end token of the model's own.

    SGLang has no way to stop at the request's tokens and not at those of the model's config.
    """
    last = parts[-1]
    drawn = sum(len(part.tokens) for part in parts)
    return (
        last.finish_reason == "stop"
        and last.tokens[-1:] != ()
        and last.tokens[-1] not in request.stop_tokens
        and drawn < request.max_tokens
    )


def parsed_version(text: Any) -> int | None:
    """Return the version that a server's string names; None for any other, as "default"."""
    return int(text) if isinstance(text, str) and text.isdecimal() else None


def _versions(meta: Mapping[str, Any], tokens: int, engine: str) -> tuple[int, ...]:
    # Without spans all of an answer is of one version: that at its end. No request of such a server
    # is kept across a commit (see `SglangEngine.pause`).
    whole = {"version": meta.get("weight_version"), "start": 0, "end": tokens}
    spans = meta.get("weight_versions", [whole]) if tokens else []
    versions: list[int] = []
    for span in spans:
        version = parsed_version(span["version"])
        if version is None or span["start"] != len(versions):
            raise EngineError(
                f"engine {engine}: its tokens have versions {spans}; does another client load its "
                "weights, too?"
            )
        versions += [version] * (span["end"] - span["start"])
    if len(versions) != tokens:
        raise EngineError(
            f"engine {engine}: {tokens} tokens have versions {spans}, which cover {len(versions)}; "
            "send the request again"
        )
    return tuple(versions)


def _finish_reason(finish: Any, engine: str) -> FinishReason:
    kind = finish.get("type") if isinstance(finish, dict) else finish
    if kind == "stop":
        # "NaN happened": the server drew an id outside of the vocabulary and put another there.
        if isinstance(finish, dict) and isinstance(finish.get("matched"), str):
            raise EngineError(
                f"engine {engine}: a response ended with {finish['matched']!r}: the logits are not "
                "finite; are the weights?"
            )
        return "stop"
    if kind == "length":
        return "length"
    if kind == "abort":
        return "abort"
    raise EngineError(
        f"engine {engine}: a response ended with {finish!r}; allowed: stop, length, abort"
    )


class Requests:
    """Runs all requests of one client."""

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
            parts: list[ResponsePart] = []
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
        """Hold new requests back here, and wait until none is in the server; `admit` ends that."""
        self._open.clear()
        await self._idle.wait()

    def admit(self) -> None:
        """Let new requests through to the server, which queues them while it is paused."""
        self._open.set()

    async def end(self, *, timeout_s: float) -> None:
        """Make all requests come back as partials, which are empty without an answer in time."""
        self._ended = True
        self.admit()
        for rid in self._running.values():
            self._abort(rid)
        waits = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait([waits, *self._ending], timeout=timeout_s)
        waits.cancel()

    async def _part(self, request: Request, drawn: list[int], key: object) -> ResponsePart:
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
                return ResponsePart(tokens=(), logprobs=(), versions=(), finish_reason="abort")
            raise
        if answer.status == 400:
            raise ValueError(
                f"engine {self._api.name} refused request {request.id!r}: {answer.message}"
            )
        if not is_done(answer):
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
                f"engine {self._api.name}: request {request.id!r} has a seed, and the server "
                "ignores seeds: start it with --enable-deterministic-inference, or give "
                "seeds=False to sample at random"
            )
        if request.temperature == 1.0:
            return
        async with self._checking:
            if not self._temperature_checked:
                self._temperature_checked = await check_temperature(
                    self._api, request.prompt, vocabulary=self._vocabulary
                )

    def _abort(self, rid: str) -> None:
        """Free what a request holds; it is no error if the request has ended meanwhile."""

        async def end() -> None:
            with contextlib.suppress(EngineError):  # a server that is gone holds nothing
                await self._api.call("POST", "/abort_request", {"rid": rid})

        task = asyncio.ensure_future(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
