"""Addresses at which a process group is met, and state that it leaves alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_idempotent.rl.weights import Bucket, UpdateDamaged, WeightUpdate
from megatron_idempotent.rl.weights import transports as t
from megatron_idempotent.rl.weights.transports.layout import BucketLayout

UPDATE = WeightUpdate(id="run/1", version=1)
SMALL = Bucket.of(0, {"w": torch.arange(10.0)})


async def test_the_processes_own_groups_are_left_alone() -> None:
    sender = t.ProcessGroupSender()
    receiver = t.receiver(await sender.open(UPDATE))
    announced = await sender.announce(SMALL)
    received, _ = await asyncio.gather(
        asyncio.to_thread(receiver.receive, announced), sender.transmit(SMALL)
    )
    assert not dist.is_initialized()
    receiver.close()
    await sender.close()
    assert torch.equal(received.tensors["w"], SMALL.tensors["w"])
    assert not dist.is_initialized()


async def test_only_the_given_address_is_listened_at() -> None:
    sender = t.ProcessGroupSender("127.0.0.2")
    port = (await sender.open(UPDATE))["port"]
    socket.create_connection(("127.0.0.2", port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)
    await sender.close()


async def test_an_address_that_cannot_be_listened_at_is_an_error_and_another_open_works() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        sender = t.ProcessGroupSender(port=port)
        with pytest.raises(t.TransportError, match=f"'127.0.0.1', port {port}"):
            await sender.open(UPDATE)
    await sender.open(UPDATE)
    await sender.close()
    elsewhere = t.ProcessGroupSender("192.0.2.1")  # of a network kept for documentation
    with pytest.raises(t.TransportError, match=r"'192\.0\.2\.1', port 0"):
        await elsewhere.open(UPDATE)


@pytest.mark.parametrize(("name", "value"), [("ranks", 0), ("backend", "mpi"), ("timeout_s", 0)])
def test_arguments_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        t.ProcessGroupSender(**{name: value})


async def test_a_rank_that_the_sender_does_not_have_is_refused() -> None:
    sender = t.ProcessGroupSender(ranks=2)
    opening = await sender.open(UPDATE)
    for rank in (0, 3):
        with pytest.raises(UpdateDamaged, match=f"rank={rank}"):
            t.receiver(opening, rank=rank)
    await sender.close()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"host": "a\0b"}, UpdateDamaged, "'a.x00b'"),
        ({"host": None}, UpdateDamaged, "None as 'host'"),
        ({"port": 65536}, UpdateDamaged, "port 65536"),
        ({"timeout_s": 1e18}, UpdateDamaged, "timeout_s 1e"),
        ({"timeout_s": True}, UpdateDamaged, "True as 'timeout_s'"),
        ({"backend": "mpi"}, UpdateDamaged, "backend 'mpi'"),
        pytest.param(
            *({"backend": "nccl"}, t.TransportError, "backend 'nccl'"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it needs no GPU"),
        ),
    ],
)
async def test_an_announcement_that_makes_no_sense_is_refused(
    change: dict, error: type[Exception], message: str
) -> None:
    sender = t.ProcessGroupSender()
    opening = {**await sender.open(UPDATE), **change}
    layout = BucketLayout.of(UPDATE.id, Bucket.of(0, {"w": torch.ones(3)})).as_json()
    with pytest.raises(error, match=message):
        await asyncio.to_thread(lambda: t.receiver(opening).receive(layout))
    await sender.close()
