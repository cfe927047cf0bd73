"""Whatever fails: the step is undone and taken again, no group counts twice, none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest
from toy import Toy, ToyLogger, ToyStore, conserved, run_virtually

from megatron_idempotent.controller import (
    ControllerError,
    EnginesLost,
    FirstReadySampler,
    InOrderSampler,
    MemoryPlane,
    PoisonedPrompt,
    PublishFailed,
    Stalled,
    StepFailed,
    StrictSampler,
)
from megatron_idempotent.controller.watchers import watchdog
from megatron_idempotent.workers import RanksLost

BAD = RuntimeError("bad")


def once(toy, steps=5, groups=2):
    """Every step has its groups, and each of them once."""
    assert [len(step) for step in toy.policy.steps] == [groups] * steps
    assert len(set(toy.trained())) == steps * groups
    assert toy.status.trainer_version == steps
    assert conserved(toy.status)


@pytest.mark.parametrize("method", ["logprobs", "begin", "microbatch", "finish"])
def test_a_step_that_fails_is_undone_and_taken_again_with_the_same_groups(method):
    clean = Toy(sampler=InOrderSampler(1), logprobs="policy").run(5)
    # A finish that raises is asked for again by its id: it may have been carried out.
    faults = {(method, 2): BAD, **({(method, 3): BAD} if method == "finish" else {})}
    toy = Toy(sampler=InOrderSampler(1), logprobs="policy", policy=faults).run(5)
    once(toy)
    assert toy.policy.steps == clean.policy.steps
    assert len(toy.kinds("abort")) == 1
    assert toy.logger.rows[-1][1]["rollouts/retries/step"] == 1


def test_a_step_that_is_taken_again_has_the_groups_it_had_even_if_fresher_ones_came():
    toy = Toy(groups=3, seconds=0.4, policy={("microbatch", 4): BAD})
    toy.run(5)
    once(toy, groups=3)
    tried = toy.kinds("microbatch", "abort")
    place = tried.index(("abort",))
    before, after = tried[place - 2 : place], tried[place + 1 : place + 3]
    assert [event[1] for event in before] == [event[1] for event in after]


def test_a_step_that_keeps_failing_ends_the_run_with_its_groups_in_the_buffer():
    toy = Toy(policy={("finish", number): BAD for number in range(2, 9)}, step_attempts=3)
    with pytest.raises(StepFailed, match="failed 3 times with the same 2 groups") as caught:
        toy.run(5)
    assert caught.value.__cause__ is BAD
    status = run_virtually(toy.controller.ping())
    assert (status.trainer_version, status.state) == (2, "ended")
    assert status.counts["leased"] == status.counts["generating"] == 0
    assert status.counts["ready"] >= 2
    assert conserved(status)
    toy.policy.faults = {}
    once(toy.run(5))


def test_the_version_rises_only_behind_a_step_that_succeeded():
    toy = Toy(policy={("finish", 1): BAD, ("finish", 2): BAD, ("microbatch", 6): BAD}).run(4)
    assert len(toy.kinds("abort")) == 2
    assert [version for _, version in toy.kinds("publish")] == [0, 1, 2, 3, 4]
    assert [step for step, _ in toy.logger.rows] == [1, 2, 3, 4]


def test_ranks_that_cannot_undo_a_step_are_lost():
    store = ToyStore()
    toy = Toy(policy={("microbatch", 4): BAD, ("abort", 0): BAD}, store=store, checkpoint_every=1)
    toy.run(5)
    assert store.restored == 1
    once(toy, steps=5)
    hung = Toy(policy={("microbatch", 4): BAD, ("abort", 0): None}, store=ToyStore())
    hung.run(3)
    assert hung.store.restored == 1


def test_a_finish_whose_answer_was_lost_is_not_made_twice():
    toy = Toy(sampler=InOrderSampler(1))
    finish, raised = toy.policy.finish, []

    async def answers_late(step_id):
        if raised and raised[-1] == step_id:
            return raised.outcome
        outcome = await finish(step_id)
        if len(toy.policy.steps) == 2 and not raised:
            raised.append(step_id)
            raised.outcome = outcome
            raise BAD
        return outcome

    class Raised(list):
        outcome = None

    raised = Raised()
    toy.policy.finish = answers_late
    once(toy.run(5))
    assert toy.kinds("abort") == []


def test_an_update_that_hangs_ends_the_run_instead_of_holding_it():
    toy = Toy(policy={("finish", 1): None}, stall_s=100.0, group_timeout_s=20.0)
    with pytest.raises((Stalled, RanksLost)):
        toy.run(5)


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


def test_a_publish_without_an_engine_is_tried_again():
    toy = Toy()
    toy.generator.publishing = [EnginesLost("all dead"), EnginesLost("all dead")]
    once(toy.run(5))
    assert toy.logger.rows[-1][1]["rollouts/retries/publish"] == 2


@pytest.mark.parametrize("every", [0, 1])  # beside the next step, or before a checkpoint
def test_weights_that_cannot_be_published_end_the_run(every):
    toy = Toy(store=ToyStore(), checkpoint_every=every)
    publish = toy.generator.publish

    async def fails_from_the_third(version):
        if version >= 2:
            raise BAD
        return await publish(version)

    toy.generator.publish = fails_from_the_third
    with pytest.raises(PublishFailed, match="version 2 could not be published in 3 attempts"):
        toy.run(9)
    assert len(toy.policy.steps) == 2
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


def test_a_run_without_progress_says_where_it_stands_and_ends():
    toy = Toy(policy={("microbatch", 3): None}, stall_s=100.0, group_timeout_s=20.0)
    with pytest.raises(Stalled, match=r"at 'microbatch' of version 1.* are ready"):
        toy.run(5)
    assert len(toy.kinds("abort")) == 1
    assert conserved(run_virtually(toy.controller.ping()))


def test_generation_that_never_brings_a_group_is_a_stall_and_not_a_wait_for_ever():
    faults = {(group, attempt): BAD for group in range(500) for attempt in range(3)}
    with pytest.raises(Stalled, match=r"dropped so far: \{'failed': \d+\}"):
        Toy(generating=faults, stall_s=70.0).run(2)


def test_an_error_of_a_recipe_ends_the_run_as_it_is():
    toy = Toy()

    def rejects(group):
        raise ZeroDivisionError

    toy.recipe.rejects = rejects
    with pytest.raises(ZeroDivisionError):
        toy.run(2)


def test_a_drain_finishes_the_open_step_and_writes_a_checkpoint():
    store = ToyStore()
    toy = Toy(sampler=InOrderSampler(1), store=store, groups=3)

    async def main():
        running = asyncio.ensure_future(toy.controller.run(100))
        while (await toy.controller.ping()).step_groups != 2:
            await asyncio.sleep(0.05)
        await toy.controller.drain()
        return await running

    status = run_virtually(main())
    assert status.state == "ended"
    assert len(toy.policy.steps) == status.trainer_version == store.kept["trainer_version"]
    assert toy.kinds("abort") == []
    whole = Toy(sampler=InOrderSampler(1), groups=3).run(6)
    again = Toy(sampler=InOrderSampler(1), groups=3, store=store)
    run_virtually(again.controller.resume())
    again.run(6)
    assert toy.policy.steps + again.policy.steps == whole.policy.steps


def test_a_drain_behind_its_limit_undoes_the_step_and_keeps_its_groups():
    store = ToyStore()
    toy = Toy(store=store, policy={("microbatch", 3): None}, drain_s=5.0)

    async def main():
        running = asyncio.ensure_future(toy.controller.run(100))
        await asyncio.sleep(30)
        await toy.controller.drain()
        return await running

    status = run_virtually(main())
    assert status.trainer_version == 1
    assert len(toy.kinds("abort")) == 1
    assert store.kept["trainer_version"] == 1
    assert len(store.kept["groups"]) == status.counts["ready"] >= 2
    assert conserved(status)


def test_an_update_that_is_under_way_counts_even_if_the_run_is_cut_off():
    store = ToyStore()
    toy = Toy(store=store, step_seconds=20.0, drain_s=1.0, abort_s=60.0, groups=1)

    async def main():
        running = asyncio.ensure_future(toy.controller.run(100))
        while (await toy.controller.ping()).doing != "finish":
            await asyncio.sleep(0.5)
        await toy.controller.drain()
        return await running

    status = run_virtually(main())
    assert len(toy.policy.steps) == status.trainer_version == 1
    assert store.kept["trainer_version"] == 1
    assert toy.kinds("abort") == []
    assert status.counts["trained"] == 1


def test_a_checkpoint_of_another_sampler_is_refused():
    store = ToyStore()
    Toy(sampler=InOrderSampler(1), store=store, checkpoint_every=1).run(1)
    other = Toy(sampler=InOrderSampler(2), store=store)
    with pytest.raises(ControllerError, match="max_staleness = 1, now it is 2"):
        run_virtually(other.controller.resume())


def test_two_runs_at_once_are_refused():
    toy = Toy()

    async def main():
        first = asyncio.ensure_future(toy.controller.run(2))
        await asyncio.sleep(1)
        with pytest.raises(ControllerError, match="while it runs"):
            await toy.controller.run(3)
        return await first

    assert run_virtually(main()).trainer_version == 2


class RealStore(ToyStore):
    """Brings the toy policy back to the checkpoint, as fresh ranks are."""

    def __init__(self, failures=()):
        super().__init__()
        self.toy = None
        self.failures = list(failures)

    async def restore(self):
        if self.failures:
            raise self.failures.pop(0)
        self.toy.policy.open = None
        version = self.kept["trainer_version"] if self.kept else 0
        self.toy.policy.steps = self.toy.policy.steps[:version]
        return await super().restore()


def stored(toy):
    toy.store.toy = toy
    return toy


async def when(toy, condition):
    """Wait until the run stands so."""
    while not condition(await toy.controller.ping()):
        await asyncio.sleep(0.05)


def fails_once(toy, version, error):
    """Let one publish of a version raise."""
    publish, failed = toy.generator.publish, []

    async def fails(published):
        if published == version and not failed:
            failed.append(published)
            await asyncio.sleep(1.0)
            raise error
        return await publish(published)

    toy.generator.publish = fails


def test_a_publish_that_fails_beside_a_step_without_groups_ends_the_run_and_no_stall_does():
    toy = Toy(sampler=StrictSampler())
    publish = toy.generator.publish

    async def fails(version):
        if version:
            raise BAD
        return await publish(version)

    toy.generator.publish = fails
    with pytest.raises(PublishFailed, match="version 1 could not be published in 3 attempts"):
        toy.run(5)
    toy.generator.publish = publish
    once(toy.run(5))


def test_ranks_that_are_lost_in_a_publish_beside_a_step_without_groups_are_restored():
    toy = stored(Toy(sampler=StrictSampler(), store=RealStore()))
    fails_once(toy, 2, RanksLost("rank 1 died"))
    once(toy.run(5))
    assert toy.store.restored == 1


def test_a_run_that_is_cancelled_in_a_publish_publishes_when_it_is_called_again():
    toy = Toy(sampler=StrictSampler())
    toy.generator.publish_seconds = 3.0

    async def main():
        running = asyncio.ensure_future(toy.controller.run(5))
        await when(toy, lambda status: status.trainer_version == 2)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        status = await toy.controller.ping()
        assert (status.state, status.counts["generating"]) == ("ended", 0)
        assert toy.policy.open is None
        toy.status = await toy.controller.run(5)

    run_virtually(main())
    once(toy)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_update_counts_however_often_the_run_is_cancelled_meanwhile(times):
    toy = Toy(sampler=InOrderSampler(1), step_seconds=4.0)

    async def main():
        running = asyncio.ensure_future(toy.controller.run(4))
        await when(toy, lambda status: status.doing == "finish")
        for _ in range(times):
            running.cancel()
            await asyncio.sleep(0.1)
        await asyncio.wait([running])
        assert running.cancelled()
        assert len(toy.policy.steps) == (await toy.controller.ping()).trainer_version == 1
        toy.status = await toy.controller.run(4)

    run_virtually(main())
    once(toy, steps=4)
    assert [step for step, _ in toy.logger.rows] == [1, 2, 3, 4]


def test_a_step_that_is_being_undone_is_undone_though_the_run_is_cancelled_twice():
    toy = Toy(sampler=InOrderSampler(1), step_seconds=4.0, drain_s=0.5)
    aborted = toy.policy.abort

    async def abort(step_id=None):
        still_open = toy.policy.open
        try:
            await aborted(step_id)
        except asyncio.CancelledError:
            toy.policy.open = still_open
            raise

    toy.policy.abort = abort

    async def main():
        running = asyncio.ensure_future(toy.controller.run(4))
        await when(toy, lambda status: status.doing == "microbatch")
        draining = asyncio.ensure_future(toy.controller.drain())
        await when(toy, lambda status: status.doing == "abort")
        running.cancel()
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.wait([running, draining])
        assert toy.kinds("abort") == [("abort",)]
        assert toy.policy.open is None
        status = await toy.controller.ping()
        assert status.counts["leased"] == status.counts["generating"] == 0
        toy.status = await toy.controller.run(4)

    run_virtually(main())
    once(toy, steps=4)


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


def test_an_update_that_fails_while_the_run_is_cut_off_is_not_taken_again():
    fails = {("finish", 0): BAD, ("finish", 1): BAD}
    toy = Toy(step_seconds=4.0, drain_s=1.0, policy=fails, store=ToyStore())

    async def main():
        running = asyncio.ensure_future(toy.controller.run(5))
        await when(toy, lambda status: status.doing == "finish")
        await toy.controller.drain()
        return await running

    status = run_virtually(main())
    assert status.trainer_version == 0
    assert len(toy.kinds("begin")) == len(toy.kinds("abort")) == 1


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


def test_a_run_goes_on_behind_an_error_of_its_recipe_that_was_mended():
    toy = Toy(sampler=InOrderSampler(1))
    rejects = toy.recipe.rejects

    def broken(group):
        raise ZeroDivisionError

    toy.recipe.rejects = broken
    with pytest.raises(ZeroDivisionError):
        toy.run(3)
    assert run_virtually(toy.controller.ping()).counts["generating"] == 0
    toy.recipe.rejects = rejects
    once(toy.run(3), steps=3)


def test_a_group_that_is_being_put_when_a_run_is_cut_off_does_not_stay_in_the_data_plane():
    class Plane(MemoryPlane):
        async def put(self, group):
            await super().put(group)
            await asyncio.sleep(5.0)

    plane = Plane()
    toy = Toy(sampler=InOrderSampler(1), plane=plane, store=ToyStore(), drain_s=1.0)

    async def main():
        running = asyncio.ensure_future(toy.controller.run(5))
        while not len(plane):
            await asyncio.sleep(0.05)
        await toy.controller.drain()
        return await running

    status = run_virtually(main())
    assert status.counts["ready"] == status.counts["generating"] == 0
    assert len(plane) == 0


def test_an_evaluation_that_raises_costs_its_metrics_alone():
    async def evaluate(version):
        if version == 2:
            raise EnginesLost("all dead")
        return {"evaluation/reward": 0.5}

    store = ToyStore()
    toy = Toy(evaluate=evaluate, store=store, checkpoint_every=2).run(3)
    once(toy, steps=3)
    assert [m.get("evaluation/failed") for _, m in toy.logger.rows] == [None, None, 1.0, None]
    assert store.kept["trainer_version"] == 3


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


def test_engines_that_came_back_during_a_publish_are_published_to_once():
    toy = Toy(sampler=StrictSampler())
    publish, failures = toy.generator.publish, [1, 1, 1]

    async def lost_for_a_while(version):
        if version == 2 and failures:
            failures.pop()
            raise EnginesLost("all dead")
        return await publish(version)

    async def recover():
        return len(failures) == 1

    toy.generator.publish, toy.generator.recover = lost_for_a_while, recover
    once(toy.run(4), steps=4)
    assert [version for _, version in toy.kinds("publish")] == [0, 1, 2, 3, 4]


def test_the_last_step_before_the_end_of_the_prompts_has_a_checkpoint():
    store = ToyStore()
    toy = Toy(prompts=7, groups=2, store=store, checkpoint_every=2).run(10)
    assert toy.status.trainer_version == store.kept["trainer_version"] == 3


def test_the_watchdog_does_not_spin_where_the_clock_cannot_tell_so_little_time():
    shared = Toy(stall_s=600.0).controller._shared

    async def main():
        # 600 s behind it, differences round to a little less than that.
        shared.idle_since = 809.8682749008286
        await asyncio.sleep(shared.idle_since)
        with pytest.raises(Stalled):
            await watchdog(shared)

    with spinning_is_an_error():
        run_virtually(main())


@contextlib.contextmanager
def spinning_is_an_error():
    def look(*_):
        raise SystemExit("it spins")

    before = signal.signal(signal.SIGALRM, look)
    signal.alarm(5)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_publish_that_is_waited_for_ends_with_a_run_that_is_cancelled():
    toy = Toy(sampler=FirstReadySampler(), capacity=8)
    toy.generator.publish_seconds = 50.0

    async def main():
        running = asyncio.ensure_future(toy.controller.run(5))
        await when(toy, lambda status: status.doing.startswith("waiting for the publishing"))
        running.cancel()
        await asyncio.wait([running])
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert toy.policy.open is None
        toy.status = await toy.controller.run(5)

    run_virtually(main())
    once(toy)


def test_prompts_that_were_to_be_asked_for_again_are_not_lost_to_a_second_cancellation():
    clean = Toy(sampler=InOrderSampler(1)).run(3)
    toy = Toy(sampler=InOrderSampler(1))

    async def main():
        running = asyncio.ensure_future(toy.controller.run(3))
        await when(toy, lambda status: status.counts["generating"] == 4)
        running.cancel()
        await asyncio.wait([running])
        running = asyncio.ensure_future(toy.controller.run(3))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        toy.status = await toy.controller.run(3)

    run_virtually(main())
    assert toy.policy.steps == clean.policy.steps


def test_a_drain_ends_an_outer_step_whose_groups_are_there():
    toy = Toy(sampler=InOrderSampler(1), minibatches=2, seconds=0.1, store=ToyStore())

    async def main():
        running = asyncio.ensure_future(toy.controller.run(100))
        await when(toy, lambda s: s.doing == "finish" and s.counts["ready"] == 2)
        await toy.controller.drain()
        return await running

    assert run_virtually(main()).trainer_version == toy.store.kept["trainer_version"] == 2
    assert [version for _, version in toy.kinds("publish")] == [0, 2]


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
