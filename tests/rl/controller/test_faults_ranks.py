"""Ranks that are lost, and restores that fail: on from the newest checkpoint, buffer included."""

from __future__ import annotations

import asyncio

import pytest
from toy import Toy, ToyStore, run_virtually
from toy_faults import BAD, RealStore, fails_once, once, stored, when

from megatron_idempotent.rl.controller import InOrderSampler, MemoryPlane, StrictSampler
from megatron_idempotent.rl.workers import RanksLost


@pytest.mark.parametrize("method", ["begin", "microbatch", "finish"])
def test_lost_ranks_go_on_from_the_newest_checkpoint_with_the_buffer_of_it(method):
    clean = Toy(sampler=InOrderSampler(1)).run(6)
    store = ToyStore()
    toy = Toy(
        sampler=InOrderSampler(1),
        policy={(method, 9 if method == "microbatch" else 4): RanksLost("rank 1 died")},
        store=store,
        checkpoint_every=2,
    )

    real = store.restore

    async def restore():
        # Fresh ranks have no open step, and weights of the checkpoint.
        toy.policy.open = None
        toy.policy.steps = toy.policy.steps[: store.kept["trainer_version"]]
        return await real()

    store.restore = restore
    toy.run(6)
    assert store.restored == 1
    assert toy.policy.steps == clean.policy.steps
    assert toy.status.counts == clean.status.counts
    assert [version for _, version in toy.kinds("publish")] == [0, 1, 2, 3, 4, 4, 5, 6]


def test_a_put_that_raises_in_a_restore_is_tried_again():
    class Plane(MemoryPlane):
        failures = 0

        async def put(self, group):
            if self.failures:
                self.failures -= 1
                raise OSError("connection reset")
            await super().put(group)

    class Store(ToyStore):
        async def restore(self):
            toy.policy.open = None
            toy.policy.steps = toy.policy.steps[: self.kept["trainer_version"]]
            plane.failures = 2
            return await super().restore()

    plane = Plane()
    lost = {("microbatch", 9): RanksLost("rank 1 died")}
    toy = Toy(
        sampler=InOrderSampler(1), policy=lost, plane=plane, store=Store(), checkpoint_every=2
    )
    once(toy.run(6), steps=6)
    assert toy.store.restored == 1


def test_ranks_that_are_lost_again_and_again_end_the_run():
    lost = {("begin", number): RanksLost("rank 1 died") for number in range(20)}
    toy = Toy(policy=lost, store=ToyStore(), restarts=2)
    with pytest.raises(RanksLost, match="rank 1 died"):
        toy.run(5)
    assert toy.store.restored == 2
    with pytest.raises(RanksLost):
        Toy(policy=lost).run(5)  # nothing to restore from


def test_ranks_that_are_lost_in_a_publish_beside_a_step_without_groups_are_restored():
    toy = stored(Toy(sampler=StrictSampler(), store=RealStore()))
    fails_once(toy, 2, RanksLost("rank 1 died"))
    once(toy.run(5))
    assert toy.store.restored == 1


def test_a_cancelled_run_whose_step_cannot_be_undone_begins_with_a_restore():
    toy = stored(Toy(store=RealStore(), checkpoint_every=1, policy={("abort", 0): BAD}))
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
    lost = {("microbatch", 5): RanksLost("rank 1 died")}
    again = [RanksLost("rank 0 died")] * 2
    toy = stored(Toy(policy=lost, store=RealStore(again), checkpoint_every=1, restarts=3))
    once(toy.run(5))
    toy = stored(Toy(policy=lost, store=RealStore(again), checkpoint_every=1, restarts=2))
    with pytest.raises(RanksLost, match="rank 0 died"):
        toy.run(5)


def test_a_run_whose_restore_failed_begins_with_a_restore():
    clean = Toy(sampler=InOrderSampler(1)).run(6)
    lost = {("microbatch", 9): RanksLost("rank 1 died")}
    store = RealStore([OSError("disk is away")])
    toy = stored(Toy(sampler=InOrderSampler(1), policy=lost, store=store, checkpoint_every=2))
    with pytest.raises(OSError, match="disk is away"):
        toy.run(6)
    toy.run(6)
    assert toy.store.restored == 1
    assert toy.policy.steps == clean.policy.steps


def test_a_drain_during_a_restore_ends_the_run_behind_it():
    lost = {("microbatch", 5): RanksLost("rank 1 died")}
    toy = stored(Toy(policy=lost, store=RealStore(), checkpoint_every=1))
    real = toy.store.restore

    async def slow():
        await asyncio.sleep(50)
        return await real()

    toy.store.restore = slow

    async def main():
        running = asyncio.ensure_future(toy.controller.run(100))
        await when(toy, lambda status: status.doing == "restore")
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
            raise RanksLost("rank 1 died")
        return {}

    toy = stored(Toy(evaluate=evaluate, store=RealStore()))
    once(toy.run(3), steps=3)
    assert toy.store.restored == 1
