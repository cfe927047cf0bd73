"""A vLLM server, over HTTP, keeps the contract of all engines."""

import asyncio

import pytest
from contract import EngineContract
from contract_base import served
from served import OnServer, slow

from megatron_idempotent.rl.engines import EngineUnsupported


class TestVllmEngine(OnServer, EngineContract):
    # vLLM draws a part that is resubmitted with another generator than the whole.
    exact_seeds = False
    pauses_to_stage = True
    hot = (32, {"max_tokens": 200, "temperature": 2.0})  # its highest temperature

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
