"""The contract of every engine: a class of tests to inherit, sentence by sentence of `protocol.py`.

    class TestMyEngine(EngineContract):
        waits = False  # what it cannot do; see ContractBase

        @contextlib.asynccontextmanager
        async def serving(self, directory):
            engine = MyEngine(directory)
            yield engine
            await engine.close()

`serving` gives an engine that serves the checkpoint in `directory` and is not paused. Its version
may be any, so one server can serve all tests, if `serving` brings the weights back. Tests use the
protocol alone: weights come in buckets, and what they did is seen in samples. The engine has to run
9 requests at once.
"""

import asyncio
import dataclasses
import math

import pytest
import torch
from contract_base import ContractBase, buckets, cut, listed, next_update, reference, served, until
from tiny import END, read_weights

from megatron_idempotent.rl.engines import EngineDead, EngineError, EngineUnsupported
from megatron_idempotent.rl.engines.pool import generate_whole
from megatron_idempotent.rl.weights import Bucket, UpdateDamaged, UpdateMismatch, UpdateRefused

SCALES, GONE = "scales of a cache that is not in FP8", "the trainer is gone"
#: Updates that are refused, and the error of each.
REFUSED = {
    "a late version": UpdateRefused,
    "another base": UpdateRefused,
    SCALES: EngineUnsupported,
    "flipped": UpdateDamaged,
    "cut short": UpdateDamaged,
    "one left out": UpdateDamaged,
    "twice": UpdateDamaged,
    "unsigned": UpdateDamaged,
    "shape": UpdateMismatch,
    "type": UpdateMismatch,
    "name": UpdateMismatch,
    GONE: (OSError, ValueError, EngineError),
}


def spoilt(how, update, tensors):
    """An update that is refused, and its buckets."""
    name = list(tensors)[2]
    if how == "shape":
        tensors[name] = tensors[name].reshape(-1)[1:]
    elif how == "type":
        tensors[name] = tensors[name].to(torch.bfloat16)
    elif how == "name":
        tensors["model.layers.9.self_attn.q_proj.weight"] = tensors[name]
    given = cut(tensors, nbytes=1 << 14)
    assert len(given) > 3
    sent, name = given[1], next(iter(given[1].tensors))
    if how == "a late version":
        update = dataclasses.replace(update, version=update.version - 1)
    elif how == "another base":
        update = dataclasses.replace(
            update, version=update.version + 1, base_version=update.version
        )
    elif how == SCALES:
        scales = {"model.layers.0.self_attn.k_scale": 0.5}
        update = dataclasses.replace(update, kv_scales=scales)
    elif how == "flipped":
        tensor = sent.tensors[name].clone()
        tensor.view(-1)[0] += 1
        given[1] = dataclasses.replace(sent, tensors={**sent.tensors, name: tensor})
    elif how == "cut short":
        given.pop()
    elif how == "one left out":
        given.pop(1)
    elif how == "twice":
        given.append(Bucket.of(len(given), {name: sent.tensors[name]}))
    elif how == "unsigned":
        given[1] = dataclasses.replace(sent, checksums={})
    return update, given


async def then_fails(given):
    yield given[0]
    raise OSError("the trainer is gone")


class EngineContract(ContractBase):
    """Override `serving`, and the flags of `ContractBase` for what the engine cannot do."""

    # generate and health

    @served
    async def test_a_sample_ends_at_its_longest_length(self, engine, old):
        version = (await engine.health()).version
        for longest in (1, 2, 9):
            request = self.request(max_tokens=longest, seed=1)
            sample = await engine.generate(request)
            assert sample.request_id == request.id
            assert len(sample.tokens) == longest
            assert sample.finish_reason == "length"
            assert all(0 <= token < self.vocabulary for token in sample.tokens)
            assert set(sample.versions) == {version}

    @served
    async def test_a_sample_ends_with_its_first_stop_token(self, engine, old):
        stops = tuple(range(0, self.vocabulary, 4))
        samples = await self.all(engine, self.ragged(16, max_tokens=24, stop_tokens=stops))
        for sample in samples:
            stopped = sample.finish_reason == "stop"
            assert (sample.tokens[-1] in stops) == stopped
            assert not set(sample.tokens[:-1]) & set(stops)
            assert stopped or len(sample.tokens) == 24
        assert any(sample.finish_reason == "stop" for sample in samples)

    @served
    async def test_only_the_stop_tokens_of_the_request_end_a_sample(self, engine, old):
        # So hot that tokens are all but equally likely: the model's own end is among them.
        number, settings = self.hot
        samples = await self.all(
            engine, [self.request(seed=place, **settings) for place in range(number)]
        )
        assert all(sample.finish_reason == "length" for sample in samples)
        assert any(END in sample.tokens[:-1] for sample in samples)

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    @served
    async def test_logprobs_are_those_of_the_tempered_distribution(self, engine, old, temperature):
        requests = self.ragged(12, max_tokens=20, temperature=temperature)
        for request, sample in zip(requests, await self.all(engine, requests), strict=True):
            self.check_logprobs(request, sample, old)

    @served
    async def test_tokens_are_drawn_from_that_distribution(self, engine, old):
        request = self.request(max_tokens=1)
        samples = await self.all(
            engine, [self.request(max_tokens=1, seed=seed) for seed in range(512)]
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
        seeds = (1, 2, -1, 2**40 + 1, None, None)
        samples = await self.all(engine, [self.request(seed=s, max_tokens=16) for s in seeds])
        assert len({sample.tokens for sample in samples}) == len(samples)

    @served
    async def test_a_seeded_sample_is_the_same_alone_and_among_others(self, engine, old):
        if not self.exact_seeds:
            pytest.skip("this engine's seeds do not hold across batches")
        requests = self.ragged(24, max_tokens=20)
        together = await self.all(engine, requests)
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

        await engine.pause()
        calls = [asyncio.ensure_future(engine.generate(self.request())) for _ in range(3)]
        await until(lambda: running(3))
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        await until(lambda: running(2))
        assert (await engine.health()).status == "PAUSED"
        assert not any(call.done() for call in calls[1:])
        await engine.resume()
        assert (await engine.health()).status == "SERVING"
        assert [len(each.tokens) for each in await asyncio.gather(*calls[1:])] == [8, 8]
        await until(lambda: running(0))

    # pause, resume and close

    @served
    async def test_running_requests_go_on_after_a_pause(self, engine, old):
        requests = self.ragged(6, max_tokens=150)
        await engine.resume()  # not paused
        calls = await self.start(engine, requests)
        for _ in range(3):
            await engine.pause("keep")
            await engine.pause("abort")  # paused already: running requests stay
            assert (await engine.health()).status == "PAUSED"
            assert not any(call.done() for call in calls)
            await engine.resume()
            await engine.resume()
            await engine.generate(self.request(max_tokens=2))
        await self.ended(requests, calls, old, tokens=150)

    @served
    async def test_an_abort_gives_back_what_there_is(self, engine, old):
        requests = self.ragged(6, max_tokens=200)
        calls = await self.start(engine, requests)
        await engine.pause("abort")
        samples = await self.ended(requests, calls, old)
        assert all(0 < len(sample.tokens) < 200 for sample in samples)
        assert (await engine.health()).status == "PAUSED"

    @served
    async def test_a_resubmitted_part_loses_nothing_and_repeats_nothing(self, engine, old):
        requests = self.ragged(6, max_tokens=120)
        uninterrupted = await self.all(engine, requests)
        calls = [asyncio.ensure_future(generate_whole(engine, each)) for each in requests]
        for _ in range(3):
            await engine.generate(self.request(max_tokens=6))
            await engine.pause("abort")
            await engine.resume()
        joined = await self.ended(requests, calls, old, tokens=120)
        if self.exact_seeds:
            assert [each.tokens for each in joined] == [each.tokens for each in uninterrupted]

    @served
    async def test_a_waiting_pause_lets_running_requests_end(self, engine, old):
        if not self.waits:
            pytest.skip("this engine's pauses do not wait")
        requests = self.ragged(6, max_tokens=60)
        calls = await self.start(engine, requests)
        await engine.pause("wait")
        health = await engine.health()
        assert (health.status, health.running) == ("PAUSED", 0)
        await self.ended(requests, calls, old, tokens=60)
        await engine.resume()

    @served
    async def test_closing_gives_back_what_there_is(self, engine, old):
        if not self.closes:
            pytest.skip("this engine is shared by the tests")
        requests = self.ragged(3, max_tokens=200)
        calls = await self.start(engine, requests)
        await engine.close()
        await self.ended(requests, calls, old)
        await engine.close()
        health = await engine.health()
        assert (health.status, health.version, health.running) == ("DEAD", None, 0)
        with pytest.raises(EngineDead):
            await engine.generate(self.request())

    # stage, commit and rollback

    @served
    async def test_it_serves_while_an_update_is_staged_and_the_update_after_its_commit(
        self, engine, old, new
    ):
        before = (await engine.health()).version
        update = await next_update(engine, above=3)

        async def between():
            for bucket in cut(read_weights(new)):
                yield bucket
                await self.serves(engine, old, before)

        await engine.stage(update, between())
        await self.serves(engine, old, before)
        await engine.pause()
        assert await engine.commit(update.id) == update.version == before + 3
        health = await engine.health()
        assert (health.status, health.version) == ("PAUSED", update.version)
        await engine.resume()
        await self.serves(engine, new, update.version)

    @served
    async def test_tokens_keep_the_version_they_were_drawn_with(self, engine, old, new):
        first = (await engine.health()).version
        weights = {first: old}
        requests = self.ragged(4, max_tokens=150)
        calls = await self.start(engine, requests)
        for turn in range(4):
            if self.pauses_to_stage:
                await engine.pause()
            target = old if turn % 2 else new
            weights[await self.switch(engine, target)] = target
            await engine.generate(self.request(max_tokens=2 if self.pauses_to_stage else 8))
        # After a switch tokens attend to a cache of the new weights, in full.
        for sample in await self.ended(requests, calls, weights, tokens=150):
            assert list(sample.versions) == sorted(sample.versions)
            assert sample.versions[0] == first
            assert len(set(sample.versions)) > 2

    @served
    async def test_parts_of_two_versions_are_joined(self, engine, old, new):
        first = (await engine.health()).version
        requests = self.ragged(4, max_tokens=200)
        calls = await self.start(engine, requests)
        update = await self.update(engine, new)
        await engine.pause("abort")
        parts = await self.ended(requests, calls, old)
        await self.put_in(engine, update)
        for request, part in zip(requests, parts, strict=True):
            rest = dataclasses.replace(
                request,
                prompt=request.prompt + part.tokens,
                max_tokens=10,
                continued=len(part.tokens),
            )
            sample = await engine.generate(rest)
            assert set(sample.versions) == {update.version} != {first}
            self.check_logprobs(rest, sample, new)

    @served
    async def test_what_is_committed_stays_so(self, engine, old, new):
        async def unreadable():
            raise AssertionError("the buckets were read")
            yield

        update = await self.update(engine, new)
        await engine.pause()
        for _ in range(2):
            assert await engine.commit(update.id) == update.version
        await engine.stage(update, unreadable())
        await engine.rollback(update.id)
        await engine.resume()
        assert await engine.commit(update.id) == update.version
        await self.serves(engine, new, update.version)

    @served
    async def test_a_commit_needs_a_pause_and_the_last_update_that_was_staged(
        self, engine, old, new
    ):
        version = (await engine.health()).version
        first = await self.update(engine, old)
        with pytest.raises(EngineError, match="paus"):
            await engine.commit(first.id)
        await self.is_not_staged(engine, "unknown")
        await self.serves(engine, old, version)
        second = await self.update(engine, new)
        await self.is_not_staged(engine, first.id)
        await self.put_in(engine, second)
        await self.serves(engine, new, second.version)

    @served
    async def test_a_rollback_forgets_what_is_staged_and_nothing_else(self, engine, old, new):
        version = (await engine.health()).version
        await engine.rollback("unknown")
        update = await self.update(engine, new)
        await engine.rollback(update.id)
        await self.is_not_staged(engine, update.id)
        await engine.rollback(update.id)
        await self.serves(engine, old, version)
        committed = await self.switch(engine, new)
        await engine.rollback(update.id)
        await self.serves(engine, new, committed)

    @served
    async def test_an_update_may_leave_out_what_has_not_changed(self, engine, old, new, tmp_path):
        if not self.deltas:
            pytest.skip("this engine wants all tensors")
        changed = {name: tensor for name, tensor in read_weights(new).items() if "layers.1" in name}
        update = await next_update(engine)
        update = dataclasses.replace(update, base_version=update.version - 1)
        await engine.stage(update, buckets(changed))
        await self.put_in(engine, update)
        await self.serves(engine, merged(old, changed, tmp_path), update.version)

    # updates that are not taken

    @pytest.mark.parametrize("how", REFUSED)
    @served
    async def test_an_update_that_is_refused_changes_nothing(self, engine, old, new, how):
        version = (await engine.health()).version
        first = await next_update(engine)
        update, given = spoilt(how, first, read_weights(new))
        sent = then_fails(given) if how == GONE else listed(given)
        told = {SCALES: r"kv_scales.*leave kv_scales out", GONE: None}.get(how, update.id)
        with pytest.raises(REFUSED[how], match=told):
            await engine.stage(update, sent)
        await self.is_not_staged(engine, update.id)
        await self.serves(engine, old, version)
        await engine.stage(first, buckets(read_weights(new)))  # as it should have come
        await self.put_in(engine, first)
        await self.serves(engine, new, first.version)

    @served
    async def test_one_update_is_staged_at_a_time(self, engine, old, new):
        other = await next_update(engine, above=2)

        async def between():
            for place, bucket in enumerate(cut(read_weights(new))):
                yield bucket
                if place == 0:
                    with pytest.raises(UpdateRefused, match=other.id):
                        await engine.stage(other, buckets(read_weights(old)))

        update = await next_update(engine)
        await engine.stage(update, between())
        await self.put_in(engine, update)
        await self.serves(engine, new, update.version)

    @served
    async def test_a_damaged_update_has_taken_the_place_of_the_one_before(self, engine, old, new):
        version = (await engine.health()).version
        update = await self.update(engine, new)
        with pytest.raises(UpdateDamaged):
            await engine.stage(await next_update(engine), listed(cut(read_weights(new))[:-1]))
        await self.is_not_staged(engine, update.id)
        await self.serves(engine, old, version)

    @served
    async def test_a_cancelled_stage_changes_nothing(self, engine, old, new):
        version = (await engine.health()).version
        arrived = asyncio.Event()

        async def silent():
            yield cut(read_weights(new))[0]
            arrived.set()
            await asyncio.Event().wait()

        staging = asyncio.ensure_future(engine.stage(await next_update(engine), silent()))
        await arrived.wait()
        staging.cancel()
        await asyncio.wait([staging])
        assert staging.cancelled()
        await self.serves(engine, old, version)
        await self.serves(engine, new, await self.switch(engine, new))


def merged(directory, changed, into):
    """A copy of a checkpoint with some tensors in the place of its own."""
    from safetensors.torch import save_file

    for file in directory.iterdir():
        if file.suffix == ".json":
            (into / file.name).write_bytes(file.read_bytes())
    metadata = {"format": "pt"}
    save_file({**read_weights(directory), **changed}, into / "model.safetensors", metadata)
    return into
