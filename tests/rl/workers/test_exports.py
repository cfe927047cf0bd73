"""Weights from ranks to the controller's process, and through a weight sync to an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from export_worker import FACTORY, weights

from megatron_idempotent.rl.engines import EngineHealth, PauseMode
from megatron_idempotent.rl.sync import SyncSettings, WeightSync
from megatron_idempotent.rl.weights import Bucket, Staging, WeightUpdate, checksum
from megatron_idempotent.rl.workers import (
    EmbeddedRanks,
    RankFailed,
    RanksLost,
    RemoteWeights,
    WorkerSpec,
)

Scenario = Callable[[EmbeddedRanks, RemoteWeights], Awaitable[Any]]
ONE = 64 * 32 * 4
"""Bytes of a tensor of float32: a bucket of one."""


@pytest.fixture
def with_ranks(megatron_rank_pool) -> Callable[..., Any]:
    """Run a scenario with two ranks that export, and a limit."""

    def run(scenario: Scenario, *, timeout_s: float = 30.0, **argument: Any) -> Any:
        async def whole() -> Any:
            spec = WorkerSpec(factory=FACTORY, argument={"seed": 3, **argument})
            ranks = EmbeddedRanks(spec, 2, pool=megatron_rank_pool)
            await ranks.start()
            try:
                loop = asyncio.get_running_loop()
                return await scenario(ranks, RemoteWeights(ranks, loop, timeout_s=timeout_s))
            finally:
                await ranks.close()

        return asyncio.run(asyncio.wait_for(whole(), 60))

    return run


def collect(buckets: Iterator[Bucket]) -> list[Bucket]:
    return list(buckets)


class Engine:
    """Serves what was committed; enough of a `RolloutEngine` for a sync."""

    name = "memory"

    def __init__(self) -> None:
        self.version, self.paused = 0, False
        self.weights: dict[str, Any] = {}

    async def stage(self, update: WeightUpdate, buckets: Any) -> None:
        staging = Staging(update, expected=tuple(infos()))
        async for bucket in buckets:
            staging.add(bucket)
        self.weights = dict(staging.complete())

    async def pause(self, mode: PauseMode = "keep") -> None:
        self.paused = True

    async def commit(self, update_id: str) -> int:
        self.version += 1
        return self.version

    async def rollback(self, update_id: str) -> None:
        self.weights = {}

    async def resume(self) -> None:
        self.paused = False

    async def health(self) -> EngineHealth:
        return EngineHealth(status="PAUSED" if self.paused else "SERVING", version=self.version)


def infos() -> list[Any]:
    from megatron_idempotent.rl.weights import TensorInfo

    return [TensorInfo.of(name, tensor) for name, tensor in weights(3).items()]


def test_tensors_and_buckets_come_as_rank_0_has_them(with_ranks) -> None:
    async def scenario(ranks: EmbeddedRanks, source: RemoteWeights) -> None:
        assert await asyncio.to_thread(source.tensors) == tuple(infos())
        for bucket_bytes, sizes in ((ONE, [1, 1, 1, 1]), (2 * ONE, [2, 2]), (1 << 20, [4])):
            found = await asyncio.to_thread(collect, source.buckets(bucket_bytes=bucket_bytes))
            assert [len(bucket.tensors) for bucket in found] == sizes
            assert [bucket.index for bucket in found] == list(range(len(sizes)))
            got = {name: each for bucket in found for name, each in bucket.tensors.items()}
            assert list(got) == ["a", "b", "c", "d"]
            for name, tensor in weights(3).items():
                assert torch.equal(got[name], tensor)
            sums = {name: each for bucket in found for name, each in bucket.checksums.items()}
            assert sums == {name: checksum(tensor) for name, tensor in weights(3).items()}

    with_ranks(scenario)


def test_an_export_that_is_closed_half_way_ends_on_all_ranks_and_another_can_begin(
    with_ranks,
) -> None:
    async def scenario(ranks: EmbeddedRanks, source: RemoteWeights) -> None:
        unused = source.buckets(bucket_bytes=ONE)
        await asyncio.to_thread(unused.close)
        assert await ranks.call("fetched") == [0, 0]
        buckets = source.buckets(bucket_bytes=ONE)
        assert (await asyncio.to_thread(next, buckets)).index == 0
        assert await ranks.call("fetched") == [1, 1]
        await asyncio.to_thread(buckets.close)
        await asyncio.to_thread(buckets.close)
        assert await asyncio.to_thread(next, buckets, None) is None
        assert await ranks.call("fetched") == [4, 4]
        again = source.buckets(bucket_bytes=ONE)
        await asyncio.to_thread(next, again)  # dropped: the next one ends it
        assert len(await asyncio.to_thread(collect, source.buckets(bucket_bytes=ONE))) == 4
        assert await ranks.call("fetched") == [12, 12]

    with_ranks(scenario)


def test_asking_on_the_loop_itself_is_an_error_and_not_a_deadlock(with_ranks) -> None:
    async def scenario(ranks: EmbeddedRanks, source: RemoteWeights) -> None:
        with pytest.raises(RuntimeError, match="in a thread"):
            source.tensors()
        with pytest.raises(ValueError, match="bucket_bytes=0"):
            source.buckets(bucket_bytes=0)
        assert await ranks.call("fetched") == [0, 0]

    with_ranks(scenario)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_lost_in_mid_export_is_the_callers_to_know(with_ranks, rank) -> None:
    async def scenario(ranks: EmbeddedRanks, source: RemoteWeights) -> None:
        buckets = source.buckets(bucket_bytes=ONE)
        with pytest.raises(RanksLost, match=rf"rank {rank} .*export_next\(\).*SIGKILL"):
            await asyncio.to_thread(collect, buckets)
        await asyncio.to_thread(buckets.close)  # nothing is left to be ended

    with_ranks(scenario, fault="killed", rank=rank)


def test_an_export_that_raises_on_rank_0_ends_on_all_ranks_and_can_be_made_again(
    with_ranks,
) -> None:
    async def scenario(ranks: EmbeddedRanks, source: RemoteWeights) -> None:
        buckets = source.buckets(bucket_bytes=ONE)
        with pytest.raises(RankFailed, match=r"export_next\(\) raised .*c is not finite"):
            await asyncio.to_thread(collect, buckets)
        await asyncio.to_thread(buckets.close)
        assert await ranks.call("fetched") == [4, 4]
        assert len(await asyncio.to_thread(collect, source.buckets(bucket_bytes=ONE))) == 4

    with_ranks(scenario, fault="raises", timeout_s=10.0)


def test_a_trainer_that_falls_silent_in_mid_export_is_given_up(with_ranks) -> None:
    async def scenario(ranks: EmbeddedRanks, source: RemoteWeights) -> None:
        with pytest.raises(RanksLost, match=r"export_next\(\) was not answered in 1.0 s"):
            await asyncio.to_thread(collect, source.buckets(bucket_bytes=ONE))

    with_ranks(scenario, fault="silent", rank=1, timeout_s=1.0)


def test_a_sync_brings_the_ranks_weights_to_an_engine_and_calls_pass_meanwhile(with_ranks) -> None:
    async def scenario(ranks: EmbeddedRanks, source: RemoteWeights) -> None:
        engine = Engine()
        sync = WeightSync([engine], settings=SyncSettings(bucket_bytes=ONE))
        updating = asyncio.ensure_future(sync.update(source, 1))
        while not updating.done():
            assert len(await ranks.call("fetched")) == 2
        report = updating.result()
        assert (report.tensors_sent, engine.version, engine.paused) == (4, 1, False)
        for name, tensor in weights(3).items():
            assert torch.equal(engine.weights[name], tensor)

    with_ranks(scenario)


def test_a_sync_whose_ranks_are_lost_raises_that_and_leaves_the_engine_serving(with_ranks) -> None:
    async def scenario(ranks: EmbeddedRanks, source: RemoteWeights) -> None:
        engine = Engine()
        sync = WeightSync([engine], settings=SyncSettings(bucket_bytes=ONE))
        with pytest.raises(RanksLost, match="rank 0"):
            await sync.update(source, 1)
        assert (engine.version, engine.paused) == (0, False)

    with_ranks(scenario, fault="killed")
