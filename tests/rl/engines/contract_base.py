"""Shared by the tests of engines: checkpoints, updates of weights, reference log-probs."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import torch
from tiny import read_weights

from megatron_idempotent.rl.engines import EngineError, Request, RolloutEngine, Sample
from megatron_idempotent.rl.weights import Bucket, WeightUpdate

_ids = itertools.count()


def served(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on an engine that serves `old`: it is given as `engine`, beside the fixtures."""

    @functools.wraps(test)
    def on_engine(self: ContractBase, **given: object) -> None:
        old = given["old"]
        assert isinstance(old, Path)
        self.run(old, lambda engine: test(self, engine=engine, **given))

    signature = inspect.signature(test)
    fixtures = [each for each in signature.parameters.values() if each.name != "engine"]
    on_engine.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
    return on_engine


class ContractBase:
    """An engine's tests override `serving()`, and name here what the engine cannot do."""

    family = "qwen2"
    vocabulary = 64
    max_positions = 256
    deadline_s = 60.0
    #: The least error that log-probs are allowed; float32's own is added to it.
    least_tolerance = 1e-5
    #: Same seed: the same tokens, in any batch and across parts.
    exact_seeds = True
    #: `pause("wait")` works.
    waits = True
    #: Updates with a `base_version` are taken.
    deltas = True
    #: Running requests come back as parts from `close()`, and `health()` is DEAD after it.
    closes = True
    #: Running requests are paused before an update is staged: the engine would end them meanwhile.
    pauses_to_stage = False
    #: Requests, and their settings, of which one draws the model's own end token by chance.
    hot = (8, {"max_tokens": 100, "temperature": 50.0})

    def serving(self, directory: Path) -> AbstractAsyncContextManager[RolloutEngine]:
        """An engine that serves a checkpoint, under whatever version, and is not paused."""
        raise NotImplementedError

    @pytest.fixture
    def old(self, make_model) -> Path:
        """The weights that the engine starts with."""
        return make_model(family=self.family, vocabulary=self.vocabulary)

    @pytest.fixture
    def new(self, make_model) -> Path:
        """Other weights for the same model."""
        return make_model(family=self.family, vocabulary=self.vocabulary, seed=1)

    def run(self, directory: Path, scenario: Callable[[RolloutEngine], Awaitable[None]]) -> None:
        """Run a scenario on an engine, within the deadline."""

        async def whole() -> None:
            async with self.serving(directory) as engine:
                await scenario(engine)

        asyncio.run(asyncio.wait_for(whole(), self.deadline_s))

    def request(self, prompt: Sequence[int] = (7, 3, 21, 40), **settings) -> Request:
        """One with an id of its own; 8 tokens, if nothing else is said."""
        return Request(id=f"r{next(_ids)}", prompt=tuple(prompt), **{"max_tokens": 8, **settings})

    def ragged(self, number: int, *, seed: int = 0, **settings) -> list[Request]:
        """Requests with prompts of 1 to 40 tokens, of which every fourth has its neighbour's."""
        generator = torch.Generator().manual_seed(seed)
        requests: list[Request] = []
        for place in range(number):
            length = int(torch.randint(1, 41, (), generator=generator))
            prompt = torch.randint(3, self.vocabulary, (length,), generator=generator).tolist()
            if place % 4 == 3:
                prompt = requests[-1].prompt
            requests.append(self.request(prompt, seed=place, **settings))
        return requests

    def check_logprobs(
        self, request: Request, sample: Sample, weights: Path | Mapping[int, Path]
    ) -> None:
        """Each token's log-prob is that of its version's weights, over all tokens before it.

        The reference is a forward in float64 over the whole sequence. The same in float32 shows
        how much rounding there is; an engine that adds up in another order may be off by some
        times as much.
        """
        by_version = (
            weights if isinstance(weights, Mapping) else dict.fromkeys(sample.versions, weights)
        )
        for version in set(sample.versions):
            directory = by_version[version]
            exact, rounded = (
                forced(directory, request, sample.tokens, dtype)
                for dtype in (torch.float64, torch.float32)
            )
            allowed = self.least_tolerance + 10 * float((exact - rounded).abs().max())
            for place, found in enumerate(sample.versions):
                if found == version:
                    assert sample.logprobs[place] == pytest.approx(
                        float(exact[place]), abs=allowed
                    ), (request, place)

    async def start(
        self, engine: RolloutEngine, requests: Sequence[Request]
    ) -> list[asyncio.Future[Sample]]:
        """Calls that have drawn some tokens, and have more to draw."""
        calls = [asyncio.ensure_future(engine.generate(each)) for each in requests]
        # A short request runs beside them: once it is answered, they have come as far.
        await engine.generate(self.request(max_tokens=6))
        return calls

    async def ended(
        self,
        requests: Sequence[Request],
        calls: Sequence[asyncio.Future[Sample]],
        weights: Path | Mapping[int, Path],
        *,
        tokens: int | None = None,
    ) -> list[Sample]:
        """Their samples, each with the log-probs of its weights; whole, or else aborted."""
        samples = await asyncio.gather(*calls)
        for request, sample in zip(requests, samples, strict=True):
            assert (sample.finish_reason == "abort") == (tokens is None)
            assert tokens in (None, len(sample.tokens))
            self.check_logprobs(request, sample, weights)
        return samples

    async def update(
        self, engine: RolloutEngine, directory: Path, *, above: int = 1
    ) -> WeightUpdate:
        """Stage all of a checkpoint, in a version above the engine's."""
        update = await next_update(engine, above=above)
        await engine.stage(update, buckets(read_weights(directory)))
        return update

    async def switch(self, engine: RolloutEngine, directory: Path) -> int:
        """Stage, pause, commit, resume; return the version."""
        return await self.put_in(engine, await self.update(engine, directory))

    async def put_in(self, engine: RolloutEngine, update: WeightUpdate) -> int:
        """Pause, commit, resume; return the version."""
        await engine.pause()
        assert await engine.commit(update.id) == update.version
        await engine.resume()
        return update.version

    async def is_not_staged(self, engine: RolloutEngine, update_id: str) -> None:
        """A commit is refused, by the update's id."""
        await engine.pause()
        with pytest.raises(EngineError, match=update_id):
            await engine.commit(update_id)
        await engine.resume()

    async def serves(
        self, engine: RolloutEngine, weights: Path | Mapping[int, Path], version: int
    ) -> None:
        """It serves those weights, under that version."""
        health = await engine.health()
        assert (health.status, health.version) == ("SERVING", version)
        request = self.request(max_tokens=16, seed=3)
        sample = await engine.generate(request)
        assert set(sample.versions) == {version}
        self.check_logprobs(request, sample, weights)

    async def all(self, engine: RolloutEngine, requests: Sequence[Request]) -> list[Sample]:
        """Their samples, drawn at once."""
        return await asyncio.gather(*(engine.generate(each) for each in requests))


async def next_update(engine: RolloutEngine, *, above: int = 1) -> WeightUpdate:
    """An update with an id of its own, so many versions above the engine's."""
    version = (await engine.health()).version
    return WeightUpdate(id=f"u{next(_ids)}", version=(version or 0) + above)


async def buckets(
    tensors: Mapping[str, torch.Tensor], *, nbytes: int = 1 << 16
) -> AsyncIterator[Bucket]:
    """Tensors in buckets of up to so many bytes, at least one tensor each."""
    for bucket in cut(tensors, nbytes=nbytes):
        yield bucket


def cut(tensors: Mapping[str, torch.Tensor], *, nbytes: int = 1 << 16) -> list[Bucket]:
    """Tensors in buckets of up to so many bytes, at least one tensor each."""
    groups: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in tensors.items():
        held = sum(each.nbytes for each in groups[-1].values())
        if groups[-1] and held + tensor.nbytes > nbytes:
            groups.append({})
        groups[-1][name] = tensor
    return [Bucket.of(index, group) for index, group in enumerate(groups)]


async def listed(given: Sequence[Bucket]) -> AsyncIterator[Bucket]:
    """These buckets, as they are."""
    for bucket in given:
        yield bucket


@functools.lru_cache(maxsize=8)
def reference(directory: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The checkpoint as transformers loads it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")  # the others have no float64
    return model.eval()


@torch.no_grad()
def forced(
    directory: Path, request: Request, tokens: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Log-probs of a response's tokens, [tokens], of the tempered distribution, in one forward."""
    logits = reference(directory, dtype)(torch.tensor([[*request.prompt, *tokens]])).logits[0]
    logprobs = torch.log_softmax(logits / request.temperature, dim=-1)
    places = torch.arange(len(request.prompt) - 1, len(request.prompt) + len(tokens) - 1)
    return logprobs[places, torch.tensor(tokens)]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again, letting others run in between; the scenario's deadline bounds it."""
    while not await condition():
        await asyncio.sleep(0)
