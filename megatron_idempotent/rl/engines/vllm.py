"""Drives a vLLM server as an engine, over HTTP and a plugin in its workers."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

from megatron_idempotent.rl.weights.transports.base import Sender

from .protocol import (
    EngineDead,
    EngineError,
    EngineHealth,
    EngineUnsupported,
    FinishReason,
    PauseMode,
    Request,
    RoutedExperts,
    Sample,
    refuse_too_long,
    split_mix,
)
from .vllm_server import CPU_ENVIRONMENT, BadRequest, Control, Timeouts, VllmServer
from .vllm_updates import VllmUpdates

__all__ = ["CPU_ENVIRONMENT", "ServedVllm", "Timeouts", "VllmEngine", "VllmServer"]

_log = logging.getLogger(__name__)

_ABORT_S = 0.1
_GENERATE = "/inference/v1/generate"


class VllmEngine(VllmUpdates):
    """Implements `ColocatedEngine` as an HTTP client of a running vLLM server; `VllmServer` starts
    a suitable one.

    Requests and responses are token ids, at `/inference/v1/generate`. vLLM stamps each token with a
    weight version. The stamp is exact: vLLM attaches its current version to the outputs of every
    step, the version changes only through `/finish_weight_update`, which this client calls while
    the engine is paused, and a pause returns only after the outputs of running steps are delivered.
    Log-probs are under the distribution that tokens were sampled from; at a temperature other than
    1 the server must run with `--logprobs-mode processed_logprobs`.

    `close` leaves the server running. Use one event loop and one client at a time, and one replica
    per server: data parallelism inside a server is not supported.

    Example: `VllmEngine("http://127.0.0.1:8000", transport=lambda: DiskSender("/dev/shm/weights"))`
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        transport: Callable[[], Sender] | None = None,
        timeouts: Timeouts | None = None,
        keep_copy: bool = True,
        api_key: str | None = None,
        routing_layers: Sequence[int] = (),
        adapter: str | None = None,
    ) -> None:
        """Make a client of the vLLM server at `url`; the first call connects.

        Args:
            url: the server's address, as in "http://127.0.0.1:8000".
            name: the engine's name in errors and reports; None for the URL.
            transport: makes the sender of each update, for all of the server's workers; None for an
                engine whose weights never change.
            timeouts: the limits of calls; None for the defaults.
            keep_copy: True to have workers keep a copy of the served weights in host memory;
                rolling back a torn commit and updates with a base version need it.
            api_key: the server's API key, if it requires one.
            routing_layers: the indices, from 0, of the layers with routers, to return the experts
                that they select; the server needs --enable-return-routed-experts.
            adapter: the name of the server's only LoRA adapter: requests sample with it, and
                updates contain only its factors. None for the model itself.

        Raises:
            ModuleNotFoundError: aiohttp is not installed.
            ValueError: the URL has a password.
        """
        super().__init__(
            Control(url, timeouts or Timeouts(), engine=name or url, api_key=api_key),
            transport=transport,
            keep_copy=keep_copy,
            adapter=adapter,
        )
        self._asking = asyncio.Lock()
        self._tempered: bool | None = None
        self._longest: int | None = None
        self._routing_layers = list(routing_layers)
        self._closed = False
        self._count = itertools.count()
        self._running: dict[str, asyncio.Future[Sample]] = {}
        self._pausing = asyncio.Lock()

    async def generate(self, request: Request) -> Sample:
        """Send a request to the vLLM server, and return the sample; see
        `RolloutEngine.generate`.
        """
        if self._closed:
            raise EngineDead(f"engine {self.name} was closed by this client; make a new engine")
        # A new id: the caller may send the request again while vLLM still ends the first one.
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
        """Abort this client's requests, and close its connections; the server keeps running."""
        if self._closed:
            return
        self._closed = True
        running = dict(self._running)
        try:
            await asyncio.wait_for(self._abort_all(running), self._control.timeouts.health_s)
        except (EngineError, asyncio.TimeoutError):
            pass  # the connections are closed in any case
        finally:
            for drawing in running.values():
                drawing.cancel()
            await self._control.close()

    async def _abort_all(self, running: Mapping[str, asyncio.Future[Sample]]) -> None:
        waiting = dict(running)
        while waiting:
            # Repeated, because an abort misses a request that has not reached vLLM yet. vLLM
            # prefixes ids.
            ids = [
                request_id for sent in waiting for request_id in (sent, f"generate-tokens-{sent}")
            ]
            await self._control.post("/abort_requests", {"request_ids": ids}, limit="health_s")
            await asyncio.wait(waiting.values(), timeout=_ABORT_S)
            waiting = {sent: drawing for sent, drawing in waiting.items() if not drawing.done()}

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Make the vLLM server stop sampling; see `RolloutEngine.pause`. The server keeps its
        caches, which only a commit invalidates.

        Requests that arrive during a pause wait inside vLLM.
        """
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"pause() got mode={mode!r}; allowed: 'keep', 'abort' or 'wait'")
        async with self._pausing:  # vLLM reports "paused" as soon as a pause begins
            # Checked first: a second pause would abort the requests that the first one kept.
            if not await self._control.is_paused():
                await self._control.pause(mode)

    async def resume(self) -> None:
        """Make the vLLM server continue sampling. Raise `EngineError` if the engine is DIRTY, i.e.
        the weights may mix several versions. See `RolloutEngine.resume`.
        """
        wrong = await self._wrong(await self._state())
        if wrong:
            raise EngineError(
                f"engine {self.name} is DIRTY and stays paused: {wrong}; commit again, or roll back"
            )
        await self._control.post("/resume")

    async def health(self) -> EngineHealth:
        """Return the status and version of the vLLM server; see `RolloutEngine.health`."""
        running = len(self._running)
        try:
            return await asyncio.wait_for(self._health(running), self._control.timeouts.health_s)
        except asyncio.TimeoutError:
            detail = f"no answer in {self._control.timeouts.health_s:g} s"
        except Exception as error:  # noqa: BLE001 (health reports any error)
            detail = str(error) or repr(error)
        return EngineHealth(status="DEAD", version=None, detail=detail, running=running)

    async def _health(self, running: int) -> EngineHealth:
        await self._control.get("/health", limit="health_s")
        state = await self._state()
        wrong = await self._wrong(state)
        if wrong:
            return EngineHealth(status="DIRTY", version=None, detail=wrong, running=running)
        return EngineHealth(
            status="PAUSED" if await self._control.is_paused() else "SERVING",
            version=state.version,
            running=running,
            decode_s=state.decode_s,
        )

    async def sleep(self) -> None:
        """Make the vLLM server move its weights to host memory and free its cache; see
        `ColocatedEngine.sleep`.

        Sleep and wake are untested: vLLM supports them on GPUs only.

        Raises:
            EngineUnsupported: the server runs without --enable-sleep-mode.
        """
        await self._must_sleep()
        await self._control.post("/sleep", limit="commit_s", level="1", mode="abort")

    async def wake(self, tags: Sequence[str]) -> None:
        """Make the vLLM server allocate the memory of weights or cache again; see
        `ColocatedEngine.wake`. Once weights and cache are awake, the engine is paused.
        """
        await self._must_sleep()
        for tag in tags:
            answer = await self._control.post("/wake_up", limit="commit_s", tags=tag)
            if answer["status"] == "awake":
                await self._control.pause("keep")  # vLLM would serve at once, before `resume`

    async def _must_sleep(self) -> None:
        answers = await self._control.rpc({"do": "sleeps"})
        if not all(answer.get("sleeps") for answer in answers):
            raise EngineUnsupported(
                f"engine {self.name} was started without sleep mode; start its server with "
                "--enable-sleep-mode, which vLLM has on GPUs, or leave it awake"
            )

    async def _draw(self, sent_id: str, request: Request) -> Sample:
        """Post a request to the server under the id `sent_id`, and return the sample. If the call
        is cancelled, vLLM frees the request.
        """
        await self._check(request)
        body = {
            "request_id": sent_id,
            "token_ids": list(request.prompt),
            "sampling_params": sampling_params(request),
            "model": self._adapter,
        }
        try:
            # Cancelling closes the connection, and vLLM then frees the request.
            answer = await self._control.post(_GENERATE, body, limit="generate_s")
        except BadRequest as error:
            raise ValueError(f"request {request.id!r}: {error}") from error
        return self._sample(request, answer["choices"][0])

    def _sample(self, request: Request, choice: Mapping[str, Any]) -> Sample:
        """Convert an entry of `choices` in vLLM's response to a `Sample`, with a log-prob and a
        weight version for each token.

        Raises:
            EngineError: a token lacks its log-prob or version, or the finish reason is unknown.
        """
        subject = f"engine {self.name}: request {request.id!r}"
        tokens, reason = choice["token_ids"] or [], choice["finish_reason"]
        content = (choice["logprobs"] or {"content": []})["content"]
        logprobs = [token["logprob"] for token in content]
        versions = [
            self._version_of(str(span["version"]))
            for span in choice["weight_versions"] or ()
            for _ in range(int(span["start"]), int(span["end"]))
        ]
        if reason not in get_args(FinishReason):
            raise EngineError(f"{subject} ended with {reason!r}; allowed: stop, length, abort")
        if len(logprobs) != len(tokens) or any(value <= _NO_LOGPROB for value in logprobs):
            raise EngineError(
                f"{subject} has {len(tokens)} tokens, and not all of them have a log-prob; are its "
                "weights finite?"
            )
        if len(versions) != len(tokens):
            raise EngineError(
                f"{subject} has {len(tokens)} tokens and weight versions of {len(versions)}; use a "
                "vLLM that answers with weight_versions, as 0.32"
            )
        return Sample(
            request_id=request.id,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            finish_reason=reason,
            routed_experts=self._routes(subject, request, choice) if tokens else None,
        )

    def _routes(
        self, subject: str, request: Request, choice: Mapping[str, Any]
    ) -> RoutedExperts | None:
        """Decode the experts in a response to [tokens of prompt and response - 1, all layers,
        topk], from base64 of an `.npy` file, and return those of the layers in `routing_layers`.
        Return None if the engine was made without `routing_layers`.
        """
        if not self._routing_layers:
            return None
        if choice.get("routed_experts") is None:
            raise EngineUnsupported(
                f"{subject} came without routed_experts; start the server with "
                "--enable-return-routed-experts, or leave routing_layers out"
            )
        import numpy

        experts = numpy.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        needed = len(request.prompt) + len(choice["token_ids"]) - 1
        if len(experts) != needed or experts.shape[1] <= max(self._routing_layers):
            raise EngineError(
                f"{subject} has routes of {len(experts)} tokens in {experts.shape[1]} layers; "
                f"needed: {needed} tokens, in layers up to {max(self._routing_layers)}"
            )
        kind: Literal["uint8", "int16"] = "uint8" if experts.dtype.itemsize == 1 else "int16"
        _, layers, topk = (experts := experts[:, self._routing_layers].astype(kind)).shape
        return RoutedExperts(data=experts.tobytes(), layers=layers, topk=topk, dtype=kind)

    async def _check(self, request: Request) -> None:
        """Raise an error for a request that is too long for the model; whose temperature is so low
        that vLLM would replace it by a higher one; or whose temperature is not 1, if the server
        returns log-probs before temperature.
        """
        async with self._asking:
            if self._longest is None:
                self._longest = await self._max_model_len()
        if request.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"request {request.id!r} has temperature={request.temperature}; allowed: "
                f"{LOWEST_TEMPERATURE} or more, because vLLM silently raises lower ones to that"
            )
        refuse_too_long(f"engine {self.name}", request, self._longest)
        if request.temperature == 1.0:
            return
        async with self._asking:
            if self._tempered is None:
                self._tempered = await self._is_tempered(request.prompt)
        if not self._tempered:
            raise EngineUnsupported(
                f"engine {self.name} returns log-probs before temperature, which are wrong for "
                f"temperature={request.temperature}; start the server with "
                "--logprobs-mode processed_logprobs"
            )

    async def _max_model_len(self) -> int:
        """Return the model's number of positions; raise `EngineUnsupported` if the server's
        responses lack the weight version of each token.
        """
        schema = await self._control.need(_GENERATE)
        if "weight_versions" not in json.dumps(schema.get("components", {})):
            raise EngineUnsupported(
                f"engine {self.name}: {_GENERATE} does not answer with weight_versions, so a "
                "request could not say which weights drew each token; use a newer vLLM"
            )
        return int((await self._control.get("/v1/models"))["data"][0]["max_model_len"])

    async def _is_tempered(self, prompt: Sequence[int]) -> bool:
        """Return True if the server returns log-probs after temperature. This is so if the first
        token's highest log-prob differs between temperatures 1 and 2, at each of which one token is
        sampled.
        """
        likeliest = []
        for temperature in (1.0, 2.0):
            parameters = {"max_tokens": 1, "logprobs": 1, "temperature": temperature}
            body = {
                "token_ids": list(prompt),
                "sampling_params": {**parameters, "top_p": 1.0, "top_k": 0, "detokenize": False},
            }
            answer = await self._control.post(_GENERATE, body, limit="generate_s")
            (drawn,) = answer["choices"][0]["logprobs"]["content"]
            likeliest.append(max(candidate["logprob"] for candidate in drawn["top_logprobs"]))
        return bool(abs(likeliest[0] - likeliest[1]) > 1e-4)


class ServedVllm(VllmEngine):
    """A `VllmEngine` that owns its vLLM server: the constructor starts the server, and `close`
    stops it.

    If the server dies, this process ends too, so that Ray starts both again.

    Example: `RayEngine("a", lambda: ServedVllm(VllmServer(folder), name="a", transport=…), …)`.
    """

    def __init__(
        self,
        server: VllmServer,
        *,
        name: str,
        transport: Callable[[], Sender],
        routing_layers: Sequence[int] = (),
    ) -> None:
        """Start the vLLM server, and wait until it responds.

        Args:
            server: the server, which is not running yet.
            name: see `VllmEngine`.
            transport: makes the sender of each update, from this process to the server's workers.
            routing_layers: see `VllmEngine`.

        Raises:
            RuntimeError: the server does not start; the error has the end of its log.
        """
        self._server = server.__enter__()
        try:
            super().__init__(
                server.url, name=name, transport=transport, routing_layers=routing_layers
            )
        except BaseException:
            server.stop()
            raise
        threading.Thread(target=self._end_with_server, name=f"server {name}", daemon=True).start()

    def _end_with_server(self) -> None:
        code = self._server.wait()
        if not self._closed:
            _log.error(
                "vLLM of engine %s ended with %d; its log ends:\n%s",
                self.name,
                code,
                self._server.log(),
            )
            self._server.stop()
            os._exit(1)

    async def close(self) -> None:
        """Close this client, and stop the vLLM server; see `RolloutEngine.close`."""
        await super().close()
        await asyncio.to_thread(self._server.stop)


LOWEST_TEMPERATURE = 0.01
"""The lowest temperature that vLLM applies: it silently raises lower ones to this value, and below
1e-5 it samples greedily."""
_NO_LOGPROB = -9999.0
"""The value that vLLM returns for a log-prob that is missing or NaN."""


def sampling_params(request: Request) -> dict[str, Any]:
    """Return a request's sampling parameters for vLLM, as JSON. Each one is set explicitly, so that
    no default of the server or the checkpoint applies.

    Only the request's stop tokens end a response; the checkpoint's end-of-sequence token does not.
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
    """Return a 63-bit seed for one request to vLLM, computed from the seed of the whole response
    and from the number of tokens that the response has so far (`continued`).

    vLLM seeds its generator once per request. With the same seed for all parts, every part would
    reuse the same random numbers, and its tokens would be correlated.
    """
    return split_mix(seed + (continued + 1) * 0x9E3779B97F4A7C15) >> 1
