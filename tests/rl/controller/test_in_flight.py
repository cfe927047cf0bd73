"""Groups that are still being generated: samplers see them, and have them aborted."""

import asyncio
import types

import pytest
from custom_samplers import NewestIds
from toy import Toy, ToyGenerator, ToyStore, conserved, run_virtually
from toy_faults import FaultyPlane

from megatron_idempotent.rl.controller import FirstReadySampler, StrictSampler, WindowedSampler
from megatron_idempotent.rl.controller.data_plane import MemoryPlane


class Watched(ToyGenerator):
    """`slow` groups take the seconds they are given; `stubborn` ones answer all the same when they
    are cancelled, and `failing` ones fail then."""

    slow = types.MappingProxyType({})
    stubborn = failing = frozenset()
    cancelled = ()
    cancelled_at = types.MappingProxyType({})

    async def generate(self, group_id, prompt, *, attempt):
        try:
            if group_id in self.slow:
                await asyncio.sleep(self.slow[group_id])
            return await super().generate(group_id, prompt, attempt=attempt)
        except asyncio.CancelledError:
            self.cancelled = (*self.cancelled, group_id)
            self.cancelled_at = {**self.cancelled_at, group_id: self.version}
            if group_id in self.failing:
                raise OSError("the connection was closed") from None
            if group_id in self.stubborn:
                return await super().generate(group_id, prompt, attempt=attempt)
            raise


def watched(*, slow=None, stubborn=(), failing=(), seconds=0.3, **more):
    """Other groups take a third of a second, and a step half of one."""
    toy = Toy(seconds=seconds, **more)
    toy.generator.__class__ = Watched
    toy.generator.slow = slow or {}
    toy.generator.stubborn, toy.generator.failing = frozenset(stubborn), frozenset(failing)
    return toy


ABORTING = WindowedSampler(1, abort_stale=True)


def test_a_group_that_is_too_old_is_aborted_while_it_is_generated():
    toy = watched(sampler=ABORTING, slow={1: 19.0}).run(8)
    assert toy.generator.cancelled[0] == 1
    assert toy.generator.cancelled_at[1] <= 3, "by the end of the run, and not before"
    counts = toy.status.counts
    assert counts["aborted"] == 1 <= counts["evicted"]
    assert conserved(toy.status)
    assert 1 not in toy.trained()
    row = dict(toy.logger.rows)[8]
    assert row["rollouts/aborted"] == 1
    assert row["rollouts/unaccounted"] == 0
    kept = watched(sampler=WindowedSampler(1), slow={1: 19.0}).run(8)
    assert kept.status.counts["aborted"] == 0
    assert kept.status.counts["generating"] == 0  # cancelled too, but by the end of the run


def test_an_aborted_group_gives_its_place_to_another():
    """Two are generated at once, and the first one would hold its place for 19 s."""
    ended_s = {}
    for sampler in (ABORTING, WindowedSampler(1)):
        toy = watched(
            sampler=sampler, groups=1, concurrency=2, slow={0: 19.0}, seconds=1.0, step_seconds=0.1
        )

        async def main(toy=toy):
            await toy.controller.run(12)
            return asyncio.get_running_loop().time()

        ended_s[sampler is ABORTING] = run_virtually(main())
        aborted = toy.controller._shared.buffer.counts.aborted
        assert aborted == (sampler is ABORTING)
    assert ended_s[True] < 0.75 * ended_s[False]


@pytest.mark.parametrize("how", ["stubborn", "failing"])
def test_a_group_that_comes_in_spite_of_its_abort_counts_once_and_leaves_nothing(how):
    plane = MemoryPlane()
    toy = watched(sampler=ABORTING, slow={1: 15.0}, plane=plane, **{how: {1}}).run(12)
    assert 1 in toy.generator.cancelled
    assert toy.status.counts["aborted"] == 1
    assert conserved(toy.status)
    assert 1 not in toy.trained()
    assert dict(toy.logger.rows)[12]["rollouts/retries"] == 0
    asked = [group_id for _, group_id in toy.kinds("generate")]
    assert asked.count(1) <= 1, "a group that was given up is not tried again"
    assert set(plane._groups) == {held.id for held in toy.controller._shared.buffer.ready}


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_group_that_is_aborted_while_it_is_stored_is_cleared(stubborn):
    async def put(real, group):
        await real(group)
        if group.id == 1:
            try:
                await asyncio.sleep(15.0)
            except asyncio.CancelledError:
                if not stubborn:
                    raise

    plane = FaultyPlane(put=put)
    toy = watched(sampler=ABORTING, plane=plane).run(12)
    assert toy.status.counts["aborted"] == 1
    assert 1 not in toy.trained()
    assert set(plane._groups) == {held.id for held in toy.controller._shared.buffer.ready}


def test_what_was_aborted_before_a_checkpoint_is_not_asked_for_after_it():
    store = ToyStore()
    settings = {"sampler": ABORTING, "store": store, "checkpoint_every": 1}
    first = watched(slow={1: 19.0}, **settings).run(6)
    assert store.kept["buffer"]["counts"]["aborted"] == 1
    assert 1 not in store.kept["buffer"]["unfinished"]
    second = watched(**settings)
    run_virtually(second.controller.resume())
    second.run(10)
    assert ("generate", 1) not in second.kinds("generate")
    assert second.status.counts["aborted"] >= 1
    assert conserved(second.status)
    assert len(set(first.trained() + second.trained())) == 20


def test_a_group_that_is_tried_again_is_as_old_as_its_new_attempt():
    """The first attempt at group 1 fails at version 1; the second one ends at version 2."""
    toy = watched(sampler=ABORTING, generating={(1, 0): OSError("gone")}, slow={1: 0.7})
    seen = []

    async def main():
        running = asyncio.ensure_future(toy.controller.run(4))
        buffer = toy.controller._shared.buffer
        while not running.done():
            seen.append({each.id: each.version for each in buffer.ready.generating()})
            await asyncio.sleep(0.05)
        await running

    run_virtually(main())
    versions = [each[1] for each in seen if 1 in each]
    assert versions == sorted(versions)
    assert versions[-1] > versions[0] == 0
    assert toy.controller._shared.buffer.counts.aborted == 0


class Patient(FirstReadySampler):
    """Takes a group once all that were started before it have come. Notes what it sees."""

    name = "patient"

    def __init__(self):
        self.seen = []

    def select(self, ready, *, version, count):
        running = list(ready.generating())
        self.seen.append((version, running))
        first = min((each.id for each in running), default=10**6)
        return [held for held in sorted(ready, key=lambda held: held.id) if held.id < first][:count]


def test_a_sampler_can_wait_for_a_group_that_was_started_earlier():
    sampler = Patient()
    toy = watched(sampler=sampler, slow={2: 9.0}, capacity=6).run(9)
    assert toy.trained() == sorted(toy.trained())
    assert 2 in toy.trained()
    seen = [each for _, running in sampler.seen for each in running]
    assert len({each.version for each in seen}) > 2
    for version, running in sampler.seen:
        assert [each.started for each in running] == sorted(each.started for each in running)
        assert all(each.version <= version for each in running)
    loose = watched(sampler=FirstReadySampler(), slow={2: 9.0}, capacity=6).run(9)
    assert loose.trained() != sorted(loose.trained())


def test_samplers_from_before_groups_could_be_aborted_go_on_working():
    sampler = NewestIds(places=6)
    assert not hasattr(sampler, "abort")
    toy = watched(sampler=sampler, capacity=6, slow={1: 15.0}).run(6)
    assert toy.status.counts["aborted"] == 0
    assert conserved(toy.status)


@pytest.mark.parametrize("ungated", [WindowedSampler(1, gated=False), StrictSampler(gated=False)])
def test_without_a_gate_capacity_alone_holds_groups_back(ungated):
    """A trainer that is slow: a gate lets no more start than can train in time."""
    gated = type(ungated)(*([1] if ungated.name == "windowed" else []))
    most = {}
    for sampler in (ungated, gated):
        toy = watched(sampler=sampler, groups=2, capacity=12, step_seconds=10.0)
        held = []

        async def main(toy=toy, held=held):
            running = asyncio.ensure_future(toy.controller.run(5))
            while not running.done():
                counts = toy.controller._shared.buffer.counts
                held.append(counts.generating + counts.ready)
                await asyncio.sleep(0.5)
            toy.status = await running

        run_virtually(main())
        assert conserved(toy.status)
        lags = [row["train/staleness_max"] for step, row in toy.logger.rows if step]
        assert max(lags) <= sampler.max_staleness
        most[sampler is ungated] = max(held), toy.status.counts["evicted"]
    assert most[True][0] == 12
    assert most[False][0] <= 4
    assert most[True][1] > most[False][1]


def test_without_a_gate_nothing_is_started_with_weights_that_are_too_old_already():
    """Publishing takes longer than a step: groups of version 0 could not train from version 2."""

    class Counted(WindowedSampler):
        calls = 0

        def abort(self, ready, *, version):
            self.calls += 1
            assert self.calls < 2000, "one group after another is started and aborted"
            return super().abort(ready, version=version)

    toy = watched(sampler=Counted(0, gated=False, abort_stale=True), groups=1, capacity=8)
    toy.generator.publish_seconds = 5.0
    toy.run(4)
    assert toy.status.trainer_version == 4
    # All that are cancelled are those of the end and of each version, not one start after another.
    assert toy.status.counts["submitted"] <= 5 * 9


def test_the_policy_gets_as_many_groups_as_the_least_or_what_the_step_lacks():
    sizes = {"groups": 5, "groups_per_call": 4, "step_seconds": 0.01}
    toy = Toy(min_groups_per_call=2, **sizes).run(6)
    steps, step = [], []
    for event in toy.kinds("microbatch"):
        step.append(len([each for each in event[1:] if each != "last"]))
        if event[-1] == "last":
            steps.append(step)
            step = []
    assert [sum(each) for each in steps] == [5] * 6
    assert all(size >= 2 for each in steps for size in each[:-1])
    one_by_one = Toy(**sizes).run(6)
    assert len(one_by_one.kinds("microbatch")) > len(toy.kinds("microbatch"))


def test_a_step_that_lacks_fewer_than_the_least_does_not_wait_for_more():
    toy = Toy(groups=3, groups_per_call=2, min_groups_per_call=2, sampler=StrictSampler()).run(4)
    calls = [len(event) - 1 - (event[-1] == "last") for event in toy.kinds("microbatch")]
    assert calls == [2, 1] * 4


def test_prompts_that_end_before_the_least_is_there_end_the_run():
    toy = Toy(groups=4, groups_per_call=4, min_groups_per_call=3, prompts=6).run(9)
    assert toy.status.trainer_version == 1
    assert conserved(toy.status)
