"""The contract of `generate` and `health`."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from contract_base import ContractBase, reference, served, until
from tiny import END


class GenerateContract(ContractBase):
    """Tests of a sample's fields, and of what they depend on."""

    @served
    async def test_a_sample_ends_at_its_longest_length(self, engine, old):
        for longest in (1, 2, 9):
            request = self.request(max_tokens=longest, seed=1)
            sample = await engine.generate(request)
            assert sample.request_id == request.id
            assert len(sample.tokens) == longest
            assert sample.finish_reason == "length"
            assert all(0 <= token < self.vocabulary for token in sample.tokens)

    @served
    async def test_a_sample_ends_with_its_first_stop_token(self, engine, old):
        stops = tuple(range(0, self.vocabulary, 4))
        samples = await asyncio.gather(
            *(engine.generate(each) for each in self.ragged(16, max_tokens=24, stop_tokens=stops))
        )
        for sample in samples:
            stopped = sample.finish_reason == "stop"
            assert (sample.tokens[-1] in stops) == stopped
            assert not set(sample.tokens[:-1]) & set(stops)
            assert stopped or len(sample.tokens) == 24
        assert any(sample.finish_reason == "stop" for sample in samples)

    @served
    async def test_only_the_stop_tokens_of_the_request_end_a_sample(self, engine, old):
        # So hot that tokens are all but equally likely: the model's own end is among them.
        samples = await asyncio.gather(
            *(
                engine.generate(self.request(max_tokens=100, temperature=50.0, seed=place))
                for place in range(8)
            )
        )
        assert all(sample.finish_reason == "length" for sample in samples)
        assert any(END in sample.tokens[:-1] for sample in samples)

    @served
    async def test_tokens_carry_the_version_of_the_weights(self, engine, old):
        sample = await engine.generate(self.request())
        assert set(sample.versions) == {(await engine.health()).version}

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    @served
    async def test_logprobs_are_those_of_the_tempered_distribution(self, engine, old, temperature):
        requests = self.ragged(12, max_tokens=20, temperature=temperature)
        samples = await asyncio.gather(*(engine.generate(each) for each in requests))
        for request, sample in zip(requests, samples, strict=True):
            self.check_logprobs(request, sample, old)

    @served
    async def test_tokens_are_drawn_from_that_distribution(self, engine, old):
        request = self.request(max_tokens=1)
        samples = await asyncio.gather(
            *(engine.generate(self.request(max_tokens=1, seed=seed)) for seed in range(512))
        )
        with torch.no_grad():
            logits = reference(old, torch.float64)(torch.tensor([request.prompt])).logits
        logprobs = torch.log_softmax(logits[0, -1], dim=-1)
        mean = float((logprobs.exp() * logprobs).sum())
        spread = math.sqrt(float((logprobs.exp() * (logprobs - mean) ** 2).sum()))
        found = sum(sample.logprobs[0] for sample in samples) / len(samples)
        # Five standard errors of a mean of 512.
        assert found == pytest.approx(mean, abs=5 * spread / math.sqrt(len(samples)))

    @served
    async def test_other_seeds_and_none_give_other_samples(self, engine, old):
        samples = await asyncio.gather(
            *(
                engine.generate(self.request(seed=seed, max_tokens=16))
                for seed in (1, 2, -1, 2**40 + 1, None, None)
            )
        )
        assert len({sample.tokens for sample in samples}) == len(samples)

    @served
    async def test_a_seeded_sample_is_the_same_alone_and_among_others(self, engine, old):
        if not self.exact_seeds:
            pytest.skip("this engine's seeds do not hold across batches")
        requests = self.ragged(24, max_tokens=20)
        together = await asyncio.gather(*(engine.generate(each) for each in requests))
        for request, expected in list(zip(requests, together, strict=True))[::3]:
            assert (await engine.generate(request)).tokens == expected.tokens

    @served
    async def test_a_request_that_can_never_be_answered_is_refused(self, engine, old):
        for prompt, longest in (
            ((3, self.vocabulary), 4),
            ((3, -1), 4),
            ((3,) * (self.max_positions - 3), 4),
        ):
            with pytest.raises(ValueError, match="request"):
                await engine.generate(self.request(prompt, max_tokens=longest))
        sample = await engine.generate(self.request((3,) * (self.max_positions - 4), max_tokens=4))
        assert len(sample.tokens) == 4

    @served
    async def test_health_counts_what_is_running_and_a_cancelled_call_is_not(self, engine, old):
        async def running(number):
            return (await engine.health()).running == number

        assert (await engine.health()).status == "SERVING"
        await engine.pause()
        calls = [asyncio.ensure_future(engine.generate(self.request())) for _ in range(3)]
        await until(lambda: running(3))
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        await until(lambda: running(2))
        await engine.resume()
        await asyncio.gather(*calls[1:])
        await until(lambda: running(0))
