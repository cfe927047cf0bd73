"""Learns a server's abilities, tracks its memory, and watches whether it is alive."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from megatron_idempotent.rl.engines.protocol import (
    EngineDead,
    EngineError,
    EngineTimeout,
    EngineUnsupported,
)

from .api import NEWEST_READ, Api

NEEDED = (
    "/generate",
    "/model_info",
    "/server_info",
    "/pause_generation",
    "/continue_generation",
    "/abort_request",
    "/flush_cache",
    "/update_weights_from_disk",
    "/update_weight_version",
)
#: Long enough for a server that compiles in its first request.
_PROBE_TIMEOUT_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Holds what a server has said of itself. Example: `(await learn(api)).deterministic`."""

    release: str
    """The server's own version, for messages; nothing is decided by it."""
    model_path: str
    """The folder of the weights that it serves, as the server sees it."""
    weight_version: str
    spans: bool
    """True if answers say which tokens were drawn with which version (`weight_versions`)."""
    deterministic: bool
    """True if it draws by a request's seed; else it reads seeds and does not use them."""
    quantization: str | None
    memory_saver: bool
    """True if it frees memory on request; else it does nothing, and says that it did."""
    weights_backup: bool
    """True if freed weights come back as they were; else they come back undefined."""


async def learn(api: Api) -> Facts:
    """Ask a server, which must not be paused, for its abilities; it samples one token for that.

    Errors: `EngineUnsupported` naming the endpoints that it lacks.
    """
    await _check_endpoints(api)
    served = await api.done("GET", "/model_info")
    settings = await api.done("GET", "/server_info")
    probe = await one_token(api, temperature=1.0)
    return Facts(
        release=str(settings.get("version", "unknown")),
        model_path=str(served["model_path"]),
        weight_version=str(served.get("weight_version", "default")),
        spans="weight_versions" in probe,
        deterministic=bool(settings.get("enable_deterministic_inference")),
        quantization=settings.get("quantization"),
        memory_saver=bool(settings.get("enable_memory_saver")),
        weights_backup=bool(settings.get("enable_weights_cpu_backup")),
    )


async def one_token(
    api: Api, *, temperature: float, prompt: Sequence[int] = (0,)
) -> dict[str, Any]:
    """Returns `meta_info` of one token after a prompt; every vocabulary has a token 0."""
    params = {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True}
    body = {
        "input_ids": list(prompt),
        "sampling_params": params | {"top_p": 1.0, "top_k": -1, "min_p": 0.0},
        "return_logprob": True,
        "top_logprobs_num": 1,
    }
    try:
        answer = await api.done("POST", "/generate", body, timeout_s=_PROBE_TIMEOUT_S)
    except EngineTimeout as error:
        raise EngineTimeout(
            f"engine {api.name} has not sampled one token in {_PROBE_TIMEOUT_S:g} s: is it paused "
            "by a client before this one? POST /continue_generation ends that, if its weights are "
            "known to be whole"
        ) from error
    meta: dict[str, Any] = answer["meta_info"]
    if not meta.get("output_token_logprobs"):
        raise EngineError(
            f"engine {api.name}: no log-prob came with a token, though return_logprob asked for "
            f"it: {sorted(meta)}"
        )
    return meta


async def check_temperature(api: Api, prompt: Sequence[int], *, vocabulary: int) -> bool:
    """Refuse a server whose log-probs are not of the distribution that it draws from.

    SGLang's are of the logits divided by the temperature, unless it was started with
    SGLANG_RETURN_ORIGINAL_LOGPROB=1, which shows in no setting that it reports. Near temperature 0
    the likeliest token has a log-prob of about 0 in the one case and not in the other.

    Returns whether the prompt could show it: after some prompts, such as a padding token whose
    embedding is zero, all tokens are equally likely at every temperature.
    """
    warm = _likeliest(await one_token(api, temperature=1.0, prompt=prompt))
    if warm + math.log(vocabulary) < 0.05:
        return False
    cold = _likeliest(await one_token(api, temperature=0.01, prompt=prompt))
    if warm < -0.2 and cold - warm < 0.05:
        raise EngineUnsupported(
            f"engine {api.name}: its log-probs leave the temperature out (the likeliest token has "
            f"{warm:.3f} at temperature 1 and {cold:.3f} at 0.01); start it without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB, or sample at temperature 1"
        )
    return True


def _likeliest(meta: dict[str, Any]) -> float:
    return float(meta["output_top_logprobs"][0][0][0])


async def _check_endpoints(api: Api) -> None:
    answer = await api.call("GET", "/openapi.json", tolerated=(404,))
    if not isinstance(answer.body, dict) or "paths" not in answer.body:
        return  # switched off with DISABLE_OPENAPI_DOC: the calls themselves will tell
    missing = [path for path in NEEDED if path not in answer.body["paths"]]
    if missing:
        raise EngineUnsupported(
            f"engine {api.name}: the server lacks {', '.join(missing)}; SGLang {NEWEST_READ} has "
            "all of them: is this one older, or a router in front of it?"
        )


TAGS = ("weights", "kv_cache")


class ServerMemory:
    """Tracks which parts of a server's memory are freed.

    SGLang's scheduler dies if a part is taken twice, so a part that is there is never asked for.
    """

    def __init__(self, api: Api, *, timeout_s: float) -> None:
        self._api = api
        self._timeout_s = timeout_s
        self._freed: list[str] = []

    @property
    def asleep(self) -> str:
        """Describes the freed parts; empty if there are none."""
        return f"it sleeps, without {' and '.join(self._freed)}" if self._freed else ""

    @property
    def awake(self) -> bool:
        """True if any part is there."""
        return len(self._freed) < len(TAGS)

    def check_sleeps(self, facts: Facts, name: str) -> None:
        """Raise `EngineUnsupported` for a server that would free nothing and not say so."""
        if not facts.memory_saver:
            raise EngineUnsupported(
                f"engine {name} was started without --enable-memory-saver, so it cannot sleep; "
                "start it with that option"
            )

    def check_weights(self, name: str) -> None:
        """Raise `EngineError` if there is no memory that weights could be loaded into."""
        if "weights" in self._freed:
            raise EngineError(f'engine {name} sleeps; wake(["weights"]) before a commit')

    async def free(self) -> None:
        """Free all parts that are there. The server must be idle."""
        tags = [tag for tag in TAGS if tag not in self._freed]
        await self._change("/release_memory_occupation", tags)
        self._freed += tags

    async def take(self, tags: Sequence[str]) -> None:
        """Take freed parts again; others stay. Errors: `ValueError` for unknown tags."""
        if unknown := [tag for tag in tags if tag not in TAGS]:
            raise ValueError(f"wake() got {unknown}; allowed: {list(TAGS)}")
        freed = [tag for tag in TAGS if tag in tags and tag in self._freed]
        if freed:
            await self._change("/resume_memory_occupation", freed)
            self._freed = [tag for tag in self._freed if tag not in freed]

    async def _change(self, path: str, tags: list[str]) -> None:
        await self._api.done("POST", path, {"tags": tags}, timeout_s=self._timeout_s)


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
            every_s: seconds from one question to the next.
            timeout_s: seconds for an answer.
        """
        self._api = api
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._calls = 0
        self._watch: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[EngineDead] | None = None

    async def run(self, call: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Return the call's result. Errors: those of the call; `EngineDead`."""
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
