"""Weights from ranks to the controller's process; tests/rl/trainer has them in a weight sync."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from export_worker import FACTORY, weights

from megatron_idempotent.rl.weights import Bucket, TensorInfo, checksum
from megatron_idempotent.rl.workers import (
    EmbeddedRanks,
    RankFailed,
    RanksLost,
    RemoteWeights,
    WorkerSpec,
)

ONE = 64 * 32 * 4
"""Bytes of a tensor of float32: a bucket of one."""


@contextlib.asynccontextmanager
async def exporting(pool, *, timeout_s: float = 30.0, **argument: Any):
    """Two ranks that export, and their weights as the controller sees them."""
    ranks = EmbeddedRanks(
        WorkerSpec(factory=FACTORY, argument={"seed": 3, **argument}), 2, pool=pool
    )
    await ranks.start()
    try:
        yield ranks, RemoteWeights(ranks, asyncio.get_running_loop(), timeout_s=timeout_s)
    finally:
        await ranks.close()


def collect(buckets: Iterator[Bucket]) -> list[Bucket]:
    return list(buckets)


def infos() -> list[Any]:
    return [TensorInfo.of(name, tensor) for name, tensor in weights(3).items()]


async def test_tensors_and_buckets_come_as_rank_0_has_them(megatron_rank_pool) -> None:
    async with exporting(megatron_rank_pool) as (_, source):
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
        changed = source.buckets(bucket_bytes=1 << 20, whole=False)
        (bucket,) = await asyncio.to_thread(collect, changed)
        assert list(bucket.tensors) == ["a"]


async def test_an_export_that_is_closed_half_way_ends_on_all_ranks_and_another_can_begin(
    megatron_rank_pool,
) -> None:
    async with exporting(megatron_rank_pool) as (ranks, source):
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


async def test_asking_on_the_loop_itself_is_an_error_and_not_a_deadlock(megatron_rank_pool) -> None:
    async with exporting(megatron_rank_pool) as (ranks, source):
        with pytest.raises(RuntimeError, match="in a thread"):
            source.tensors()
        with pytest.raises(ValueError, match="bucket_bytes=0"):
            source.buckets(bucket_bytes=0)
        assert await ranks.call("fetched") == [0, 0]


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_lost_in_mid_export_is_the_callers_to_know(
    megatron_rank_pool, rank
) -> None:
    async with exporting(megatron_rank_pool, fault="killed", rank=rank) as (_, source):
        buckets = source.buckets(bucket_bytes=ONE)
        with pytest.raises(RanksLost, match=rf"rank {rank} .*export_next\(\).*SIGKILL"):
            await asyncio.to_thread(collect, buckets)
        await asyncio.to_thread(buckets.close)  # nothing is left to be ended


async def test_an_export_that_raises_on_rank_0_ends_on_all_ranks_and_can_be_made_again(
    megatron_rank_pool,
) -> None:
    async with exporting(megatron_rank_pool, fault="raises", timeout_s=10.0) as (ranks, source):
        buckets = source.buckets(bucket_bytes=ONE)
        with pytest.raises(RankFailed, match=r"export_next\(\) raised .*c is not finite"):
            await asyncio.to_thread(collect, buckets)
        await asyncio.to_thread(buckets.close)
        assert await ranks.call("fetched") == [4, 4]
        assert len(await asyncio.to_thread(collect, source.buckets(bucket_bytes=ONE))) == 4


async def test_a_trainer_that_falls_silent_in_mid_export_is_given_up(megatron_rank_pool) -> None:
    async with exporting(megatron_rank_pool, fault="silent", rank=1, timeout_s=1.0) as (_, source):
        with pytest.raises(RanksLost, match=r"export_next\(\) was not answered in 1.0 s"):
            await asyncio.to_thread(collect, source.buckets(bucket_bytes=ONE))
