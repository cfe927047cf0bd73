"""Prompts, rollouts and the data plane: no group counts twice, and none is lost unseen."""

import asyncio
import threading

import pytest
from toy import Toy, ToyLogger, ToyStore
from toy_faults import FaultyPlane, clean_steps, fails, loses, once, stored

from megatron_idempotent.rl.controller import GroupsRejected, InOrderSampler
from megatron_idempotent.rl.controller.samplers import SamplerError
from megatron_idempotent.rl.metrics.loggers import Loggers
from megatron_idempotent.rl.workers import RanksLost


@pytest.mark.parametrize(("lost", "groups"), [((3,), 2), (range(6, 12), 6)])
def test_groups_that_the_data_plane_has_lost_are_replaced_and_cost_not_the_run(lost, groups):
    plane = FaultyPlane(get=loses(*lost))
    toy = Toy(sampler=InOrderSampler(1), groups=groups, plane=plane, step_attempts=3).run(4)
    once(toy, steps=4, groups=groups)
    assert not {*lost} & {*toy.trained()}
    assert toy.status.counts["filtered"] == len(lost)
    assert toy.logger.rows[-1][1]["rollouts/dropped/lost"] == len(lost)


def test_a_logger_that_raises_is_dropped_for_good_and_the_others_get_every_row():
    class Broken(ToyLogger):
        calls = 0

        def log(self, metrics, *, step):
            self.calls += 1
            raise OSError("disk full")

    broken, good = Broken(), ToyLogger()
    toy = Toy(loggers=[broken, good]).run(3)
    assert [step for step, _ in good.rows] == [1, 2, 3], "run() returns once they have all rows"
    once(toy.run(5))
    assert broken.calls == 1
    assert [step for step, _ in good.rows] == [1, 2, 3, 4, 5]


def test_a_logger_that_waits_does_not_hold_up_the_event_loop():
    called, pinged = threading.Event(), threading.Event()

    class Waiting(ToyLogger):
        def log(self, metrics, *, step):
            called.set()
            super().log({"in time": pinged.wait(5)}, step=step)

    waiting = Waiting()
    toy = Toy(loggers=[waiting], seconds=0.01, step_seconds=0.01)

    async def main():
        running = asyncio.ensure_future(toy.controller.run(1))
        while not called.is_set():
            await asyncio.sleep(0.01)
        assert (await toy.controller.ping()).trainer_version == 1
        pinged.set()
        await running

    asyncio.run(main())  # on the real clock: in a virtual one a thread would take no time
    assert waiting.rows == [(1, {"in time": True})]
    inside = ToyLogger()
    inside.log = lambda metrics, *, step: inside.rows.append(asyncio.get_running_loop().time())
    Toy(loggers=Loggers([inside])).run(2)
    assert len(inside.rows) == 2, "who needs the event loop can have it"


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"select": lambda *_, **__: 1 / 0}, "select raised ZeroDivisionError('division by zero')"),
        ({"select": lambda *_, **__: None}, "select returned a NoneType"),
        ({"evict": lambda *_, **__: 1 / 0}, "evict raised ZeroDivisionError"),
        ({"select": lambda ready, count: ()}, "select raised TypeError"),
        ({"abort": lambda *_, **__: 1 / 0}, "abort raised ZeroDivisionError"),
        ({"abort": lambda *_, **__: [7]}, "abort returned 7, which is not being generated"),
        ({"room": lambda _: 1 / 0}, "room raised ZeroDivisionError"),
        ({"room": lambda _: "many"}, "room returned 'many'; return a number of groups"),
    ],
)
def test_a_sampler_that_is_wrong_ends_the_run_and_is_named_with_its_fault(broken, named):
    sampler = InOrderSampler(1)
    for method, wrong in broken.items():
        setattr(sampler, method, wrong)
    toy = Toy(sampler=sampler)
    with pytest.raises(SamplerError) as caught:
        toy.run(5)
    assert str(caught.value).startswith(f"sampler in_order: {named}")
    assert toy.policy.steps == []


def test_a_checkpoint_leaves_out_groups_that_the_data_plane_has_lost():
    failing, captures, lost = fails(2), [], []

    async def get(real, group_id):
        if toy.controller._shared.doing == "finish" or captures:
            captures.append(group_id)
            return await failing(real, group_id)
        return await real(group_id)

    async def clear(real, group_ids):
        await real(group_ids)
        captures.append("clear")
        if len(lost) < 2:
            lost.extend(held.id for held in list(toy.controller._shared.buffer.ready)[:1])
            await real(lost)

    plane = FaultyPlane(get=get, clear=clear)
    toy = Toy(groups=2, step_seconds=2.0, plane=plane, store=ToyStore(), checkpoint_every=1)
    once(toy.run(4), steps=4)
    assert lost
    assert toy.status.counts["filtered"] == len(set(lost))
    assert not set(lost) & {group["id"] for group in toy.store.kept["groups"]}
    assert toy.logger.rows[-1][1]["rollouts/retries/get"] == 2


def test_groups_that_are_made_anew_are_not_cleared_for_those_that_were_not():
    failing = [True]

    async def clear(real, group_ids):
        if failing[0]:
            # The one in the restore is the last that fails.
            failing[0] = not toy.store.restored
            raise OSError("connection reset")
        await real(group_ids)

    plane, lost = FaultyPlane(clear=clear), {("microbatch", 9): RanksLost("rank 1 died")}
    toy = stored(sampler=InOrderSampler(1), policy=lost, plane=plane)
    toy.run(6)
    assert toy.store.restored == 1
    assert toy.policy.steps == clean_steps(6)
    assert len(plane) == toy.status.counts["ready"]


def test_a_recipe_that_rejects_every_group_ends_the_run_long_before_it_would_stall():
    toy = Toy(groups=2, rejected=range(10_000), rejected_steps=3)
    with pytest.raises(GroupsRejected) as caught:
        toy.run(5)
    for named in ("6 groups", "rejected_steps = 3", "tied", "(group 5)"):
        assert named in str(caught.value)
    assert toy.policy.steps == []
    assert len(toy.kinds("generate")) < 20, "a second each, and stall_s is 200"


def test_groups_that_are_rare_or_slow_do_not_count_as_rejected_in_a_row():
    rejected = {number for number in range(10_000) if number % 3}
    rare = Toy(groups=2, rejected=rejected, rejected_steps=3).run(20)
    assert rare.status.counts["trained"] == 40
    assert rare.status.counts["filtered"] > 6
    assert Toy(groups=2, seconds=15.0, rejected_steps=1).run(2).status.counts["trained"] == 4
