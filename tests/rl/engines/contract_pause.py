"""The contract of `pause`, `resume` and `close`, and of parts that are resubmitted."""

from __future__ import annotations

import asyncio

import pytest
from contract_base import ContractBase, served

from megatron_idempotent.rl.engines import EngineDead
from megatron_idempotent.rl.engines.pool import generate_whole


class PauseContract(ContractBase):
    """An engine that stops between two tokens, and goes on."""

    async def start(self, engine, requests):
        """Calls that have drawn some tokens, and have more to draw."""
        calls = [asyncio.ensure_future(engine.generate(each)) for each in requests]
        # A short request runs beside them: once it is answered, they have come as far.
        await engine.generate(self.request(max_tokens=6))
        return calls

    @served
    async def test_requests_wait_while_it_is_paused(self, engine, old):
        await engine.pause()
        assert (await engine.health()).status == "PAUSED"
        calls = [asyncio.ensure_future(engine.generate(self.request())) for _ in range(3)]
        for _ in range(20):
            assert (await engine.health()).status == "PAUSED"
        assert not any(call.done() for call in calls)
        await engine.resume()
        assert (await engine.health()).status == "SERVING"
        assert all(len(sample.tokens) == 8 for sample in await asyncio.gather(*calls))

    @served
    async def test_running_requests_go_on_behind_a_pause(self, engine, old):
        requests = self.ragged(6, max_tokens=100)
        calls = await self.start(engine, requests)
        for _ in range(3):
            await engine.pause("keep")
            assert (await engine.health()).status == "PAUSED"
            await engine.resume()
            await engine.generate(self.request(max_tokens=2))
        for request, sample in zip(requests, await asyncio.gather(*calls), strict=True):
            assert len(sample.tokens) == 100
            self.check_logprobs(request, sample, old)

    @served
    async def test_pausing_and_resuming_twice_does_nothing(self, engine, old):
        await engine.resume()
        calls = await self.start(engine, self.ragged(2, max_tokens=150))
        await engine.pause()
        await engine.pause("abort")  # paused already: running requests stay
        await engine.pause()
        assert not any(call.done() for call in calls)
        await engine.resume()
        await engine.resume()
        assert [len(sample.tokens) for sample in await asyncio.gather(*calls)] == [150, 150]

    @served
    async def test_an_abort_gives_back_what_there_is(self, engine, old):
        requests = self.ragged(6, max_tokens=200)
        calls = await self.start(engine, requests)
        await engine.pause("abort")
        for request, sample in zip(requests, await asyncio.gather(*calls), strict=True):
            assert sample.finish_reason == "abort"
            assert 0 < len(sample.tokens) < 200
            self.check_logprobs(request, sample, old)
        assert (await engine.health()).status == "PAUSED"

    @served
    async def test_a_resubmitted_part_loses_nothing_and_repeats_nothing(self, engine, old):
        requests = self.ragged(6, max_tokens=120)
        uninterrupted = await asyncio.gather(*(engine.generate(each) for each in requests))
        calls = [asyncio.ensure_future(generate_whole(engine, each)) for each in requests]
        for _ in range(3):
            await engine.generate(self.request(max_tokens=6))
            await engine.pause("abort")
            await engine.resume()
        joined = await asyncio.gather(*calls)
        for request, sample, expected in zip(requests, joined, uninterrupted, strict=True):
            assert sample.finish_reason == "length"
            assert len(sample.tokens) == 120
            self.check_logprobs(request, sample, old)
            if self.exact_seeds:
                assert sample.tokens == expected.tokens

    @served
    async def test_a_waiting_pause_lets_running_requests_end(self, engine, old):
        if not self.waits:
            pytest.skip("this engine's pauses do not wait")
        calls = await self.start(engine, self.ragged(6, max_tokens=60))
        await engine.pause("wait")
        assert (await engine.health()).running == 0
        assert (await engine.health()).status == "PAUSED"
        for sample in await asyncio.gather(*calls):
            assert (sample.finish_reason, len(sample.tokens)) == ("length", 60)
        await engine.resume()

    @served
    async def test_closing_gives_back_what_there_is(self, engine, old):
        if not self.closes:
            pytest.skip("this engine is shared by the tests")
        requests = self.ragged(3, max_tokens=200)
        calls = await self.start(engine, requests)
        await engine.close()
        for request, sample in zip(requests, await asyncio.gather(*calls), strict=True):
            assert sample.finish_reason == "abort"
            self.check_logprobs(request, sample, old)
        await engine.close()
        health = await engine.health()
        assert (health.status, health.version, health.running) == ("DEAD", None, 0)
        with pytest.raises(EngineDead):
            await engine.generate(self.request())
