"""The controller's fleet over a real engine: groups, versions of tokens, samples that fail."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("transformers")

from tiny import read_weights

from megatron_idempotent.rl.controller import EnginesLost, Fleet, PoisonedPrompt
from megatron_idempotent.rl.engines import EngineDead, EngineError, Request
from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.weights import Bucket, TensorInfo


def run(scenario):
    """Run it, and not for ever."""
    return asyncio.run(asyncio.wait_for(scenario, 60))


class Source:
    """The weights of a checkpoint."""

    def __init__(self, directory):
        self.weights = read_weights(directory)

    def tensors(self):
        return tuple(TensorInfo.of(name, tensor) for name, tensor in self.weights.items())

    def buckets(self, *, bucket_bytes):
        yield Bucket.of(0, self.weights)


class Flaky(TransformersEngine):
    """Fails the samples whose ids are named, so many times each."""

    failures: dict[str, int] = {}  # noqa: RUF012 (one per test)

    async def generate(self, asked):
        if self.failures.get(asked.id):
            self.failures[asked.id] -= 1
            raise EngineError(f"{self.name} fails request {asked.id}")
        return await super().generate(asked)


def fleet(*engines, directory, samples=4, max_tokens=24, **settings):
    async def score(group_id, prompt, drawn):
        return [float(len(sample.tokens)) for sample in drawn]

    def requests(group_id, prompt):
        return [
            Request(
                id=f"{group_id}/{i}", prompt=prompt, max_tokens=max_tokens, seed=100 * group_id + i
            )
            for i in range(samples)
        ]

    return Fleet(engines, source=Source(directory), requests=requests, score=score, **settings)


def test_a_group_has_a_sample_per_request_and_the_trainers_versions(old, new):
    async def scenario():
        # The engine has served another run: its own versions go on from there.
        one = fleet(TransformersEngine(old, version=7), directory=new)
        await one.publish(0)
        first = await one.generate(3, (5, 6, 7), attempt=0)
        await one.publish(0)
        await one.publish(1)
        second = await one.generate(4, (5, 6, 7), attempt=0)
        await one.close()
        return first, second

    first, second = run(scenario())
    assert (first.id, first.prompt, first.failed) == (3, (5, 6, 7), 0)
    assert [sample.request_id for sample in first.samples] == [f"3/{i}" for i in range(4)]
    assert first.rewards == tuple(float(len(sample.tokens)) for sample in first.samples)
    assert {v for sample in first.samples for v in sample.versions} == {0}
    assert first.oldest_version == 0
    assert second.oldest_version == 1


def test_tokens_that_are_drawn_across_an_update_say_so_each(old, new):
    async def scenario():
        engine = TransformersEngine(old)
        one = fleet(engine, directory=new, max_tokens=120)
        await one.publish(4)
        group = asyncio.ensure_future(one.generate(0, (5, 6, 7), attempt=0))
        while not (await engine.health()).running:  # on a busy machine that takes a while
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        await one.publish(5)
        found = await group
        await one.close()
        return found

    found = run(scenario())
    for sample in found.samples:
        assert list(sample.versions) == sorted(sample.versions)
        assert set(sample.versions) <= {4, 5}
    assert found.oldest_version == 4
    assert {v for sample in found.samples for v in sample.versions} == {4, 5}


def test_a_sample_that_fails_is_tried_again_and_left_out_behind_that(old, new):
    async def scenario():
        engine = Flaky(old)
        engine.failures = {"0/1": 1, "0/2": 2}
        one = fleet(engine, directory=new)
        await one.publish(0)
        found = await one.generate(0, (5, 6, 7), attempt=0)
        engine.failures = {"1/0": 2, "1/1": 2, "1/2": 2}
        with pytest.raises(EngineError, match="fails request 1/0"):
            await one.generate(1, (5, 6, 7), attempt=0)
        await one.close()
        return found

    found = run(scenario())
    assert found.failed == 1
    assert [sample.request_id for sample in found.samples] == ["0/0", "0/1", "0/3"]
    assert len(found.rewards) == 3


def test_a_prompt_that_no_engine_can_answer_is_poisoned_and_leaves_nothing_running(old, new):
    async def scenario():
        engine = TransformersEngine(old, max_positions=64)
        one = fleet(engine, directory=new)
        await one.publish(0)
        with pytest.raises(PoisonedPrompt, match="64 positions"):
            await one.generate(0, tuple(range(3, 60)), attempt=0)
        running = asyncio.ensure_future(one.generate(1, (5, 6, 7), attempt=0))
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await engine.pause("wait")
        health = await engine.health()
        await one.close()
        return health

    assert run(scenario()).running == 0


async def test_without_an_engine_a_group_and_an_update_say_that_all_are_lost(old, new):
    class Dies(TransformersEngine):
        async def generate(self, asked):
            await self.close()
            raise EngineDead("gone")

    one = fleet(Dies(old), directory=new)
    await one.publish(0)
    with pytest.raises(EnginesLost, match="no engine is left"):
        await one.generate(0, (5, 6, 7), attempt=0)
    assert not await one.recover()
    with pytest.raises(EnginesLost, match="no engine took version"):
        await one.publish(1)


def test_an_engine_that_did_not_take_the_weights_samples_no_more_until_it_does(old, new):
    class Refuses(TransformersEngine):
        refuses = True

        async def commit(self, update_id):
            if self.refuses:
                raise EngineError("no")
            return await super().commit(update_id)

    async def scenario():
        good, bad = TransformersEngine(old, name="good"), Refuses(old, name="bad")
        bad.refuses = False
        one = fleet(good, bad, directory=new)
        await one.publish(0)
        bad.refuses = True
        assert (await one.publish(1))["engines_behind"] == 1
        first = [await one.generate(number, (5, 6, 7), attempt=0) for number in range(2)]
        bad.refuses = False
        await one.publish(2)
        second = [await one.generate(number, (5, 6, 7), attempt=0) for number in range(2)]
        await one.close()
        return first, second

    first, second = run(scenario())
    assert {group.oldest_version for group in first} == {1}
    assert {group.oldest_version for group in second} == {2}


class Service:
    """Passes all on to an engine; started again, it has one with the weights of before the run."""

    def __init__(self, directory, name):
        self._make = lambda: TransformersEngine(directory, name=name, version=7)
        self.start()

    def start(self):
        self._engine = self._make()

    def __getattr__(self, name):
        return getattr(self._engine, name)


def test_an_engine_that_was_started_again_samples_no_more_until_it_has_our_weights(old, new):
    async def scenario():
        first, second = Service(old, "first"), Service(old, "second")
        one = fleet(first, second, directory=new)
        await one.publish(0)
        await first.close()
        first.start()
        drawn = [await one.generate(number, (5, 6, 7), attempt=0) for number in range(2)]
        left_out = one.quarantined
        await one.publish(1)
        drawn.append(await one.generate(2, (5, 6, 7), attempt=0))
        taken_back = one.quarantined
        await one.close()
        return drawn, left_out, taken_back

    drawn, left_out, taken_back = run(scenario())
    assert left_out == {"first": "it serves version 7, which this run has not published"}
    assert [(group.failed, group.oldest_version) for group in drawn] == [(0, 0), (0, 0), (0, 1)]
    assert taken_back == {}
