"""The answers of simulated engines: the length of a response, and its sample."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

from megatron_idempotent.rollout.records import FinishReason, Request, Sample

from .latency import LogNormal, uniform

_SOME = LogNormal(median=500, p99=4000)
#: What a simulated response is made of.
TOKEN = 7

Length = Callable[[Request], float]
"""Tokens of the whole response to a request, the part that it continues included."""


def sample_of(request: Request, versions: tuple[int, ...], reason: FinishReason) -> Sample:
    """A sample with an entry for each version. Its tokens and log-probs are shared, not copied."""
    return Sample(
        request_id=request.id,
        tokens=_tokens(len(versions)),
        logprobs=_logprobs(len(versions)),
        versions=versions,
        finish_reason=reason,
    )


def some_length(request: Request) -> float:
    """Around 500 tokens with a long tail, by the request's seed, or its name where it has none."""
    seed = request.seed if request.seed is not None else zlib.crc32(request.id.encode())
    return _SOME.quantile(uniform(seed))


@functools.lru_cache(maxsize=4096)
def _tokens(count: int) -> tuple[int, ...]:
    return (TOKEN,) * count


@functools.lru_cache(maxsize=4096)
def _logprobs(count: int) -> tuple[float, ...]:
    return (-1.0,) * count
