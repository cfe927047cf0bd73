"""A step that fails is undone and taken again with its groups, and counts once."""

import pytest
from toy import Toy, ToyStore, conserved, run_virtually
from toy_faults import BAD, clean_steps, once

from megatron_idempotent.rl.controller import (
    ControllerError,
    EnginesLost,
    InOrderSampler,
    Stalled,
    StepFailed,
)
from megatron_idempotent.rl.workers import RanksLost


@pytest.mark.parametrize("method", ["logprobs", "begin", "microbatch", "finish"])
def test_a_step_that_fails_is_undone_and_taken_again_with_the_same_groups(method):
    # A finish that raises is asked for again by its id: it may have been carried out.
    faults = {(method, 2): BAD, **({(method, 3): BAD} if method == "finish" else {})}
    toy = Toy(sampler=InOrderSampler(1), logprobs="policy", policy=faults).run(5)
    once(toy)
    assert toy.policy.steps == clean_steps(5)
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
    finish, told = toy.policy.finish, {}

    async def answers_late(step_id):
        if step_id not in told:
            told[step_id] = await finish(step_id)
            if len(told) == 2:
                raise BAD
        return told[step_id]

    toy.policy.finish = answers_late
    once(toy.run(5))
    assert toy.kinds("abort") == []


def test_an_update_that_hangs_ends_the_run_instead_of_holding_it():
    toy = Toy(policy={("finish", 1): None}, stall_s=100.0, group_timeout_s=20.0)
    with pytest.raises((Stalled, RanksLost)):
        toy.run(5)


def test_a_checkpoint_of_another_sampler_is_refused():
    store = ToyStore()
    Toy(sampler=InOrderSampler(1), store=store, checkpoint_every=1).run(1)
    other = Toy(sampler=InOrderSampler(2), store=store)
    with pytest.raises(ControllerError, match="max_staleness = 1, now it is 2"):
        run_virtually(other.controller.resume())


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
