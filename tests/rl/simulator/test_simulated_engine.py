"""A simulated engine keeps the contract of one, token by token."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from megatron_idempotent.rl.engines import EngineDead, EngineError, Request, RolloutEngine, Sample
from megatron_idempotent.rl.engines.pool import generate_whole
from megatron_idempotent.rl.simulator.clock import run
from megatron_idempotent.rl.simulator.engine import SimulatedEngine
from megatron_idempotent.rl.simulator.faults import Fault, Faults
from megatron_idempotent.rl.simulator.serving import EngineCosts
from megatron_idempotent.rl.weights import Bucket, UpdateDamaged, UpdateRefused, WeightUpdate

COSTS = EngineCosts(
    slots=4, step_s=1.0, request_s=0.0, bucket_s=0.5, pause_s=0.0, commit_s=2.0, resume_s=0.0
)


def engine(**more: object) -> SimulatedEngine:
    """A token a second, and 10 of them, if nothing else is said."""
    settings = {"costs": COSTS, "length": lambda request: 10.0, **more}
    return SimulatedEngine("e", **settings)  # type: ignore[arg-type]


def request(name: str = "r", **more: object) -> Request:
    return Request(**{"id": name, "prompt": (1,), "max_tokens": 1000, "seed": 0, **more})  # type: ignore[arg-type]


async def buckets(count: int = 2) -> AsyncIterator[Bucket]:
    for index in range(count):
        yield Bucket(index=index, tensors={}, checksums={})


def now() -> float:
    return asyncio.get_running_loop().time()


async def start(on: RolloutEngine, *requests: Request) -> list[asyncio.Task[Sample]]:
    tasks = [asyncio.ensure_future(on.generate(each)) for each in requests]
    await asyncio.sleep(0)
    return tasks


async def switch(on: RolloutEngine, version: int) -> None:
    update = WeightUpdate(id=f"u/{version}", version=version)
    await on.stage(update, buckets())
    await on.pause()
    assert await on.commit(update.id) == version
    await on.resume()


def scenario(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def on_virtual_clock() -> None:
        run(test())  # type: ignore[arg-type]

    on_virtual_clock.__name__ = test.__name__
    return on_virtual_clock


@scenario
async def test_a_response_takes_as_long_as_its_tokens() -> None:
    sample = await engine().generate(request())
    assert (now(), len(sample.tokens), sample.finish_reason) == (10.0, 10, "stop")
    assert len(sample.logprobs) == len(sample.versions) == 10
    sample = await engine().generate(request(max_tokens=4))
    assert (now(), len(sample.tokens), sample.finish_reason) == (14.0, 4, "length")


#: Seconds that a request adds to a step; of each request when it comes, its length and its end.
SHARED: list[tuple[float, list[tuple[float, float, float]]]] = [
    # Two requests take 3 s a token each, and one alone 2 s.
    (1.0, [(0, 3, 3 * 3), (0, 9, 9 + 6 * 2)]),
    (1.0, [(0, 10, 10 + 5 * 3), (10, 10, 25 + 5 * 2)]),
    (0.0, [(0, 50, 50), (10, 2, 12)]),  # which comes later, and ends first
]


@pytest.mark.parametrize(("request_s", "requests"), SHARED)
def test_requests_that_run_together_slow_each_other_down_exactly(request_s, requests) -> None:
    costs = EngineCosts(slots=8, step_s=1.0, request_s=request_s)
    one = engine(costs=costs, length=lambda each: requests[int(each.id)][1])

    async def ended(number: int) -> float:
        await asyncio.sleep(requests[number][0])
        await one.generate(request(str(number)))
        return now()

    async def test() -> list[float]:
        found: list[float] = await asyncio.gather(*map(ended, range(2)))
        return found

    assert run(test()) == pytest.approx([end for _, _, end in requests])
    assert one.serving.tokens == pytest.approx(sum(length for _, length, _ in requests))
    assert one.serving.busy_s == pytest.approx(max(end for *_, end in requests))


@scenario
async def test_requests_beyond_its_slots_wait_their_turn() -> None:
    one = engine()
    tasks = await start(one, *(request(str(i)) for i in range(6)))
    assert (await one.health()).running == 6
    await asyncio.sleep(10.5)
    assert [task.done() for task in tasks] == [True] * 4 + [False] * 2
    await asyncio.gather(*tasks)
    assert now() == 20.0


@scenario
async def test_a_length_is_the_requests_and_not_the_timings() -> None:
    one, other = SimulatedEngine("a"), SimulatedEngine("b")
    requests = [request(str(i), seed=i, max_tokens=99999) for i in range(20)]
    alone = [len((await one.generate(each)).tokens) for each in requests]
    together = await asyncio.gather(*(other.generate(each) for each in requests))
    assert [len(each.tokens) for each in together] == alone
    assert len(set(alone)) > 10


@scenario
async def test_a_pause_stops_the_clock_of_requests_and_new_ones_wait() -> None:
    one = engine()
    (first,) = await start(one, request("a"))
    await asyncio.sleep(4)
    await one.pause()
    await one.pause("abort")  # paused already: running requests stay
    assert (await one.health()).status == "PAUSED"
    (second,) = await start(one, request("b"))
    await asyncio.sleep(100)
    assert not first.done()
    await one.resume()
    await one.resume()
    await first
    assert now() == 110.0
    await second
    assert now() == 114.0


@scenario
async def test_an_abort_gives_back_what_there_is_and_the_rest_is_continued() -> None:
    one = engine()
    whole = asyncio.ensure_future(generate_whole(one, request()))
    (part,) = await start(one, request("part"))
    await asyncio.sleep(3.5)
    await one.pause("abort")
    assert (await part).finish_reason == "abort"
    assert len((await part).tokens) == 3
    await asyncio.sleep(10)
    await one.resume()
    sample = await whole
    assert (len(sample.tokens), sample.finish_reason) == (10, "stop")
    assert now() == 13.5 + 7


@scenario
async def test_a_waiting_pause_lets_running_requests_end_and_holds_new_ones() -> None:
    one = engine()
    (first,) = await start(one, request("a"))
    await asyncio.sleep(4)
    pausing = asyncio.ensure_future(one.pause("wait"))
    await asyncio.sleep(1)
    (second,) = await start(one, request("b"))
    await pausing
    assert now() == 10.0
    assert first.done()
    assert not second.done()
    await one.resume()
    await second
    assert now() == 20.0


@scenario
async def test_tokens_keep_the_version_that_they_were_drawn_with() -> None:
    one = engine()
    (first,) = await start(one, request("a"))
    await asyncio.sleep(2.5)
    await switch(one, 3)  # a second to stage, and paused for two
    await asyncio.sleep(2.5)
    await switch(one, 5)
    sample = await first
    assert sample.versions == (0,) * 3 + (3,) * 4 + (5,) * 3
    assert now() == 10 + 2 * 2.0
    assert set((await one.generate(request("b"))).versions) == {5}


@scenario
async def test_entries_stand_for_many_tokens_and_keep_their_versions() -> None:
    one = engine(length=lambda each: 1000.0, tokens_per_entry=100)
    (first,) = await start(one, request("a"))
    await asyncio.sleep(249)
    await switch(one, 1)
    sample = await first
    # What was begun before the switch and ended after it is the new version's.
    assert sample.versions == (0,) * 2 + (1,) * 8
    assert (len(sample.tokens), now()) == (10, 1002.0)


@scenario
async def test_a_prompt_takes_its_share_of_time_each_time_it_is_computed() -> None:
    costs = EngineCosts(slots=4, step_s=1.0, request_s=0.0, prompt_tokens=5, pause_s=0, resume_s=0)
    one = engine(costs=costs)
    whole = asyncio.ensure_future(generate_whole(one, request()))
    await asyncio.sleep(8)
    await one.pause("abort")
    await one.resume()
    assert len((await whole).tokens) == 10
    assert now() == 8 + 5 + 7


@scenario
async def test_updates_keep_the_contracts_order() -> None:
    one = engine()
    update = WeightUpdate(id="u", version=2)
    await one.stage(update, buckets())
    assert now() == 1.0
    with pytest.raises(EngineError, match="paused"):
        await one.commit("u")
    await one.pause()
    with pytest.raises(EngineError, match="not staged"):
        await one.commit("other")
    assert await one.commit("u") == 2
    assert await one.commit("u") == 2
    await one.rollback("u")  # committed in full: no-op
    assert now() == 3.0
    await one.resume()
    assert (await one.health()).version == 2
    await one.stage(update, buckets())  # it is committed: nothing is read
    assert now() == 3.0
    for late in (
        WeightUpdate(id="late", version=2),
        WeightUpdate(id="based", version=4, base_version=1),
    ):
        with pytest.raises(UpdateRefused, match=late.id):
            await one.stage(late, buckets())


@scenario
async def test_a_second_stage_at_once_is_refused_and_a_later_one_takes_the_place() -> None:
    one = engine()
    staging = asyncio.ensure_future(one.stage(WeightUpdate(id="a", version=1), buckets()))
    await asyncio.sleep(0.1)
    with pytest.raises(UpdateRefused, match="while a is"):
        await one.stage(WeightUpdate(id="b", version=2), buckets())
    await staging
    await one.stage(WeightUpdate(id="b", version=2), buckets())
    await one.pause()
    with pytest.raises(EngineError, match="not staged a"):
        await one.commit("a")
    assert await one.commit("b") == 2


@scenario
async def test_a_lost_bucket_is_noticed_and_nothing_is_staged() -> None:
    faults = Faults([Fault(target="engine", kind="loses a bucket")])
    one = engine(faults=faults)
    with pytest.raises(UpdateDamaged, match="bucket 0"):
        await one.stage(WeightUpdate(id="a", version=1), buckets())
    await one.pause()
    with pytest.raises(EngineError, match="not staged"):
        await one.commit("a")
    await one.resume()
    await switch(one, 1)


@scenario
async def test_a_half_way_commit_is_dirty_until_it_is_rolled_back_or_tried_again() -> None:
    one = engine(faults=Faults([Fault(target="engine", kind="stays dirty", times=2)]))
    await one.pause()
    for rolled_back in (True, False):
        await one.stage(WeightUpdate(id="a", version=1), buckets())
        with pytest.raises(EngineError, match="half-way"):
            await one.commit("a")
        assert (await one.health()).status == "DIRTY"
        with pytest.raises(EngineError, match="DIRTY"):
            await one.resume()
        if rolled_back:
            await one.rollback("a")
            health = await one.health()
            assert (health.status, health.version) == ("PAUSED", 0)
    assert await one.commit("a") == 1
    await one.resume()


@pytest.mark.parametrize("kind", ["dies in stage", "dies in commit"])
def test_an_engine_that_dies_in_an_update_comes_back_as_it_began(kind: str) -> None:
    async def test() -> None:
        one = engine(faults=Faults([Fault(target="engine", kind=kind, for_s=30)]))
        (running,) = await start(one, request())
        with pytest.raises(EngineDead):
            await switch(one, 1)
        with pytest.raises(EngineDead):
            await running
        assert (await one.health()).status == "DEAD"
        for call in (one.pause(), one.resume(), one.commit("u/1"), one.rollback("u/1")):
            with pytest.raises(EngineDead):
                await call
        await asyncio.sleep(31)
        health = await one.health()
        assert (health.status, health.version, health.running) == ("SERVING", 0, 0)
        await switch(one, 2)
        assert set((await one.generate(request("c"))).versions) == {2}

    run(test())


@scenario
async def test_a_call_that_began_before_the_engine_died_fails_though_it_is_back() -> None:
    one, update = engine(), WeightUpdate(id="a", version=1)

    async def begun(call: Any) -> None:
        calling = asyncio.ensure_future(call)
        await asyncio.sleep(0.1)
        one.die()
        one.come_back()
        with pytest.raises(EngineDead):
            await calling

    await begun(one.stage(update, buckets()))
    await one.pause()
    with pytest.raises(EngineError, match="not staged"):
        await one.commit("a")
    await one.stage(update, buckets())
    await begun(one.commit("a"))
    health = await one.health()
    assert (health.status, health.version) == ("SERVING", 0)


@scenario
async def test_a_response_that_never_ends_runs_until_it_is_cancelled() -> None:
    one = engine(length=lambda each: math.inf)
    (endless,) = await start(one, request(max_tokens=3))
    await asyncio.sleep(1e6)
    assert not endless.done()
    await one.pause("abort")
    assert len((await endless).tokens) == 1_000_000


@scenario
async def test_what_an_engine_had_drawn_when_it_died_is_counted_as_lost() -> None:
    one = engine()
    tasks = await start(one, *(request(str(i)) for i in range(5)))
    await asyncio.sleep(3)
    one.die()
    for task in tasks:
        with pytest.raises(EngineDead, match="e does not answer"):
            await task
    assert one.serving.lost_tokens == 12.0  # of four: the fifth had no slot


@scenario
async def test_a_cancelled_request_frees_its_slot() -> None:
    one = engine(costs=EngineCosts(slots=1, step_s=1.0, request_s=0.0))
    first, waiting, third = await start(one, request("a"), request("b"), request("c"))
    await asyncio.sleep(2)
    waiting.cancel()
    first.cancel()
    await third
    assert now() == 12.0
    assert one.serving.lost_tokens == 2.0
    assert (await one.health()).running == 0


@scenario
async def test_an_engine_that_hangs_says_that_it_serves() -> None:
    one = engine()
    (first,) = await start(one, request())
    await asyncio.sleep(5)
    one.run_at(0.0)
    await asyncio.sleep(1000)
    assert not first.done()
    assert (await one.health()).status == "SERVING"
    one.run_at(0.5)
    await first
    assert now() == 1005 + 10


@scenario
async def test_closing_gives_back_what_there_is() -> None:
    one = engine()
    (first,) = await start(one, request())
    await asyncio.sleep(3)
    await one.close()
    await one.close()
    assert (len((await first).tokens), (await first).finish_reason) == (3, "abort")
    assert (await one.health()).status == "DEAD"
    with pytest.raises(EngineDead):
        await one.generate(request())
