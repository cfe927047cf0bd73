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


def group(group_id: int, version: int = 0, tokens: int = 2) -> RolloutGroup:
    sample = Sample(
        request_id=str(group_id),
        tokens=(7,) * tokens,
        logprobs=(-1.0,) * tokens,
        versions=(version,) * tokens,
        finish_reason="stop",
    )
    return RolloutGroup(id=group_id, prompt=group_id, samples=(sample,), rewards=(1.0,))


def policy(*faults: Fault) -> SimulatedPolicy:
    return SimulatedPolicy(COSTS, faults=Faults(faults))


async def step(on: SimulatedPolicy, name: str, groups: Sequence[RolloutGroup]) -> None:
    await on.begin(name)
    for each in groups:
        await on.microbatch(name, [each], microbatch_id=f"{name}/{each.id}", last=False)
    await on.finish(name)


def test_a_step_takes_its_time_and_is_counted_once() -> None:
    async def scenario() -> None:
        one = policy()
        await step(one, "a", [group(1), group(2, version=0)])
        assert asyncio.get_running_loop().time() == one.busy_s == 2 * (2 + 2) + 3
        outcome = await one.finish("a")
        assert outcome is await one.finish("a")
        assert (outcome.tokens, outcome.updated, one.version) == (4, True, 1)
        assert asyncio.get_running_loop().time() == 11
        await step(one, "b", [group(3, version=0)])
        assert one.updates[-1].lags == (1,)
        assert (one.has(3), one.has(4)) == (True, False)

    run(scenario())


def test_a_group_that_is_in_the_weights_is_refused() -> None:
    async def scenario() -> None:
        one = policy()
        await step(one, "a", [group(1)])
        await one.begin("b")
        with pytest.raises(BrokenRule, match="group 1 is in the weights already"):
            await one.microbatch("b", [group(1)], microbatch_id="b/1", last=True)
        await one.microbatch("b", [group(2)], microbatch_id="b/2", last=False)
        await one.microbatch("b", [group(2)], microbatch_id="b/2", last=False)  # sent again
        with pytest.raises(BrokenRule, match="twice"):
            await one.microbatch("b", [group(2)], microbatch_id="b/3", last=False)
        await one.finish("b")
        assert one.updates[-1].group_ids == (2,)

    run(scenario())


def test_calls_out_of_order_are_refused() -> None:
    async def scenario() -> None:
        one = policy()
        with pytest.raises(BrokenRule, match="no step is open"):
            await one.microbatch("a", [group(1)], microbatch_id="m", last=True)
        with pytest.raises(BrokenRule, match="no step is open"):
            await one.finish("a")
        await one.begin("a")
        with pytest.raises(BrokenRule, match="while step a is open"):
            await one.begin("b")
        await one.finish("a")
        with pytest.raises(BrokenRule, match="after its finish"):
            await one.begin("a")

    run(scenario())


def test_an_abort_forgets_the_groups_of_the_open_step_alone() -> None:
    async def scenario() -> None:
        one = policy()
        await step(one, "a", [group(1)])
        await one.begin("b")
        await one.microbatch("b", [group(2)], microbatch_id="m", last=False)
        await one.abort("other")
        assert one.aborted == 0
        await one.abort("b")
        await one.abort("b")
        await one.abort()
        assert one.aborted == 1
        await step(one, "c", [group(2)])
        assert [update.group_ids for update in one.updates] == [(1,), (2,)]

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
        await step(one, "a", [group(1)])
        await store.save(1, {"buffer": [1, 2]})
        await step(one, "b", [group(2)])
        await asyncio.sleep(20)
        await one.begin("c")
        with pytest.raises(RanksLost):
            await one.finish("c")
        for call in (one.begin("d"), one.finish("c"), one.abort(), one.logprobs([], "policy")):
            with pytest.raises(RanksLost):
                await call
        assert await store.restore() == {"buffer": [1, 2]}
        assert [update.group_ids for update in one.updates] == [(1,)]
        await step(one, "e", [group(2)])  # it is not in these weights

    run(scenario())


def test_without_a_checkpoint_ranks_begin_at_the_beginning() -> None:
    async def scenario() -> None:
        one = policy()
        await step(one, "a", [group(1)])
        one.lose()
        assert await MemoryStore(one).restore() is None
        assert one.version == 0
        with pytest.raises(AssertionError, match="version 5 is saved"):
            await MemoryStore(one).save(5, {})

    run(scenario())
