"""Shared by the tests of `SglangEngine`: checkpoints, engines, buckets, and true log-probs."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from sglang_server import FakeSglang
from tiny import END, make_checkpoint, read_weights

from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.engines.sglang import SglangEngine
from megatron_idempotent.rl.weights import Bucket, WeightUpdate

_Result = TypeVar("_Result")


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def checkpoint(seed: int) -> Path:
    """One of random weights; the server starts with that of seed 0."""
    return make_checkpoint(Path(_root().name) / str(seed), seed=seed)


@functools.cache
def weights(seed: int) -> Mapping[str, torch.Tensor]:
    return read_weights(checkpoint(seed))


#: Log-probs of this model are off by no more: two layers of five products, of at most 128 terms
#: each, in float32 and in another order on either side.
ROUNDED = 2 * 2 * 5 * 128 * 2.0**-24


@functools.cache
def _model(seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint(seed)).eval()


@torch.no_grad()
def true_logprobs(
    seed: int, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Computes the log-probs of a checkpoint's weights in one forward."""
    logits_TV = _model(seed)(torch.tensor([[*prompt, *tokens]])).logits[0].double() / temperature
    logprobs_TV = logits_TV.log_softmax(-1)[len(prompt) - 1 : -1]
    return [float(logprobs_TV[place, token]) for place, token in enumerate(tokens)]


def request(id: str = "0", **changes: Any) -> Request:
    """One of 20 tokens, if nothing else is asked for."""
    fields = {"prompt": (5, 6, 7), "max_tokens": 20, "seed": 3}
    return Request(id=id, **(fields | changes))


async def buckets_of(
    tensors: Mapping[str, torch.Tensor], *, per_bucket: int = 5, fails_behind: int | None = None
) -> AsyncIterator[Bucket]:
    """The tensors, some in each bucket."""
    names = list(tensors)
    for index in range(0, len(names), per_bucket):
        if fails_behind is not None and index // per_bucket == fails_behind:
            raise OSError("the trainer is gone")
        part = {name: tensors[name] for name in names[index : index + per_bucket]}
        yield Bucket.of(index // per_bucket, part)


async def stage(engine: SglangEngine, seed: int, **fields: Any) -> WeightUpdate:
    """The weights of a checkpoint, as the version of that number."""
    update = WeightUpdate(**({"id": f"run/{seed}", "version": seed} | fields))
    await engine.stage(update, buckets_of(weights(seed)))
    return update


def scenario(
    run: Callable[[SglangEngine, FakeSglang, Path], Awaitable[_Result]],
    directory: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    start: Path | None = None,
    **flags: Any,
) -> _Result:
    """Run it with a fresh server and an engine of it, which is closed afterwards."""
    with FakeSglang(start or checkpoint(0), end_tokens=(END,), **flags) as server:

        async def act() -> _Result:
            given = {"checkpoint": checkpoint(0), "directory": directory, "name": "sgl"}
            engine = SglangEngine(server.url, **(given | dict(settings or {})))
            try:
                return await asyncio.wait_for(run(engine, server, directory), 60)
            finally:
                await engine.close()

        return asyncio.run(act())
