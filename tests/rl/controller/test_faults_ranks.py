"""Ranks that are lost, and restores that fail: on from the newest checkpoint, buffer included."""

import asyncio

import pytest
from toy import Toy, ToyStore, run_virtually
from toy_faults import BAD, FaultyPlane, clean_steps, fails, once, publish_raises, stored, when

from megatron_idempotent.rl.controller import InOrderSampler, StrictSampler
from megatron_idempotent.rl.workers import RanksLost

LOST = RanksLost("rank 1 died")


@pytest.mark.parametrize(("method", "call"), [("begin", 4), ("microbatch", 9), ("finish", 4)])
def test_lost_ranks_go_on_from_the_newest_checkpoint_with_the_buffer_of_it(method, call):
    clean = Toy(sampler=InOrderSampler(1)).run(6)
    lost = {(method, call): LOST}
    toy = stored(sampler=InOrderSampler(1), policy=lost, checkpoint_every=2).run(6)
    assert toy.store.restored == 1
    assert toy.policy.steps == clean.policy.steps
    assert toy.status.counts == clean.status.counts
    assert [version for _, version in toy.kinds("publish")] == [0, 1, 2, 3, 4, 4, 5, 6]


def test_a_put_that_raises_in_a_restore_is_tried_again():
    failing = fails(2)

    async def put(real, group):
        await (failing(real, group) if toy.store.restored else real(group))

    lost = {("microbatch", 9): LOST}
    plane = FaultyPlane(put=put)
    toy = stored(sampler=InOrderSampler(1), policy=lost, plane=plane, checkpoint_every=2)
    once(toy.run(6), steps=6)
    assert toy.store.restored == 1
    assert toy.logger.rows[-1][1]["rollouts/retries/put"] == 2


def test_ranks_that_are_lost_again_and_again_end_the_run():
    lost = {("begin", number): LOST for number in range(20)}
    toy = Toy(policy=lost, store=ToyStore(), restarts=2)
    with pytest.raises(RanksLost, match="rank 1 died"):
        toy.run(5)
    assert toy.store.restored == 2
    with pytest.raises(RanksLost):
        Toy(policy=lost).run(5)  # nothing to restore from


def test_ranks_that_are_lost_in_a_publish_beside_a_step_without_groups_are_restored():
    toy = stored(sampler=StrictSampler())
    publish_raises(toy, LOST, versions=[2], times=1, after_s=1.0)
    once(toy.run(5))
    assert toy.published() == [1, None, 1, 2, 3, 4, 5]
    assert toy.store.restored == 1


def test_a_cancelled_run_whose_step_cannot_be_undone_begins_with_a_restore():
    toy = stored(checkpoint_every=1, policy={("abort", 0): BAD})
    aborted = toy.policy.abort

    async def abort(step_id=None):
        still_open = toy.policy.open
        try:
            await aborted(step_id)
        except RuntimeError:
            toy.policy.open = still_open
            raise

    toy.policy.abort = abort

    async def main():
        running = asyncio.ensure_future(toy.controller.run(5))
        await when(toy, lambda s: (s.trainer_version, s.doing) == (2, "microbatch"))
        running.cancel()
        await asyncio.wait([running])
        toy.status = await toy.controller.run(5)

    run_virtually(main())
    assert toy.store.restored == 1
    once(toy)


def test_ranks_that_are_lost_in_a_restore_are_restored_again_as_often_as_is_allowed():
    lost = {"policy": {("microbatch", 5): LOST}, "checkpoint_every": 1}
    again = [RanksLost("rank 0 died")] * 2
    once(stored(again, restarts=3, **lost).run(5))
    with pytest.raises(RanksLost, match="rank 0 died"):
        stored(again, restarts=2, **lost).run(5)


def test_a_run_whose_restore_failed_begins_with_a_restore():
    lost = {"policy": {("microbatch", 9): LOST}, "checkpoint_every": 2}
    toy = stored([OSError("disk is away")], sampler=InOrderSampler(1), **lost)
    with pytest.raises(OSError, match="disk is away"):
        toy.run(6)
    toy.run(6)
    assert toy.store.restored == 1
    assert toy.policy.steps == clean_steps(6)


def test_a_drain_during_a_restore_ends_the_run_behind_it():
    toy = stored(policy={("microbatch", 5): LOST}, checkpoint_every=1)
    real = toy.store.restore

    async def slow():
        await asyncio.sleep(50)
        return await real()

    toy.store.restore = slow

    async def main():
        running = asyncio.ensure_future(toy.controller.run(100))
        await when(toy, "restore")
        first = asyncio.ensure_future(toy.controller.drain())
        await asyncio.sleep(0)
        await toy.controller.drain()
        assert (await toy.controller.ping()).state == "ended"
        await first
        return await running

    status = run_virtually(main())
    assert status.trainer_version == toy.store.kept["trainer_version"] == len(toy.policy.steps) > 0


def test_ranks_that_are_lost_in_an_evaluation_are_restored():
    raised = []

    async def evaluate(version):
        if version == 2 and not raised:
            raised.append(version)
            raise LOST
        return {}

    toy = stored(evaluate=evaluate)
    once(toy.run(3), steps=3)
    assert toy.store.restored == 1
