"""The controller's fleet over a real engine: groups, versions of tokens, samples that fail."""

from __future__ import annotations

import asyncio

import pytest
from training import Training

pytest.importorskip("transformers")

from contract_base import until

from megatron_idempotent.rl.controller import EnginesLost, Fleet, PoisonedPrompt
from megatron_idempotent.rl.engines import EngineDead, EngineError, Request
from megatron_idempotent.rl.engines.transformers import TransformersEngine

PROMPT = (5, 6, 7)


class Faulty(TransformersEngine):
    """Fails the samples whose ids are named, so many times each; refuses commits; or dies."""

    refuses = dies = False

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.failures: dict[str, int] = {}

    async def generate(self, asked):
        if self.dies:
            await self.close()
            raise EngineDead("gone")
        if self.failures.get(asked.id):
            self.failures[asked.id] -= 1
            raise EngineError(f"{self.name} fails request {asked.id}")
        return await super().generate(asked)

    async def commit(self, update_id):
        if self.refuses:
            raise EngineError("no")
        return await super().commit(update_id)


@pytest.fixture
def make_fleet(new):
    """`make_fleet(engine)` publishes the new weights to it; the fleet is closed after the test."""
    made = []

    def make(*engines, samples=4, max_tokens=24):
        async def score(group_id, prompt, drawn):
            return [float(len(sample.tokens)) for sample in drawn]

        def requests(group_id, prompt):
            return [
                Request(id=f"{group_id}/{i}", prompt=prompt, max_tokens=max_tokens, seed=i)
                for i in range(samples)
            ]

        made.append(Fleet(engines, source=Training(new), requests=requests, score=score))
        return made[-1]

    yield make
    for fleet in made:
        asyncio.run(fleet.close())


async def test_a_group_has_a_sample_per_request_and_the_trainers_versions(old, make_fleet):
    # The engine has served another run: its own versions go on from there.
    fleet = make_fleet(TransformersEngine(old, version=7))
    await fleet.publish(0)
    first = await fleet.generate(3, PROMPT, attempt=0)
    await fleet.publish(0)
    await fleet.publish(1)
    second = await fleet.generate(4, PROMPT, attempt=0)
    assert (first.id, first.prompt, first.failed) == (3, PROMPT, 0)
    assert [sample.request_id for sample in first.samples] == [f"3/{i}" for i in range(4)]
    assert first.rewards == tuple(float(len(sample.tokens)) for sample in first.samples)
    assert {v for sample in first.samples for v in sample.versions} == {0}
    assert (first.oldest_version, second.oldest_version) == (0, 1)


async def test_tokens_that_are_drawn_across_an_update_say_so_each(watched, make_fleet):
    engine = TransformersEngine(watched.model)
    fleet = make_fleet(engine, max_tokens=120)
    await fleet.publish(4)
    group = asyncio.ensure_future(fleet.generate(0, PROMPT, attempt=0))
    while len(watched.draws) < 5:
        await asyncio.sleep(0.001)
    await fleet.publish(5)
    found = await group
    for sample in found.samples:
        assert list(sample.versions) == sorted(sample.versions)
    assert found.oldest_version == 4
    assert {v for sample in found.samples for v in sample.versions} == {4, 5}


async def test_a_sample_that_fails_is_tried_again_and_left_out_after_that(old, make_fleet):
    engine = Faulty(old)
    engine.failures = {"0/1": 1, "0/2": 2, "1/0": 2, "1/1": 2, "1/2": 2}
    fleet = make_fleet(engine)
    await fleet.publish(0)
    found = await fleet.generate(0, PROMPT, attempt=0)
    assert (found.failed, len(found.rewards)) == (1, 3)
    assert [sample.request_id for sample in found.samples] == ["0/0", "0/1", "0/3"]
    with pytest.raises(EngineError, match="fails request 1/0"):
        await fleet.generate(1, PROMPT, attempt=0)


async def test_a_prompt_that_no_engine_can_answer_is_poisoned_and_leaves_nothing_running(
    old, make_fleet
):
    async def idle():
        return (await engine.health()).running == 0

    engine = TransformersEngine(old)
    fleet = make_fleet(engine)
    await fleet.publish(0)
    with pytest.raises(PoisonedPrompt, match="256 positions"):
        await fleet.generate(0, (3,) * 240, attempt=0)
    running = asyncio.ensure_future(fleet.generate(1, PROMPT, attempt=0))
    await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(idle)


async def test_without_an_engine_a_group_and_an_update_say_that_all_are_lost(old, make_fleet):
    engine = Faulty(old)
    fleet = make_fleet(engine)
    await fleet.publish(0)
    engine.dies = True
    with pytest.raises(EnginesLost, match="no engine is left"):
        await fleet.generate(0, PROMPT, attempt=0)
    assert not await fleet.recover()
    with pytest.raises(EnginesLost, match="no engine took version"):
        await fleet.publish(1)


async def test_an_engine_that_did_not_take_the_weights_samples_no_more_until_it_does(
    old, make_fleet
):
    bad = Faulty(old, name="bad")
    fleet = make_fleet(TransformersEngine(old, name="good"), bad)
    await fleet.publish(0)
    for version, bad.refuses in ((1, True), (2, False)):
        assert (await fleet.publish(version))["engines_behind"] == bad.refuses
        for number in range(2):
            group = await fleet.generate(number, PROMPT, attempt=0)
            assert group.oldest_version == version


class Service:
    """Passes all on to an engine; started again, it has one with the weights of before the run."""

    def __init__(self, directory, name):
        self._make = lambda: TransformersEngine(directory, name=name, version=7)
        self.start()

    def start(self):
        self._engine = self._make()

    def __getattr__(self, name):
        return getattr(self._engine, name)


async def test_an_engine_that_was_started_again_samples_no_more_until_it_has_our_weights(
    old, make_fleet
):
    first = Service(old, "first")
    fleet = make_fleet(first, Service(old, "second"))
    await fleet.publish(0)
    await first.close()
    first.start()
    drawn = [await fleet.generate(number, PROMPT, attempt=0) for number in range(2)]
    why = "it serves version 7, which this run has not published"
    assert fleet.quarantined == {"first": why}
    await fleet.publish(1)
    drawn.append(await fleet.generate(2, PROMPT, attempt=0))
    assert [(group.failed, group.oldest_version) for group in drawn] == [(0, 0), (0, 0), (0, 1)]
    assert fleet.quarantined == {}
