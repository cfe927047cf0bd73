"""Segments of a GPU's memory: how they are opened, and what is said where they cannot be."""

from __future__ import annotations

import host_gpu
import pytest
from weight_peers import PeerError, Peers, filled

from megatron_idempotent.rl.weights import UpdateDamaged, WeightUpdate
from megatron_idempotent.rl.weights import transports as t
from megatron_idempotent.rl.weights.transports import cuda_ipc

pytestmark = pytest.mark.full

UPDATE = WeightUpdate(id="run/1", version=1)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that are host memory."""
    if host_gpu.COMPILER is None:
        pytest.skip(host_gpu.WITHOUT)
    host_gpu.build()
    monkeypatch.setattr(cuda_ipc, "Gpu", host_gpu.HostGpu)


@pytest.mark.usefixtures("on_host")
async def test_what_cannot_be_opened_is_named(peers: Peers) -> None:
    sender = t.CudaIpcSender()
    opened = await sender.open(UPDATE)
    announced = dict(await sender.announce(filled(0)))
    receiver = t.receiver(opened)
    for broken, named in (
        ({}, "failed with 201"),  # it is this process's own
        ({"handle": "x"}, "handle 'x'"),
        ({"handle": "00" * 8}, "handle '0{16}'"),
        ({"handle": None}, "None as 'handle'"),
        ({"segment_bytes": 1000}, "to 1000 bytes"),
        ({"segment_bytes": None}, "None as 'segment_bytes'"),
    ):
        with pytest.raises(UpdateDamaged, match=named):
            receiver.receive({**announced, **broken})
    # The trainer has gone on: nobody has that memory any more.
    peers[0].ask("open", name="late", opened=opened, rank=1)
    announced = await sender.announce(filled(0))
    await sender.close()
    with pytest.raises(PeerError, match="failed with 400"):
        peers[0].ask("receive", name="late", announced=announced)
    with pytest.raises(UpdateDamaged, match=r"GPU-z.*GPU-a, "):
        t.receiver({**opened, "gpu": "GPU-z"})


@pytest.mark.usefixtures("on_host")
def test_a_gpu_that_is_not_there_is_named_with_how_many_are() -> None:
    with pytest.raises(t.TransportError, match="no GPU 7"):
        t.CudaIpcSender(7)


def test_without_a_driver_the_error_names_other_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(t.TransportError, match="use SharedMemorySender"):
        t.CudaIpcSender()
