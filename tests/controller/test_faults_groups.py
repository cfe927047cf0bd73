"""Prompts, rollouts and the data plane: no group counts twice, and none is lost unseen."""

from __future__ import annotations

from toy import Toy, ToyLogger, ToyStore
from toy_faults import BAD, RealStore, once, stored

from megatron_idempotent.controller import (
    InOrderSampler,
    MemoryPlane,
    PoisonedPrompt,
)
from megatron_idempotent.workers import RanksLost


def test_a_poisoned_prompt_is_dropped_and_reported_and_never_trained():
    toy = Toy(sampler=InOrderSampler(1), generating={(1, 0): PoisonedPrompt("too long")}).run(5)
    once(toy)
    assert 1 not in toy.trained()
    assert toy.kinds("generate").count(("generate", 1)) == 1
    assert toy.status.counts["filtered"] == 1
    assert toy.logger.rows[-1][1]["rollouts/dropped/poisoned"] == 1


def test_a_group_that_fails_is_tried_again_and_dropped_behind_its_last_attempt():
    faults = {(2, 0): BAD, **{(4, attempt): BAD for attempt in range(3)}}
    toy = Toy(sampler=InOrderSampler(1), generating=faults, group_attempts=3).run(5)
    once(toy)
    assert toy.kinds("generate").count(("generate", 2)) == 2
    assert toy.kinds("generate").count(("generate", 4)) == 3
    assert 2 in toy.trained()
    assert 4 not in toy.trained()
    assert toy.logger.rows[-1][1]["rollouts/dropped/failed"] == 1


def test_a_hung_rollout_is_given_up_behind_its_limit_and_started_again():
    toy = Toy(sampler=InOrderSampler(0), generating={(3, 0): None}, group_timeout_s=20.0).run(4)
    once(toy, steps=4)
    assert 3 in toy.trained()
    waits = [row["timing/train/exposed_generation_s"] for step, row in toy.logger.rows if step]
    assert sum(wait > 20 for wait in waits) == 1


def test_a_group_that_was_put_before_the_put_raised_is_there_once():
    class Plane(MemoryPlane):
        failures = 3

        async def put(self, group):
            await super().put(group)
            if self.failures:
                self.failures -= 1
                raise OSError("connection reset")

    toy = Toy(plane=Plane()).run(5)
    once(toy)
    assert toy.logger.rows[-1][1]["rollouts/retries/put"] == 3


def test_a_clearing_that_fails_behind_an_update_is_caught_up_on_and_fails_no_step():
    class Plane(MemoryPlane):
        failures = 2

        async def clear(self, group_ids):
            if self.failures:
                self.failures -= 1
                raise OSError("connection reset")
            await super().clear(group_ids)

    plane = Plane()
    toy = Toy(sampler=InOrderSampler(0), plane=plane).run(5)
    once(toy)
    assert len(toy.kinds("abort")) == 0
    assert len(plane) == 0


def test_a_group_that_the_data_plane_has_lost_is_replaced():
    class Plane(MemoryPlane):
        async def get(self, group_id):
            if group_id == 3:
                raise KeyError(group_id)
            return await super().get(group_id)

    toy = Toy(sampler=InOrderSampler(1), plane=Plane()).run(5)
    once(toy)
    assert 3 not in toy.trained()
    assert toy.logger.rows[-1][1]["rollouts/dropped/lost"] == 1


def test_a_logger_that_raises_is_dropped_and_the_others_go_on():
    class Broken(ToyLogger):
        calls = 0

        def log(self, metrics, *, step):
            self.calls += 1
            raise OSError("disk full")

    broken, good = Broken(), ToyLogger()
    once(Toy(loggers=[broken, good]).run(5))
    assert broken.calls == 1
    assert [step for step, _ in good.rows] == [1, 2, 3, 4, 5]


def test_a_data_plane_that_loses_many_groups_costs_them_and_not_the_run():
    class Plane(MemoryPlane):
        async def get(self, group_id):
            if 6 <= group_id < 12:
                raise KeyError(group_id)
            return await super().get(group_id)

    toy = Toy(sampler=InOrderSampler(1), groups=6, plane=Plane(), step_attempts=3).run(4)
    once(toy, steps=4, groups=6)
    assert toy.status.counts["filtered"] == 6


def test_a_checkpoint_leaves_out_groups_that_the_data_plane_has_lost():
    class Plane(MemoryPlane):
        failures = 2

        async def get(self, group_id):
            if toy.controller._shared.doing == "finish" or captures:
                captures.append(group_id)
                if self.failures:
                    self.failures -= 1
                    raise OSError("connection reset")
            return await super().get(group_id)

        async def clear(self, group_ids):
            await super().clear(group_ids)
            captures.append("clear")
            if len(lost) < 2:
                lost.extend(held.id for held in list(toy.controller._shared.buffer.ready)[:1])
                await super().clear(lost)

    captures, lost = [], []
    toy = Toy(groups=2, step_seconds=2.0, plane=Plane(), store=ToyStore(), checkpoint_every=1)
    once(toy.run(4), steps=4)
    assert lost
    assert toy.status.counts["filtered"] == len(set(lost))
    assert not set(lost) & {group["id"] for group in toy.store.kept["groups"]}
    assert toy.logger.rows[-1][1]["rollouts/retries/get"] == 2


def test_groups_that_are_made_anew_are_not_cleared_for_those_that_were_not():
    class Plane(MemoryPlane):
        failing = True

        async def clear(self, group_ids):
            if self.failing:
                # The one in the restore is the last that fails.
                self.failing = not toy.store.restored
                raise OSError("connection reset")
            await super().clear(group_ids)

    clean = Toy(sampler=InOrderSampler(1)).run(6)
    plane, lost = Plane(), {("microbatch", 9): RanksLost("rank 1 died")}
    toy = stored(Toy(sampler=InOrderSampler(1), policy=lost, plane=plane, store=RealStore()))
    toy.run(6)
    assert toy.store.restored == 1
    assert toy.policy.steps == clean.policy.steps
    assert len(plane) == toy.status.counts["ready"]
