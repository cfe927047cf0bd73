"""Segments of a GPU's memory: how they are opened, and what is said where they cannot be."""

from __future__ import annotations

import re

import host_gpu
import pytest
import torch
from weight_peers import PeerError, Peers

from megatron_idempotent.rl.weights import Bucket, UpdateDamaged, WeightUpdate
from megatron_idempotent.rl.weights import transports as t
from megatron_idempotent.rl.weights.transports import cuda_ipc

UPDATE = WeightUpdate(id="run/1", version=1)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that are host memory."""
    if host_gpu.COMPILER is None:
        pytest.skip(host_gpu.WITHOUT)
    host_gpu.build()
    monkeypatch.setattr(cuda_ipc, "Gpu", host_gpu.HostGpu)


def bucket(index: int, megabytes: int = 1) -> Bucket:
    return Bucket.of(index, {"w": torch.full((megabytes << 18,), float(index))})


@pytest.mark.usefixtures("on_host")
async def test_two_segments_serve_any_number_of_buckets_and_none_is_left(peers: Peers) -> None:
    sender = t.CudaIpcSender()
    opened = await sender.open(UPDATE)
    assert opened["gpu"] == "GPU-b", "the caller's"
    peers[0].ask("open", name="two", opened=opened, rank=1)
    handles = set()
    for index, megabytes in enumerate((2, 1, 2, 2)):
        announced = await sender.announce(bucket(index, megabytes))
        if index:
            await sender.release(bucket(index - 1))
        handles.add(announced["handle"])
        found = peers[0].ask("receive", name="two", announced=announced)
        assert found["tensors"][0][2] == [megabytes << 18]
    assert len(handles) == len(host_gpu.left_behind()) == 2
    await sender.announce(bucket(4))
    with pytest.raises(t.TransportError, match=r"buckets \[3, 4\] hold both segments"):
        await sender.announce(bucket(5))
    await sender.close()
    assert host_gpu.left_behind() == []


@pytest.mark.usefixtures("on_host")
async def test_memory_that_is_not_there_is_an_error_and_the_next_bucket_comes() -> None:
    sender = t.CudaIpcSender(0)
    # One byte that is expanded takes no memory here.
    too_much = Bucket(index=0, tensors={"w": torch.zeros(1).bool().expand(1 << 31)}, checksums={})
    await sender.open(UPDATE)
    said = "no room for a segment of 2147 MB on GPU 0, which has 1074 MB free: cuMemAlloc_v2 "
    with pytest.raises(t.TransportError, match=re.escape(said) + "failed with 2: out of mem"):
        await sender.announce(too_much)
    assert (await sender.announce(bucket(0)))["index"] == 0
    await sender.close()
    assert host_gpu.left_behind() == []


@pytest.mark.usefixtures("on_host")
async def test_what_cannot_be_opened_is_named(peers: Peers) -> None:
    sender = t.CudaIpcSender()
    opened = await sender.open(UPDATE)
    announced = dict(await sender.announce(bucket(0)))
    receiver = t.receiver(opened)
    with pytest.raises(UpdateDamaged, match=r"failed with 201: .* is this another process"):
        receiver.receive(announced)
    for broken, why in (
        ({"handle": "x"}, "has no segment that can be opened"),
        ({"handle": "00" * 8}, r"a handle of 8 bytes \(it has to be 64\)"),
        ({"segment_bytes": 1000}, r"to 1000 bytes \(it has to be 1048576 or more\)"),
        ({"segment_bytes": None}, "has no segment that can be opened"),
    ):
        with pytest.raises(UpdateDamaged, match=why):
            receiver.receive({**announced, **broken})
    del announced["handle"]
    with pytest.raises(UpdateDamaged, match=r"KeyError.'handle'"):
        receiver.receive(announced)
    # The trainer has gone on: nobody has that memory any more.
    peers[0].ask("open", name="late", opened=opened, rank=1)
    announced = await sender.announce(bucket(0))
    await sender.close()
    with pytest.raises(PeerError, match="failed with 400: invalid resource handle; is this"):
        peers[0].ask("receive", name="late", announced=announced)
    with pytest.raises(UpdateDamaged, match="are on GPU GPU-z, and this process sees GPU-a, "):
        t.receiver({**opened, "gpu": "GPU-z"})


@pytest.mark.usefixtures("on_host")
def test_a_gpu_that_is_not_there_is_named_with_how_many_are() -> None:
    with pytest.raises(t.TransportError, match="there is no GPU 7 here: torch sees 2"):
        t.CudaIpcSender(7)


def test_without_a_driver_the_error_names_other_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(t.TransportError, match=r"no NVIDIA driver here: .*use SharedMemorySender"):
        t.CudaIpcSender()
