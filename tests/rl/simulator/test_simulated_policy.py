"""The simulated policy's books: what is in the weights, and that it is there once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from megatron_idempotent.rl.controller.protocol import RolloutGroup
from megatron_idempotent.rl.engines import Sample
from megatron_idempotent.rl.simulator.clock import run
from megatron_idempotent.rl.simulator.faults import Fault, Faults, InjectedError
from megatron_idempotent.rl.simulator.trainer import (
    BrokenRule,
    MemoryStore,
    SimulatedPolicy,
    TrainCosts,
)
from megatron_idempotent.rl.workers.protocol import RanksLost

COSTS = TrainCosts(
    token_s=1.0, microbatch_s=2.0, finish_s=3.0, abort_s=1.0, save_s=4.0, restore_s=5.0
)


def group(group_id: int) -> RolloutGroup:
    each = {"tokens": (7, 7), "logprobs": (-1.0, -1.0), "versions": (0, 0)}
    sample = Sample(request_id=str(group_id), finish_reason="stop", **each)  # type: ignore[arg-type]
    return RolloutGroup(id=group_id, prompt=group_id, samples=(sample,), rewards=(1.0,))


def policy(*faults: Fault) -> SimulatedPolicy:
    return SimulatedPolicy(COSTS, faults=Faults(faults))


async def step(on: SimulatedPolicy, name: str, groups: Sequence[int]) -> None:
    await on.begin(name)
    for each in groups:
        await on.microbatch(name, [group(each)], microbatch_id=f"{name}/{each}", last=False)
    await on.finish(name)


def test_a_step_takes_its_time_is_counted_once_and_an_aborted_one_is_forgotten() -> None:
    async def scenario() -> None:
        one = policy()
        await step(one, "a", [1, 2])
        assert asyncio.get_running_loop().time() == one.busy_s == 2 * (2 + 2) + 3
        outcome = await one.finish("a")
        assert (outcome.tokens, outcome.updated, one.version) == (4, True, 1)
        assert asyncio.get_running_loop().time() == 11
        await one.begin("b")
        await one.microbatch("b", [group(3)], microbatch_id="m", last=False)
        for name in ("other", "b", "b", None):
            await one.abort(name)
        assert one.aborted == 1
        await step(one, "c", [3])
        assert [update.group_ids for update in one.updates] == [(1, 2), (3,)]
        assert one.updates[-1].lags == (1,)
        assert (one.has(3), one.has(4)) == (True, False)

    run(scenario())


def test_a_group_that_is_in_the_weights_and_calls_out_of_order_are_refused() -> None:
    async def scenario() -> None:
        one = policy()
        for call in (one.microbatch("a", [], microbatch_id="m", last=True), one.finish("a")):
            with pytest.raises(BrokenRule, match="no step is open"):
                await call
        await step(one, "a", [1])
        with pytest.raises(BrokenRule, match="after its finish"):
            await one.begin("a")
        await one.begin("b")
        with pytest.raises(BrokenRule, match="while step b is open"):
            await one.begin("c")
        with pytest.raises(BrokenRule, match="group 1 is in the weights already"):
            await one.microbatch("b", [group(1)], microbatch_id="b/1", last=True)
        for _ in range(2):  # sent again
            await one.microbatch("b", [group(2)], microbatch_id="b/2", last=False)
        with pytest.raises(BrokenRule, match="twice"):
            await one.microbatch("b", [group(2)], microbatch_id="b/3", last=False)
        await one.finish("b")
        assert one.updates[-1].group_ids == (2,)

    run(scenario())


def test_faults_happen_in_the_calls_they_are_of_and_as_often() -> None:
    async def scenario() -> None:
        one = policy(
            Fault(target="policy", call="finish", kind="raises", times=2),
            Fault(target="policy", call="microbatch", kind="done, then raises"),
        )
        await one.begin("a")
        with pytest.raises(InjectedError, match="carried out"):
            await one.microbatch("a", [group(1)], microbatch_id="m", last=True)
        for _ in range(2):
            with pytest.raises(InjectedError, match="finish fails"):
                await one.finish("a")
        await one.finish("a")
        assert one.updates[-1].group_ids == (1,)

    run(scenario())


def test_lost_ranks_answer_nothing_until_the_newest_checkpoint_is_in_fresh_ones() -> None:
    async def scenario() -> None:
        one = policy(Fault(target="policy", call="finish", kind="ranks lost", at_s=20))
        store = MemoryStore(one)
        await step(one, "a", [1])
        await store.save(1, {"buffer": [1, 2]})
        await step(one, "b", [2])
        await asyncio.sleep(20)
        await one.begin("c")
        for call in (one.finish("c"), one.begin("d"), one.abort(), one.logprobs([], "policy")):
            with pytest.raises(RanksLost):
                await call
        assert await store.restore() == {"buffer": [1, 2]}
        assert [update.group_ids for update in one.updates] == [(1,)]
        await step(one, "e", [2])  # it is not in these weights
        one.lose()
        assert await MemoryStore(one).restore() is None  # without a checkpoint
        assert one.version == 0
        with pytest.raises(AssertionError, match="version 5 is saved"):
            await store.save(5, {})

    run(scenario())
