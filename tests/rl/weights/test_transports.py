"""The contract of all transports, each run against receivers in other processes."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import host_gpu
import pytest
import torch
from transport_peer import described
from weight_peers import Peers, buckets_of, filled

from megatron_idempotent.rl.weights import Bucket, Staging, TensorInfo, UpdateDamaged, WeightUpdate
from megatron_idempotent.rl.weights import transports as t
from megatron_idempotent.rl.weights.transports import cuda_ipc
from megatron_idempotent.rl.weights.transports.shared_memory import DIRECTORY, PREFIX

KINDS = [
    "disk",
    "shared_memory",
    "process_group",
    pytest.param(
        "cuda_ipc",
        marks=pytest.mark.skipif(host_gpu.COMPILER is None, reason=host_gpu.WITHOUT),
    ),
    "bucket",
]
#: Those that put buckets into segments of memory that workers open.
IN_MEMORY = [KINDS[1], KINDS[3]]
UPDATE = WeightUpdate(id="run/1", version=1)
Make = Callable[..., t.Sender]


@pytest.fixture
def make(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def sender(kind: str, **arguments: object) -> t.Sender:
        if kind == "disk":
            return t.DiskSender(tmp_path / "weights", **arguments)
        if kind == "bucket":
            return t.BucketSender(str(tmp_path / "weights"), **arguments)
        if kind == "shared_memory":
            return t.SharedMemorySender(**arguments)
        if kind == "cuda_ipc":
            host_gpu.build()
            monkeypatch.setattr(cuda_ipc, "Gpu", host_gpu.HostGpu)
            return t.CudaIpcSender(**arguments)
        return t.ProcessGroupSender("127.0.0.1", **{"timeout_s": 60.0, **arguments})

    return sender


def left_behind(tmp_path: pathlib.Path) -> list[str]:
    mine = [path for path in DIRECTORY.glob(f"{PREFIX}.*") if str(os.getpid()) in path.name]
    files = [str(path) for path in (*mine, *tmp_path.glob("weights/*"))]
    return [*files, *host_gpu.left_behind()]


async def send_update(
    sender: t.Sender, update: WeightUpdate, buckets: list[Bucket], peers: Peers, ranks: int = 1
) -> list[list[dict]]:
    """Return what each of the other processes has received, per bucket."""
    opened = json.loads(json.dumps(await sender.open(update)))
    for rank in range(1, ranks + 1):
        peers[rank - 1].ask("open", name=update.id, opened=opened, rank=rank)
    received = []
    for bucket in buckets:
        announced = json.loads(json.dumps(await sender.announce(bucket)))
        *answers, _ = await asyncio.gather(
            *(
                peers[rank].answers("receive", name=update.id, announced=announced)
                for rank in range(ranks)
            ),
            sender.transmit(bucket),
        )
        await sender.release(bucket)
        received.append(answers)
    await sender.close()
    for rank in range(1, ranks + 1):
        peers[rank - 1].ask("close", name=update.id)
    return received


def owned(bucket: Bucket) -> dict:
    """A bucket as it has to arrive: the same bytes, each tensor contiguous and for itself."""
    expected = described(bucket)
    return {**expected, "tensors": [[*entry[:4], True] for entry in expected["tensors"]]}


@pytest.mark.parametrize("kind", KINDS)
async def test_two_updates_of_every_kind_of_tensor_arrive_in_another_process_bit_for_bit(
    kind: str, make: Make, peers: Peers, tmp_path: pathlib.Path
) -> None:
    sender = make(kind)

    for version in (1, 2):
        buckets = buckets_of(version)
        update = WeightUpdate(id=f"{kind}/{version}", version=version)
        received = await send_update(sender, update, buckets, peers)
        for bucket, answers in zip(buckets, received, strict=True):
            for answer in answers:
                assert answer.pop("seconds") > 0
                assert answer == owned(bucket)
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_get_the_same_buckets_in_as_many_as_there_are(
    kind: str, make: Make, peers: Peers
) -> None:
    sender = make(kind, **({"ranks": 2} if kind == "process_group" else {}))
    buckets = [Bucket.of(i, {f"{i}": torch.full((i + 1,), float(i))}) for i in range(12)]
    update = WeightUpdate(id=f"{kind}/two", version=3)
    received = asyncio.run(send_update(sender, update, buckets, peers, ranks=2))
    assert [len(answers) for answers in received] == [2] * 12
    for bucket, answers in zip(buckets, received, strict=True):
        assert all(answer["tensors"] == owned(bucket)["tensors"] for answer in answers)


def test_workers_import_neither_megatron_nor_transformers(peers: Peers) -> None:
    assert peers[0].ask("hello")["heavy"] == []


@pytest.mark.parametrize("kind", ["disk", "shared_memory"])
def test_a_byte_that_changes_on_the_way_is_found_by_staging(
    kind: str, make: Make, tmp_path: pathlib.Path
) -> None:
    sender = make(kind)
    tensor = torch.arange(5000.0)

    async def scenario() -> Bucket:
        receiver = t.receiver(await sender.open(UPDATE))
        announced = await sender.announce(Bucket.of(0, {"w": tensor}))
        folder = DIRECTORY if kind == "shared_memory" else next((tmp_path / "weights").iterdir())
        with open(folder / announced.get("segment", announced.get("file")), "r+b") as file:
            file.seek(4000)
            byte = file.read(1)[0]
            file.seek(4000)
            file.write(bytes([byte ^ 4]))
        try:
            return receiver.receive(announced)
        finally:
            await sender.close()

    staging = Staging(UPDATE, expected=[TensorInfo.of("w", tensor)])
    with pytest.raises(UpdateDamaged, match="w arrived"):
        staging.add(asyncio.run(scenario()))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_second_open_is_an_error_and_the_first_goes_on_and_leaves_nothing_half_way(
    kind: str, make: Make, tmp_path: pathlib.Path
) -> None:
    sender = make(kind)

    await sender.open(UPDATE)
    with pytest.raises(t.TransportError, match=r"'run/1'.*'run/2'"):
        await sender.open(WeightUpdate(id="run/2", version=2))
    for index in range(2):  # neither is released
        announced = await sender.announce(Bucket.of(index, {"w": torch.ones(3)}))
        assert announced["index"] == index
    await sender.close()
    await sender.close()
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_buckets_of_no_update_are_an_error(kind: str, make: Make) -> None:
    sender = make(kind)
    bucket = Bucket.of(0, {"w": torch.ones(3)})
    for call in (sender.announce, sender.transmit, sender.release):
        with pytest.raises(t.TransportError, match=call.__name__):
            await call(bucket)
    await sender.close()
    await sender.open(UPDATE)
    await sender.close()
    with pytest.raises(t.TransportError, match="announce"):
        await sender.announce(bucket)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_open_and_a_close_that_are_cancelled_leave_nothing_behind(
    kind: str, make: Make, tmp_path: pathlib.Path
) -> None:
    sender = make(kind)
    threads: list[Any] = []

    async def cancelled(call: object) -> None:
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)  # so that it has begun
        threads.append(sender._thread)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await cancelled(sender.open(UPDATE))
    opened = await sender.open(UPDATE)
    await sender.announce(Bucket.of(0, {"w": torch.ones(3)}))
    threads.append(sender._thread)
    await cancelled(sender.close())
    # What was begun is discarded on the sender's threads, each in its own time.
    for thread in filter(None, threads):
        await asyncio.to_thread(thread.shutdown)
    assert opened["update"] == UPDATE.id
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_bucket_of_another_update_is_refused(kind: str, make: Make) -> None:
    sender = make(kind)
    receiver = t.receiver(await sender.open(UPDATE), bucket="/")
    announced = dict(await sender.announce(Bucket.of(0, {"w": torch.ones(3)})))
    with pytest.raises(UpdateDamaged, match="'run/9'"):
        receiver.receive({**announced, "update": "run/9"})
    await sender.close()


@pytest.mark.parametrize("kind", IN_MEMORY)
async def test_two_segments_serve_any_number_of_buckets_of_any_size(
    kind: str, make: Make, peers: Peers, tmp_path: pathlib.Path
) -> None:
    sender = make(kind)
    place = "segment" if kind == "shared_memory" else "handle"
    opened = await sender.open(UPDATE)
    peers[0].ask("open", name="two", opened=opened, rank=1)
    seen = set()

    async def announced(index: int, megabytes: int = 1) -> str:
        found = await sender.announce(filled(index, megabytes))
        received = peers[0].ask("receive", name="two", announced=found)
        assert received["tensors"] == owned(filled(index, megabytes))["tensors"]
        assert len(left_behind(tmp_path)) <= 2
        return str(found[place])

    for index, megabytes in enumerate((2, 1, 2, 2, 1, 2)):
        seen.add(await announced(index, megabytes))
        if index:
            await sender.release(filled(index - 1))
    assert len(seen) == 2
    larger = await announced(6, 6)
    assert larger not in seen
    await sender.release(filled(6))
    assert await announced(7, 5) == larger
    with pytest.raises(t.TransportError, match=r"\[5, 7\]"):
        await sender.announce(filled(8))
    assert await announced(7, 5) == larger  # again, into its own segment
    await sender.close()
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("kind", IN_MEMORY)
async def test_memory_that_is_not_there_is_an_error_and_the_next_bucket_comes(
    kind: str, make: Make, tmp_path: pathlib.Path
) -> None:
    sender = make(kind)
    nbytes, said = 1 << 31, "MB on GPU 1, which has 1074 MB free: cuMemAlloc_v2 failed with 2: out"
    if kind == "shared_memory":
        room = os.statvfs(DIRECTORY)
        nbytes, said = room.f_blocks * room.f_frsize * 2, r"MB in /dev/shm"
    if not nbytes:
        pytest.skip("shared memory is not limited here")
    # One byte that is expanded takes no memory here.
    too_much = Bucket(index=0, tensors={"w": torch.zeros(1).bool().expand(nbytes)}, checksums={})
    await sender.open(UPDATE)
    with pytest.raises(t.TransportError, match=rf"no room for a segment of \d+ {said}"):
        await sender.announce(too_much)
    assert left_behind(tmp_path) == []
    assert (await sender.announce(filled(0)))["index"] == 0
    await sender.close()
    assert left_behind(tmp_path) == []


def test_an_unknown_kind_and_another_format_are_refused_by_name() -> None:
    for opened, named in (
        ({"format": 1, "kind": "pigeon", "update": "run/1"}, "kind 'pigeon'"),
        ({"format": 2, "kind": "disk", "update": "run/1"}, "format 2"),
        ({}, "format None"),
    ):
        with pytest.raises(t.TransportError, match=named):
            t.receiver(opened)


@pytest.mark.parametrize("kind", KINDS)
def test_an_announcement_that_lacks_something_says_what(kind: str) -> None:
    with pytest.raises(UpdateDamaged, match="'update'"):
        t.receiver({"format": 1, "kind": kind})
