"""Asks a server for its abilities, which are never taken from its version."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from megatron_idempotent.rollout.errors import EngineError, EngineTimeout, EngineUnsupported

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
    """One server. Example: `(await learn(api)).deterministic`."""

    release: str
    """The server's own version, for messages; nothing is decided by it."""
    model_path: str
    """The folder of the weights that it serves, as the server sees it."""
    weight_version: str
    spans: bool
    """Answers say which tokens were drawn with which version (`weight_versions`)."""
    deterministic: bool
    """Draws by the seed of a request; without it, seeds are read and not used."""
    quantization: str | None
    memory_saver: bool
    """Memory is freed on request; without it, such a request does nothing, and says it did."""
    weights_backup: bool
    """Weights that were freed come back as they were; without it, they come back undefined."""


async def learn(api: Api) -> Facts:
    """Ask a server that is not paused; samples one token of no consequence.

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

    Returns whether it could be told: after some prompts, such as a padding token whose embedding
    is zero, all tokens are as likely at every temperature.
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
