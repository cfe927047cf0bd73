"""A vLLM server, over HTTP, keeps the contract of all engines."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from contract import EngineContract
from contract_base import served
from served import slow
from tiny import END

from megatron_idempotent.rl.engines import EngineUnsupported


class TestVllmEngine(EngineContract):
    # vLLM draws a part that is resubmitted with another generator than the whole.
    exact_seeds = False

    @pytest.fixture(autouse=True)
    def server(self, shared):
        self.shared = shared
        shared.start()

    @contextlib.asynccontextmanager
    async def serving(self, directory):
        async with self.shared.engine(directory) as engine:
            yield engine

    async def start(self, engine, requests):
        await slow(engine)
        return await super().start(engine, requests)

    @served
    async def test_only_the_stop_tokens_of_the_request_end_a_sample(self, engine, old):
        # As in the contract, at vLLM's highest temperature.
        samples = await asyncio.gather(
            *(
                engine.generate(self.request(max_tokens=200, temperature=2.0, seed=place))
                for place in range(32)
            )
        )
        assert all(sample.finish_reason == "length" for sample in samples)
        assert any(END in sample.tokens[:-1] for sample in samples)

    @served
    async def test_tokens_keep_the_version_they_were_drawn_with(self, engine, old, new):
        first = (await engine.health()).version
        weights = {first: old}
        requests = self.ragged(8, max_tokens=150)
        calls = await self.start(engine, requests)
        for turn in range(4):
            # Paused before it is staged, so that it is no matter how fast the engine is.
            await engine.pause()
            target = old if turn % 2 else new
            weights[await self.switch(engine, target)] = target
            await engine.generate(self.request(max_tokens=2))
        for request, sample in zip(requests, await asyncio.gather(*calls), strict=True):
            assert len(sample.tokens) == 150
            assert list(sample.versions) == sorted(sample.versions)
            assert set(sample.versions) == set(weights)
            self.check_logprobs(request, sample, weights)

    @served
    async def test_a_prompt_seen_before_a_commit_is_computed_anew(self, engine, old, new):
        prompt = [3 + place % 60 for place in range(200)]  # more than a block of the cache
        weights = {}
        for directory in (old, new):
            weights[await self.switch(engine, directory)] = directory
            for _ in range(2):
                request = self.request(prompt)
                self.check_logprobs(request, await engine.generate(request), weights)

    @served
    async def test_requests_that_have_just_been_sent_come_back_from_closing_too(self, engine, old):
        await slow(engine)
        calls = [
            asyncio.ensure_future(engine.generate(each)) for each in self.ragged(3, max_tokens=200)
        ]
        await asyncio.sleep(0)
        await engine.close()
        for sample in await asyncio.gather(*calls):
            assert sample.finish_reason == "abort"

    @served
    async def test_a_server_without_sleep_mode_says_how_to_get_it(self, engine, old):
        for call in (engine.sleep(), engine.wake(("weights",))):
            with pytest.raises(EngineUnsupported, match="--enable-sleep-mode"):
                await call
        assert (await engine.health()).status == "SERVING"
