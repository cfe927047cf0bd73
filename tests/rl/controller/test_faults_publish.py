"""Weights that do not reach the engines, and engines that are lost and back."""

import pytest
from toy import Toy, ToyStore, conserved, run_virtually
from toy_faults import BAD, cut_off, once, publish_raises

from megatron_idempotent.rl.controller import (
    EnginesLost,
    FirstReadySampler,
    InOrderSampler,
    PublishFailed,
    StrictSampler,
)


def test_a_publish_without_an_engine_is_tried_again():
    toy = Toy()
    toy.generator.publishing = [EnginesLost("all dead"), EnginesLost("all dead")]
    once(toy.run(5))
    assert toy.published() == [1, 2, 3, 4, 5]
    assert toy.logger.rows[-1][1]["rollouts/retries/publish"] == 2


@pytest.mark.parametrize("every", [0, 1])  # beside the next step, or before a checkpoint
def test_weights_that_cannot_be_published_end_the_run(every):
    toy = Toy(store=ToyStore(), checkpoint_every=every)
    publish_raises(toy, BAD, versions=range(2, 9))
    with pytest.raises(PublishFailed, match="version 2 could not be published in 3 attempts"):
        toy.run(9)
    assert len(toy.policy.steps) == 2
    assert toy.published() == [1, None]
    assert toy.policy.open is None
    assert conserved(run_virtually(toy.controller.ping()))


def test_groups_wait_for_engines_that_are_all_lost_and_get_the_newest_weights():
    toy = Toy(sampler=InOrderSampler(1))
    generate, lost = toy.generator.generate, []

    async def sometimes(group_id, prompt, *, attempt):
        if group_id >= 4 and not lost:
            raise EnginesLost("all dead")
        return await generate(group_id, prompt, attempt=attempt)

    async def recover():
        lost.append(1)
        return len(lost) == 1

    toy.generator.generate, toy.generator.recover = sometimes, recover
    toy.run(5)
    once(toy)
    assert toy.status.counts["filtered"] == 0
    versions = [version for _, version in toy.kinds("publish")]
    assert sorted({*versions}) == [0, 1, 2, 3, 4, 5]
    assert len(versions) == 7


def test_a_publish_that_fails_beside_a_step_without_groups_ends_the_run_and_no_stall_does():
    toy = Toy(sampler=StrictSampler())
    publish_raises(toy, BAD, versions=[1], times=3)
    with pytest.raises(PublishFailed, match="version 1 could not be published in 3 attempts"):
        toy.run(5)
    once(toy.run(5))


def test_a_run_that_is_cancelled_in_a_publish_publishes_when_it_is_called_again():
    toy = Toy(sampler=StrictSampler())
    toy.generator.publish_seconds = 3.0
    cut_off(toy, lambda status: status.trainer_version == 2, how="cancel", go_on=5)
    once(toy)
    assert toy.published() == [1, None, 3, 4, 5]


def test_engines_that_came_back_during_a_publish_are_published_to_once():
    toy = Toy(sampler=StrictSampler())
    left = publish_raises(toy, EnginesLost("all dead"), versions=[2], times=3)

    async def recover():
        return left[0] == 1

    toy.generator.recover = recover
    once(toy.run(4), steps=4)
    assert [version for _, version in toy.kinds("publish")] == [0, 1, 2, 3, 4]


def test_a_publish_that_is_waited_for_ends_with_a_run_that_is_cancelled():
    toy = Toy(sampler=FirstReadySampler(), capacity=8)
    toy.generator.publish_seconds = 50.0
    cut_off(toy, "waiting for the publishing", how="cancel", go_on=5)
    once(toy)
