"""Drains, cancelled runs, stalls: what was begun is ended or undone, and the next run is right."""

import asyncio
import contextlib
import signal

import pytest
from toy import Toy, ToyStore, conserved, run_virtually
from toy_faults import BAD, FaultyPlane, clean_steps, cut_off, once, takes, when

from megatron_idempotent.rl.controller import ControllerError, InOrderSampler, Stalled
from megatron_idempotent.rl.controller.controller import watchdog


def test_a_run_without_progress_says_where_it_stands_and_ends():
    toy = Toy(policy={("microbatch", 3): None}, stall_s=100.0, group_timeout_s=20.0)
    with pytest.raises(Stalled, match=r"at 'microbatch' of version 1.* are ready"):
        toy.run(5)
    assert len(toy.kinds("abort")) == 1
    assert conserved(run_virtually(toy.controller.ping()))


def test_generation_that_never_brings_a_group_is_a_stall_and_not_a_wait_for_ever():
    faults = {(group, attempt): BAD for group in range(500) for attempt in range(3)}
    with pytest.raises(
        Stalled,
        match=r"dropped so far: \{'failed': \d+\} \(the last one for RuntimeError\('bad'\)\)",
    ):
        Toy(generating=faults, stall_s=70.0).run(2)


def test_an_error_of_a_recipe_ends_the_run_as_it_is_and_once_mended_it_goes_on():
    toy = Toy(sampler=InOrderSampler(1))
    rejects = toy.recipe.rejects
    toy.recipe.rejects = lambda group: 1 / 0
    with pytest.raises(ZeroDivisionError):
        toy.run(3)
    assert run_virtually(toy.controller.ping()).counts["generating"] == 0
    toy.recipe.rejects = rejects
    once(toy.run(3), steps=3)


def test_a_drain_finishes_the_open_step_and_writes_a_checkpoint():
    toy = Toy(sampler=InOrderSampler(1), store=ToyStore(), groups=3)
    status = cut_off(toy, lambda status: status.step_groups == 2)
    assert len(toy.policy.steps) == status.trainer_version == toy.store.kept["trainer_version"]
    assert toy.kinds("abort") == []
    again = Toy(sampler=InOrderSampler(1), groups=3, store=toy.store)
    run_virtually(again.controller.resume())
    again.run(6)
    assert toy.policy.steps + again.policy.steps == clean_steps(6, 3)


def test_a_drain_behind_its_limit_undoes_the_step_and_keeps_its_groups():
    toy = Toy(store=ToyStore(), policy={("microbatch", 3): None}, drain_s=5.0)
    hangs = lambda s: (s.trainer_version, s.step_groups, s.idle_s > 20) == (1, 1, True)  # noqa: E731
    status = cut_off(toy, hangs)
    assert status.trainer_version == toy.store.kept["trainer_version"] == 1
    assert len(toy.kinds("abort")) == 1
    assert len(toy.store.kept["groups"]) == status.counts["ready"] >= 2


def test_an_update_that_is_under_way_counts_even_if_the_run_is_cut_off():
    toy = Toy(store=ToyStore(), step_seconds=20.0, drain_s=1.0, abort_s=60.0, groups=1)
    status = cut_off(toy, "finish")
    assert len(toy.policy.steps) == status.trainer_version == 1
    assert toy.store.kept["trainer_version"] == status.counts["trained"] == 1
    assert toy.kinds("abort") == []


def test_two_runs_at_once_are_refused():
    toy = Toy()

    async def main():
        first = asyncio.ensure_future(toy.controller.run(2))
        await asyncio.sleep(1)
        with pytest.raises(ControllerError, match="while it runs"):
            await toy.controller.run(3)
        return await first

    assert run_virtually(main()).trainer_version == 2


@pytest.mark.parametrize("times", [1, 3])
def test_an_update_counts_however_often_the_run_is_cancelled_meanwhile(times):
    toy = Toy(sampler=InOrderSampler(1), step_seconds=4.0)

    async def main():
        running = asyncio.ensure_future(toy.controller.run(4))
        await when(toy, "finish")
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
        await when(toy, "microbatch")
        draining = asyncio.ensure_future(toy.controller.drain())
        await when(toy, "abort")
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


def test_an_update_that_fails_while_the_run_is_cut_off_is_not_taken_again():
    fails = {("finish", 0): BAD, ("finish", 1): BAD}
    toy = Toy(step_seconds=4.0, drain_s=1.0, policy=fails, store=ToyStore())
    assert cut_off(toy, "finish").trainer_version == 0
    assert len(toy.kinds("begin")) == len(toy.kinds("abort")) == 1


def test_a_group_that_is_being_put_when_a_run_is_cut_off_does_not_stay_in_the_data_plane():
    plane = FaultyPlane(put=takes(5.0))
    toy = Toy(sampler=InOrderSampler(1), plane=plane, store=ToyStore(), drain_s=1.0)
    assert cut_off(toy, lambda _: len(plane)).counts["ready"] == 0
    assert len(plane) == 0


def test_the_last_step_before_the_end_of_the_prompts_has_a_checkpoint():
    store = ToyStore()
    toy = Toy(prompts=7, groups=2, store=store, checkpoint_every=2).run(10)
    assert toy.status.trainer_version == store.kept["trainer_version"] == 3


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


def test_the_watchdog_does_not_spin_where_the_clock_cannot_tell_so_little_time():
    shared = Toy(stall_s=600.0).controller._shared

    async def main():
        # 600 s after it, differences round to a little less than that.
        shared.idle_since = 809.8682749008286
        await asyncio.sleep(shared.idle_since)
        with pytest.raises(Stalled):
            await watchdog(shared)

    with spinning_is_an_error():
        run_virtually(main())


def test_prompts_that_were_to_be_asked_for_again_are_not_lost_to_a_second_cancellation():
    toy = Toy(sampler=InOrderSampler(1))

    async def main():
        for generating in (4, 0):
            running = asyncio.ensure_future(toy.controller.run(3))
            await asyncio.sleep(0)
            while (await toy.controller.ping()).counts["generating"] < generating:
                await asyncio.sleep(0.05)
            running.cancel()
            await asyncio.wait([running])
        toy.status = await toy.controller.run(3)

    run_virtually(main())
    assert toy.policy.steps == clean_steps(3)


def test_a_drain_ends_an_outer_step_whose_groups_are_there():
    toy = Toy(sampler=InOrderSampler(1), minibatches=2, seconds=0.1, store=ToyStore())
    status = cut_off(toy, lambda s: s.doing == "finish" and s.counts["ready"] == 2)
    assert status.trainer_version == toy.store.kept["trainer_version"] == 2
    assert [version for _, version in toy.kinds("publish")] == [0, 2]
