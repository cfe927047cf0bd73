"""Requests and responses in vLLM's words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.rollout.errors import EngineError
from megatron_idempotent.rollout.records import FinishReason, Request, Sample

LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this without a word, and below 1e-5 takes the likeliest token."""
_NO_LOGPROB = -9999.0
"""The value that vLLM writes for a log-prob that is absent or not a number."""
_REASONS: Mapping[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
}
_MASK = (1 << 64) - 1


def sampling_params(request: Request) -> dict[str, Any]:
    """vLLM's SamplingParams, by name, with nothing left to a server's or a checkpoint's defaults.

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
    """The seed of a response's part that begins at its token `continued`, 63 bits.

    vLLM's generator starts again with every request. With one seed for all parts, the numbers that
    drew the first tokens would draw the later ones again, which would then depend on them.
    Mixed as in SplitMix64 (Steele, Lea and Flood 2014).
    """
    state = (seed + (continued + 1) * 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return (state ^ (state >> 31)) >> 1


def check_request(request: Request, *, longest: int | None) -> None:
    """Errors: `ValueError` for what vLLM would silently change: a temperature, or the length."""
    if request.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"request {request.id!r} has temperature={request.temperature}; vLLM would draw at "
            f"{LOWEST_TEMPERATURE} instead, its lowest"
        )
    positions = len(request.prompt) + request.max_tokens
    if longest is not None and positions > longest:
        raise ValueError(
            f"request {request.id!r} has {len(request.prompt)} tokens and may get "
            f"{request.max_tokens} more; the model has {longest} positions"
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
    """A response, each token with its version.

    Args:
        spans: vLLM's `weight_versions`: contiguous, by index of the token.
        version_of: reads one of their versions.

    Errors: `EngineError` for a response that is not whole, or ended in a way that is none of ours.
    """
    if finish_reason not in _REASONS:
        raise EngineError(f"engine {engine}: request {request.id!r} ended with {finish_reason!r}")
    if len(logprobs) != len(tokens) or any(value <= _NO_LOGPROB for value in logprobs):
        raise EngineError(
            f"engine {engine}: request {request.id!r} came with {len(tokens)} tokens and not as "
            "many log-probs; are its weights finite?"
        )
    versions = [
        version_of(str(span["version"]))
        for span in spans or ()
        for _ in range(int(span["start"]), int(span["end"]))
    ]
    if len(versions) != len(tokens):
        raise EngineError(
            f"engine {engine}: request {request.id!r} came with {len(tokens)} tokens and weight "
            f"versions of {len(versions)}; use a vLLM that answers with weight_versions, as 0.32"
        )
    return Sample(
        request_id=request.id,
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        versions=tuple(versions),
        finish_reason=_REASONS[finish_reason],
    )
