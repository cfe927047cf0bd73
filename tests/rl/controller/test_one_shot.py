"""A step in one call: made once, undone where it fails, whatever the policy offers."""

import asyncio

import pytest
from toy import ToyPolicy, run_virtually

from megatron_idempotent.rl.controller import StepFailed, StepOutcome, train
from megatron_idempotent.rl.workers import RanksLost


class OneCall(ToyPolicy):
    """Has a `train` of its own, which fails as often as it is told and undoes what it began."""

    done = None

    async def train(self, step_id, batch):
        await self._do("train", step_id)
        if self.done is None:
            self.steps.append(tuple(batch))
            self.done = StepOutcome(updated=True, tokens=4 * len(batch))
        if ("answer", self.calls["train"]) in self.faults:
            raise self.faults["answer", self.calls["train"]]
        return self.done


class Deaf(ToyPolicy):
    """The answer of its first `finish` is lost."""

    told = None

    async def finish(self, step_id):
        if self.told is None:
            self.told = await super().finish(step_id)
            raise OSError("the answer was lost")
        return self.told


def made(policy, **more):
    return run_virtually(train(policy, [4, 5], step_id="run/3", **more), limit_s=1000)


BEGIN, BATCH, FINISH, ABORT = ("begin",), ("microbatch", 4, 5, "last"), ("finish",), ("abort",)
FAILS = OSError("out of memory")


@pytest.mark.parametrize(
    ("policy", "faults", "calls"),
    [
        (ToyPolicy, [], [BEGIN, BATCH, FINISH]),
        # What fails is undone and made again; a lost answer is asked for again, by the step's id.
        (ToyPolicy, [("begin", 0)], [BEGIN, ABORT, BEGIN, BATCH, FINISH]),
        (ToyPolicy, [("microbatch", 0)], [BEGIN, BATCH, ABORT, BEGIN, BATCH, FINISH]),
        (Deaf, [], [BEGIN, BATCH, FINISH]),
        (OneCall, [], [("train", "run/3/0")]),
        (OneCall, [("answer", 0)], [("train", "run/3/0")] * 2),
        (
            OneCall,
            [("train", 0), ("train", 1)],
            [("train", "run/3/0")] * 2 + [ABORT, ("train", "run/3/1")],
        ),
    ],
)
def test_a_step_is_made_once_by_the_calls_that_it_needs(policy, faults, calls):
    policy = policy([], faults=dict.fromkeys(faults, FAILS))
    outcome = made(policy)
    assert (outcome.updated, outcome.tokens) == (True, 8)
    assert policy.events == calls
    assert policy.steps == [(4, 5)]


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


def test_a_training_that_hangs_after_a_cancellation_loses_the_ranks():
    policy = OneCall([], faults={("train", 0): None})

    async def main():
        training = asyncio.ensure_future(train(policy, [4], step_id="run/3", abort_s=5.0))
        await asyncio.sleep(0.5)
        training.cancel()
        with pytest.raises(RanksLost, match=r"run/3/0 did not end in 5 s after a cancellation"):
            await training

    run_virtually(main())
