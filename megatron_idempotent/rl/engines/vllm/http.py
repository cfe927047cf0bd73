"""Makes a vLLM server an engine, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.engines.protocol import (
    EngineError,
    EngineUnsupported,
    PauseMode,
    Request,
    Sample,
)
from megatron_idempotent.rl.vllm_plugin import EXTENSION
from megatron_idempotent.rl.weights.transports.base import Sender

from .calls import BadRequest, Calls
from .control import Timeouts
from .engine import StagedEngine, check_request, sampling_params, to_sample

_PATHS = (
    "/abort_requests",
    "/collective_rpc",
    "/finish_weight_update",
    "/is_paused",
    "/pause",
    "/reset_encoder_cache",
    "/reset_prefix_cache",
    "/resume",
    "/start_weight_update",
    "/update_weight_version",
    "/update_weights",
    "/weight_info",
)


class HttpControl:
    """Implements `Control` over HTTP. Example: `HttpControl(calls, Timeouts(), engine="a")`."""

    def __init__(self, calls: Calls, timeouts: Timeouts, *, engine: str) -> None:
        self._calls, self._timeouts, self._engine = calls, timeouts, engine

    async def rpc(self, command: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        await self._calls.need(*_PATHS, timeout_s=self._timeouts.control_s)
        body = {"method": "megatron_idempotent", "args": [json.dumps(command)]}
        try:
            answer = await self._calls.post(
                "/collective_rpc", body, timeout_s=self._timeouts.control_s
            )
        except EngineError as error:
            if "no attribute 'megatron_idempotent'" in str(error):
                raise EngineUnsupported(
                    f"engine {self._engine} was started without --worker-extension-cls "
                    f"{EXTENSION}; start it with that option"
                ) from error
            raise
        results: list[Mapping[str, Any]] = answer["results"]
        return results

    async def alive(self) -> None:
        await self._calls.get("/health", timeout_s=self._timeouts.health_s)

    async def pause(self, mode: PauseMode) -> None:
        limit_s = self._timeouts.wait_s if mode == "wait" else self._timeouts.control_s
        await self._calls.post("/pause", timeout_s=limit_s, mode=mode, clear_cache="false")

    async def resume(self) -> None:
        await self._calls.post("/resume", timeout_s=self._timeouts.control_s)

    async def is_paused(self) -> bool:
        await self._calls.need(*_PATHS, timeout_s=self._timeouts.control_s)
        answer = await self._calls.get("/is_paused", timeout_s=self._timeouts.control_s)
        return bool(answer["is_paused"])

    async def reset_caches(self) -> None:
        limit_s = self._timeouts.control_s
        answer = await self._calls.post(
            "/reset_prefix_cache",
            timeout_s=limit_s,
            reset_running_requests="true",
            reset_external="true",
        )
        if answer is not None and not answer["success"]:
            raise EngineError(
                f"engine {self._engine} could not clear its key-value cache, which the old "
                "weights computed; try again"
            )
        await self._calls.post("/reset_encoder_cache", timeout_s=limit_s)

    async def start_update(self) -> None:
        await self._calls.post("/start_weight_update", timeout_s=self._timeouts.control_s)

    async def update(self, info: Mapping[str, Any]) -> None:
        await self._calls.post(
            "/update_weights", {"update_info": dict(info)}, timeout_s=self._timeouts.commit_s
        )

    async def finish_update(self, stamp: str) -> None:
        await self._calls.post(
            "/finish_weight_update", {"weight_version": stamp}, timeout_s=self._timeouts.commit_s
        )

    async def stamp(self) -> str:
        answer = await self._calls.get("/weight_info", timeout_s=self._timeouts.control_s)
        return str(answer["weight_version"])

    async def set_stamp(self, stamp: str) -> None:
        await self._calls.post(
            "/update_weight_version",
            {"new_version": stamp},
            timeout_s=self._timeouts.control_s,
        )


_GENERATE = "/inference/v1/generate"


class VllmEngine(StagedEngine):
    """Implements `RolloutEngine` with a vLLM server that was started for it (see `VllmServer`).

    Tokens go in and out as ids, at `/inference/v1/generate`. vLLM itself stamps each: its engine
    attaches the version it has to the outputs of every step, the version changes only through
    `/finish_weight_update`, which the client calls while the engine is paused, and a call to pause
    returns when the steps under way have been handed out. So a stamp cannot be off by one, and the
    client does not count tokens. Log-probs are those of the distribution that tokens were drawn
    from; at a temperature other than 1 the server must run with
    `--logprobs-mode processed_logprobs`.

    `close` leaves the server as it is. Use one event loop and one client at a time, and one replica
    per server: data parallelism inside of one is not supported.
    Example: `VllmEngine("http://127.0.0.1:8000", transport=lambda: DiskSender("/dev/shm/weights"))`
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        transport: Callable[[], Sender] | None = None,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        initial_version: int = 0,
        keep_copy: bool = True,
        api_key: str | None = None,
    ) -> None:
        """
        Args:
            url: the server's address, as in "http://127.0.0.1:8000".
            name: the engine's name in errors and reports; None for the URL.
            transport: makes the sender of each update, for as many workers as the server has; None
                for an engine that cannot be updated.
            model: the model's name in the server; None for its only one.
            timeouts: the limits of calls; None for the defaults.
            initial_version: the version of the weights that the server was started with.
            keep_copy: True has workers keep a copy of what they serve in host memory, which is
                needed to roll back a torn commit, and for updates with a base version.
            api_key: the server's key, if it wants one.

        Errors: `ImportError` without aiohttp.
        """
        name = url if name is None else name
        timeouts = Timeouts() if timeouts is None else timeouts
        self._calls = Calls(url, engine=name, api_key=api_key)
        self._model = model
        self._asking = asyncio.Lock()
        self._tempered: bool | None = None
        self._longest: int | None = None
        super().__init__(
            HttpControl(self._calls, timeouts, engine=name),
            name=name,
            transport=transport,
            timeouts=timeouts,
            initial_version=initial_version,
            keep_copy=keep_copy,
        )

    async def _draw(self, sent_id: str, request: Request) -> Sample:
        await self._check(request)
        body = {
            "request_id": sent_id,
            "token_ids": list(request.prompt),
            "sampling_params": sampling_params(request),
        }
        try:
            # Cancelled, it closes its connection, at which vLLM frees the request.
            answer = await self._post(body)
        except BadRequest as error:
            raise ValueError(f"request {request.id!r}: {error}") from error
        choice = answer["choices"][0]
        content = (choice["logprobs"] or {"content": []})["content"]
        return to_sample(
            request,
            tokens=choice["token_ids"] or [],
            logprobs=[each["logprob"] for each in content],
            spans=choice["weight_versions"],
            finish_reason=choice["finish_reason"],
            version_of=self._updates.version_of,
            engine=self._name,
        )

    async def _abort(self, sent_ids: Sequence[str]) -> None:
        # vLLM puts a word of its own before an id.
        ids = [each for sent in sent_ids for each in (sent, f"generate-tokens-{sent}")]
        await self._calls.post(
            "/abort_requests", {"request_ids": ids}, timeout_s=self._timeouts.health_s
        )

    async def _release(self) -> None:
        await self._calls.close()

    async def _post(self, body: Mapping[str, Any]) -> Any:
        if self._model is not None:
            body = {**body, "model": self._model}
        return await self._calls.post(_GENERATE, body, timeout_s=self._timeouts.generate_s)

    async def _check(self, request: Request) -> None:
        async with self._asking:
            if self._longest is None:
                self._longest = await self._ask()
        check_request(request, longest=self._longest)
        if request.temperature == 1.0:
            return
        async with self._asking:
            if self._tempered is None:
                self._tempered = await self._is_tempered(request.prompt)
        if not self._tempered:
            raise EngineUnsupported(
                f"engine {self._name} gives log-probs of the distribution before temperature, so "
                f"temperature={request.temperature} would have wrong ones; start the server with "
                "--logprobs-mode processed_logprobs"
            )

    async def _ask(self) -> int:
        """Return the model's number of positions; refuse a server that does not stamp tokens."""
        limit_s = self._timeouts.control_s
        schema = await self._calls.need(_GENERATE, timeout_s=limit_s)
        if "weight_versions" not in json.dumps(schema.get("components", {})):
            raise EngineUnsupported(
                f"engine {self._name}: {_GENERATE} does not answer with weight_versions, so a "
                "request could not say which weights drew each token; use a newer vLLM"
            )
        models = (await self._calls.get("/v1/models", timeout_s=limit_s))["data"]
        named = [each for each in models if self._model in (None, each["id"])]
        if not named:
            raise EngineUnsupported(
                f"engine {self._name} serves {', '.join(each['id'] for each in models)}, not "
                f"{self._model}; construct it with one of them"
            )
        return int(named[0]["max_model_len"])

    async def _is_tempered(self, prompt: Sequence[int]) -> bool:
        """Returns whether the likeliest token's log-prob follows the temperature."""
        likeliest = []
        for temperature in (1.0, 2.0):
            parameters = {"max_tokens": 1, "logprobs": 1, "temperature": temperature}
            body = {
                "token_ids": list(prompt),
                "sampling_params": {**parameters, "top_p": 1.0, "top_k": 0, "detokenize": False},
            }
            (drawn,) = (await self._post(body))["choices"][0]["logprobs"]["content"]
            likeliest.append(max(each["logprob"] for each in drawn["top_logprobs"]))
        return bool(abs(likeliest[0] - likeliest[1]) > 1e-4)
