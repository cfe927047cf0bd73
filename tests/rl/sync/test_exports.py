"""Weights from ranks to the controller's process; tests/rl/trainer has them in a weight sync."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from export_worker import FACTORY, weights

from megatron_idempotent.rl.sync import RemoteWeights
from megatron_idempotent.rl.sync.exports import MakeSender
from megatron_idempotent.rl.weights import Bucket, TensorInfo, WeightUpdate, checksum
from megatron_idempotent.rl.weights.records import DELTA, UpdateDamaged
from megatron_idempotent.rl.weights.transports import (
    BucketSender,
    DiskSender,
    ProcessGroupSender,
    SharedMemorySender,
    TransportError,
    receiver,
)
from megatron_idempotent.rl.workers import EmbeddedRanks, RankFailed, RanksLost, WorkerSpec
from megatron_idempotent.rl.workers.pipes import PipeLink

ONE = 64 * 32 * 4
"""Bytes of a tensor of float32: a bucket of one."""


@contextlib.asynccontextmanager
async def exporting(
    pool, *, timeout_s: float = 30.0, transport: Any = SharedMemorySender, **argument: Any
):
    """Two ranks that export, and their weights as the controller sees them."""
    spec = WorkerSpec(factory=FACTORY, argument={"seed": 3, **argument})
    ranks, loop = EmbeddedRanks(spec, 2, pool=pool), asyncio.get_running_loop()
    await ranks.start()
    try:
        yield ranks, RemoteWeights(ranks, loop, timeout_s=timeout_s, transport=transport)
    finally:
        await ranks.close()


async def collected(source: RemoteWeights, bucket_bytes: int, **whole: bool) -> list[Bucket]:
    """All buckets of an export, which a thread takes."""
    return await asyncio.to_thread(list, source.buckets(bucket_bytes=bucket_bytes, **whole))


def infos() -> list[Any]:
    return [TensorInfo.of(name, tensor) for name, tensor in weights(3).items()]


async def test_tensors_and_buckets_come_as_rank_0_has_them(megatron_rank_pool) -> None:
    async with exporting(megatron_rank_pool) as (_, source):
        assert await asyncio.to_thread(source.tensors) == tuple(infos())
        for bucket_bytes, sizes in ((ONE, [1, 1, 1, 1]), (2 * ONE, [2, 2]), (1 << 20, [4])):
            found = await collected(source, bucket_bytes)
            assert [len(bucket.tensors) for bucket in found] == sizes
            assert [bucket.index for bucket in found] == list(range(len(sizes)))
            got = {name: each for bucket in found for name, each in bucket.tensors.items()}
            assert list(got) == ["a", "b", "c", "d"]
            for name, tensor in weights(3).items():
                assert torch.equal(got[name], tensor)
            sums = {name: each for bucket in found for name, each in bucket.checksums.items()}
            assert sums == {name: checksum(tensor) for name, tensor in weights(3).items()}
        (bucket,) = await collected(source, 1 << 20, whole=False)
        assert list(bucket.tensors) == ["a"]


def senders(folder: Path) -> dict[str, MakeSender]:
    """Return what makes a sender of each transport that needs no GPU."""
    return {
        "disk": functools.partial(DiskSender, folder),
        "shared_memory": SharedMemorySender,
        "process_group": ProcessGroupSender,
        "bucket": functools.partial(BucketSender, str(folder)),
    }


@contextlib.contextmanager
def counting_bytes():
    """Yield a list of the sizes of what comes from ranks through their pipes."""
    receive, sizes = PipeLink._receive, []

    async def counted(link: PipeLink, size: int) -> Any:
        sizes.append(size)
        return await receive(link, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipeLink, "_receive", counted)
        yield sizes


#: Rank 0 has all tensors, or both ranks have some.
KEEPERS = pytest.mark.parametrize("keepers", [(0, 0, 0, 0), (1, 0, 1, 1)], ids=["one", "two"])


@KEEPERS
@pytest.mark.parametrize("kind", ["disk", "shared_memory", "process_group"])
async def test_weights_come_by_a_transport_and_not_through_the_ranks_pipes(
    megatron_rank_pool, tmp_path, kind, keepers
) -> None:
    make = senders(tmp_path / "weights")[kind]
    async with exporting(megatron_rank_pool, transport=make, keepers=keepers) as (_, source):
        with counting_bytes() as sizes:
            buckets = await collected(source, 2 * ONE)
        received = {name: each for bucket in buckets for name, each in bucket.tensors.items()}
        for name, tensor in weights(3).items():
            assert torch.equal(received[name], tensor)
            assert buckets[0].checksums.get(name, checksum(tensor)) == checksum(tensor)
        assert max(sizes) < ONE / 4  # descriptions and announcements, whatever a tensor's size
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"]


@KEEPERS
@pytest.mark.parametrize("kind", senders(Path()))
async def test_an_engines_sender_works_on_ranks_and_the_controller_has_no_bytes(
    megatron_rank_pool, tmp_path, kind, keepers
) -> None:
    make = senders(tmp_path / "weights")[kind]
    update = WeightUpdate(id="run/1", version=1)
    async with exporting(megatron_rank_pool, transport=None, keepers=keepers) as (_, source):
        sender, received = source.sender(make), {}
        with counting_bytes() as sizes:
            # In an engine's worker, whose operator has named the folder.
            end = receiver(await sender.open(update), bucket=str(tmp_path / "weights"))
            # The export ends while its last buckets are still on their way.
            for bucket in await collected(source, 3 * ONE):
                assert {tensor.device.type for tensor in bucket.tensors.values()} == {"meta"}
                assert bucket.elements_changed == sum(t.numel() for t in bucket.tensors.values())
                announced = await sender.announce(bucket)
                receiving = asyncio.to_thread(end.receive, announced)
                got, _ = await asyncio.gather(receiving, sender.transmit(bucket))
                received |= got.tensors
                await sender.release(bucket)
            end.close()
            await sender.close()
            await sender.close()
        assert all(torch.equal(received[name], tensor) for name, tensor in weights(3).items())
        assert max(sizes) < ONE / 4
        with pytest.raises(TransportError, match=r"call open\(\)"):
            await sender.announce(bucket)
        await sender.open(update)
        with pytest.raises(TransportError, match=r"bucket \d is not there to announce"):
            await sender.announce(bucket)
        await sender.close()


async def test_parts_that_make_up_no_bucket_are_refused(megatron_rank_pool, tmp_path) -> None:
    make = functools.partial(DiskSender, tmp_path)
    async with exporting(megatron_rank_pool, transport=None, keepers=(0, 1, 0, 1)) as (_, source):
        sender = source.sender(make)
        opened = json.loads(json.dumps(await sender.open(WeightUpdate(id="run/1", version=1))))
        buckets = await collected(source, 2 * ONE)
        first, second = [
            json.loads(json.dumps(await sender.announce(bucket)))["parts"] for bucket in buckets
        ]
        for senders_, fact in (
            ([], "0 senders"),
            ([opened], "['several']"),
            ([3], "format 3"),
        ):
            with pytest.raises((UpdateDamaged, TransportError), match=re.escape(fact)):
                receiver({**opened, "senders": senders_})
        end = receiver(opened)
        for parts, fact in (
            (None, "lacks 'parts'"),
            (first[:1], "1 parts, and 2 senders"),
            ([first[0], None], "is not an object"),
            ([first[0], second[1]], "buckets 0, 1"),
            (first[::-1], "cannot be read"),
        ):
            with pytest.raises(UpdateDamaged, match=fact):
                end.receive({} if parts is None else {"parts": parts})
        assert sorted(end.receive({"parts": first}).tensors) == ["a", "b"]
        end.close()
        twice = receiver({**opened, "senders": opened["senders"][:1] * 2})
        with pytest.raises(UpdateDamaged, match="has a of several senders"):
            twice.receive({"parts": first[:1] * 2})
        twice.close()
        await sender.close()
    assert not [*tmp_path.rglob("*.safetensors")]


async def test_a_sender_that_fails_beside_others_is_told_and_all_are_closed(
    megatron_rank_pool, tmp_path
) -> None:
    make = functools.partial(send_from_rank_0_alone, tmp_path)
    async with exporting(megatron_rank_pool, transport=None, keepers=(0, 1, 0, 1)) as (_, source):
        sender = source.sender(make)
        with pytest.raises(TransportError, match="run/1"):
            await sender.open(WeightUpdate(id="run/1", version=1))
        await sender.close()
        assert not [*tmp_path.glob("version-*")]


def send_from_rank_0_alone(folder: Path) -> DiskSender:
    """Make a sender whose folder is no folder on another rank than 0."""
    return DiskSender(folder if not torch.distributed.get_rank() else "/dev/null")


async def test_what_changed_is_found_on_rank_0_where_the_source_does_not(
    megatron_rank_pool,
) -> None:
    async with exporting(megatron_rank_pool, finds_changes=False) as (ranks, source):
        (bucket,) = await collected(source, 1 << 20, whole=True)
        assert len(bucket.tensors) == 4
        await ranks.call("change")
        with counting_bytes() as sizes:
            (bucket,) = await collected(source, 1 << 20, whole=False)
        assert list(bucket.tensors) == ["c" + DELTA]
        assert bucket.elements_changed == 1
        assert max(sizes) < ONE / 4


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
        assert len(await collected(source, ONE)) == 4
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
            await asyncio.to_thread(list, buckets)
        await asyncio.to_thread(buckets.close)  # nothing is left to be ended


async def test_an_export_that_raises_on_rank_0_ends_on_all_ranks_and_can_be_made_again(
    megatron_rank_pool,
) -> None:
    async with exporting(megatron_rank_pool, fault="raises", timeout_s=10.0) as (ranks, source):
        buckets = source.buckets(bucket_bytes=ONE)
        with pytest.raises(RankFailed, match=r"export_next\(\) raised .*c is not finite"):
            await asyncio.to_thread(list, buckets)
        await asyncio.to_thread(buckets.close)
        assert await ranks.call("fetched") == [4, 4]
        assert len(await collected(source, ONE)) == 4


async def test_a_trainer_that_falls_silent_in_mid_export_is_given_up(megatron_rank_pool) -> None:
    async with exporting(megatron_rank_pool, fault="silent", rank=1, timeout_s=1.0) as (_, source):
        with pytest.raises(RanksLost, match=r"export_next\(\) was not answered in 1.0 s"):
            await collected(source, ONE)
