"""A step in one call: made once, undone where it fails, whatever the policy offers."""

from __future__ import annotations

import asyncio

import pytest
from toy import ToyPolicy, run_virtually

from megatron_idempotent.rl.controller import StepFailed, StepOutcome, train
from megatron_idempotent.rl.workers import RanksLost


class OneCall(ToyPolicy):
    """Has a `train` of its own, which fails as often as it is told and undoes what it began."""

    def __init__(self, events, *, faults=None, seconds=0.2):
        super().__init__(events, seconds=seconds, faults=faults)
        self.done = {}

    async def train(self, step_id, batch):
        await self._do("train", step_id)
        if step_id not in self.done:
            self.steps.append(tuple(batch))
            self.done[step_id] = StepOutcome(updated=True, tokens=len(batch))
        if ("answer", self.calls["train"]) in self.faults:
            raise self.faults["answer", self.calls["train"]]
        return self.done[step_id]


def made(policy, **more):
    return run_virtually(train(policy, [4, 5], step_id="run/3", **more), limit_s=1000)


def test_one_call_is_begin_microbatch_and_finish():
    policy = ToyPolicy([])
    assert made(policy).tokens == 8
    assert policy.events == [("begin",), ("microbatch", 4, 5, "last"), ("finish",)]
    assert policy.steps == [(4, 5)]


@pytest.mark.parametrize("call", ["begin", "microbatch"])
def test_a_step_that_fails_is_undone_and_made_again(call):
    policy = ToyPolicy([], faults={(call, 0): OSError("out of memory")})
    assert made(policy).updated
    assert policy.steps == [(4, 5)]
    kinds = [event[0] for event in policy.events]
    assert kinds.count("abort") == 1
    assert kinds[-3:] == ["begin", "microbatch", "finish"]


def test_a_finish_whose_answer_is_lost_is_asked_for_again_and_not_made_twice():
    class Deaf(ToyPolicy):
        told = None

        async def finish(self, step_id):
            if self.told is None:
                self.told = await super().finish(step_id)
                raise OSError("the answer was lost")
            return self.told

    policy = Deaf([])
    assert made(policy).tokens == 8
    assert policy.steps == [(4, 5)]
    assert ("abort",) not in policy.events


def test_after_its_attempts_nothing_is_left_of_it():
    policy = ToyPolicy([], faults={("microbatch", n): OSError("no memory") for n in range(2)})
    with pytest.raises(StepFailed, match=r"step run/3 failed 2 times with the same batch.*no mem"):
        made(policy, attempts=2)
    assert policy.steps == []
    assert policy.open is None
    with pytest.raises(ValueError, match="attempts is 0; allowed: 1 or more"):
        made(policy, attempts=0)


def test_ranks_that_are_lost_are_not_asked_again():
    policy = ToyPolicy([], faults={("microbatch", 0): RanksLost("rank 1 died")})
    with pytest.raises(RanksLost, match="rank 1 died"):
        made(policy)
    assert [event[0] for event in policy.events] == ["begin", "microbatch"]
    policy = ToyPolicy([], faults={("begin", 0): OSError(), ("abort", 0): None})
    with pytest.raises(RanksLost, match="run/3/0 is not undone in 7 s"):
        made(policy, abort_s=7.0)


@pytest.mark.parametrize(("at_s", "steps"), [(0.1, 0), (0.3, 0), (0.5, 1)])
def test_cancelled_it_is_undone_or_its_update_is_made_to_the_end(at_s, steps):
    policy = ToyPolicy([])

    async def main():
        training = asyncio.ensure_future(train(policy, [4, 5], step_id="run/3"))
        await asyncio.sleep(at_s)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training

    run_virtually(main())
    assert len(policy.steps) == steps
    assert policy.open is None
    assert (("abort",) in policy.events) == (steps == 0)


def test_a_policy_that_can_do_it_in_one_call_is_asked_to():
    policy = OneCall([])
    assert made(policy).tokens == 2
    assert policy.events == [("train", "run/3/0")]
    # Its answer is lost: asked for again by the id, it is not made twice.
    policy = OneCall([], faults={("answer", 0): OSError("lost")})
    assert made(policy).tokens == 2
    assert policy.events == [("train", "run/3/0")] * 2
    assert policy.steps == [(4, 5)]
    # It fails twice: undone, and made under another id.
    policy = OneCall([], faults={("train", n): OSError("failed") for n in range(2)})
    assert made(policy).tokens == 2
    assert policy.events == [("train", "run/3/0")] * 2 + [("abort",), ("train", "run/3/1")]


def test_a_training_that_hangs_after_a_cancellation_loses_the_ranks():
    policy = OneCall([], faults={("train", 0): None})

    async def main():
        training = asyncio.ensure_future(train(policy, [4], step_id="run/3", abort_s=5.0))
        await asyncio.sleep(0.5)
        training.cancel()
        with pytest.raises(RanksLost, match=r"run/3/0 did not end in 5 s after a cancellation"):
            await training

    run_virtually(main())
