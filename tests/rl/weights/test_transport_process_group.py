"""Abilities of a process group alone: wait for, and lose, the other end."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
import torch
from weight_peers import PeerError, Peers

from megatron_idempotent.rl.weights import Bucket, UpdateDamaged, WeightUpdate
from megatron_idempotent.rl.weights import transports as t

UPDATE = WeightUpdate(id="run/1", version=1)
SMALL = Bucket.of(0, {"w": torch.arange(10.0)})
#: More than sockets hold, so that a worker that does not read it stops the sender.
LARGE = Bucket.of(1, {"v": torch.ones(1 << 22)})
#: For waits that are to end by something else; none of these tests takes that long.
LONG_S = 100.0


async def exchange(sender: t.Sender, bucket: Bucket, peers: Peers) -> dict:
    announced = await sender.announce(bucket)
    answer, _ = await asyncio.gather(
        peers[0].answers("receive", name="r", announced=announced), sender.transmit(bucket)
    )
    return answer


async def opened(sender: t.Sender, peers: Peers) -> None:
    peers[0].ask("open", name="r", opened=dict(await sender.open(UPDATE)), rank=1)


async def test_a_worker_killed_in_mid_transfer_is_told_at_once_and_the_next_update_goes_through(
    peers: Peers,
) -> None:
    sender = t.ProcessGroupSender(timeout_s=LONG_S)

    await opened(sender, peers)
    await exchange(sender, SMALL, peers)
    sending = asyncio.ensure_future(sender.transmit(LARGE))
    await asyncio.sleep(0)
    peers[0].kill()
    with pytest.raises(t.TransportError, match="bucket 1 was not sent: the transfer broke"):
        await sending
    with pytest.raises(t.TransportError, match=r"failed before, or is closed; close\(\)"):
        await sender.transmit(SMALL)
    await sender.close()
    await opened(sender, peers)
    assert (await exchange(sender, SMALL, peers))["index"] == 0
    await sender.close()


async def test_the_last_of_several_workers_is_missed_too() -> None:
    # Rank 0 does not send to it: another worker passes the bytes on.
    sender = t.ProcessGroupSender(ranks=3, timeout_s=LONG_S)
    opening = await sender.open(UPDATE)
    announced = await sender.announce(SMALL)
    workers = [t.receiver(opening, rank=rank) for rank in (1, 2, 3)]

    async def exchanged() -> list[object]:
        receiving = [asyncio.to_thread(worker.receive, announced) for worker in workers]
        sending = sender.transmit(SMALL)
        return await asyncio.gather(*receiving, sending, return_exceptions=True)

    assert [getattr(bucket, "index", bucket) for bucket in await exchanged()] == [0, 0, 0, None]
    workers.pop().close()
    async with asyncio.timeout(LONG_S / 4):
        *_, sent = await exchanged()
    assert isinstance(sent, t.TransportError)
    assert "the transfer broke off" in str(sent)
    await sender.close()


async def test_a_worker_that_never_comes_is_named_when_the_time_is_over() -> None:
    sender = t.ProcessGroupSender(ranks=2, timeout_s=0.5)
    await sender.open(UPDATE)
    with pytest.raises(t.TransportTimeout, match=r"workers \[1, 2\] of 2 did not join within"):
        await sender.transmit(SMALL)
    await sender.close()


async def test_a_worker_that_stops_reading_is_an_error_when_the_time_is_over(peers: Peers) -> None:
    sender = t.ProcessGroupSender(timeout_s=2.0)
    await opened(sender, peers)
    await exchange(sender, SMALL, peers)
    with pytest.raises(t.TransportTimeout, match="bucket 1 was not sent"):
        await sender.transmit(LARGE)
    await sender.close()
    peers[0].ask("close", name="r")


def test_a_trainer_killed_in_mid_transfer_is_told_at_once(peers: Peers) -> None:
    made = peers[1].ask("send", kind="process_group", arguments={"timeout_s": LONG_S})
    receiver = t.receiver(made["opened"])
    peers[1].tell("transmit")
    assert receiver.receive(made["announced"]).index == 0
    peers[1].answer()
    peers[1].kill()
    with pytest.raises(UpdateDamaged, match="bucket 0 did not arrive: the transfer broke off"):
        receiver.receive(made["announced"])
    with pytest.raises(UpdateDamaged, match="failed before, or is closed"):
        receiver.receive(made["announced"])


async def test_a_trainer_that_does_not_send_is_an_error_when_the_time_is_over(peers: Peers) -> None:
    sender = t.ProcessGroupSender(timeout_s=0.5)
    await opened(sender, peers)
    announced = await sender.announce(SMALL)
    with pytest.raises(PeerError, match="bucket 0 did not arrive: the process group was not"):
        await peers[0].answers("receive", name="r", announced=announced)
    await sender.close()


async def test_a_trainer_that_is_gone_is_an_error_when_the_time_is_over() -> None:
    sender = t.ProcessGroupSender(timeout_s=0.5)
    receiver = t.receiver(await sender.open(UPDATE))
    announced = await sender.announce(SMALL)
    await sender.close()
    with pytest.raises(UpdateDamaged, match=r"does not answer at '127.0.0.1', port \d+"):
        receiver.receive(announced)
    receiver.close()
    with pytest.raises(UpdateDamaged, match="this receiver is closed"):
        receiver.receive(announced)


async def test_workers_of_an_earlier_open_are_kept_out_of_the_next_one() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    sender = t.ProcessGroupSender(port=port, timeout_s=1.0)

    async def fails(receiving: object) -> None:
        with pytest.raises(UpdateDamaged):
            await receiving

    early = t.receiver(await sender.open(UPDATE))
    announced = await sender.announce(SMALL)
    await sender.close()
    again = await sender.open(UPDATE)
    assert again["port"] == port
    stray = asyncio.to_thread(early.receive, announced)
    with pytest.raises(t.TransportTimeout, match=r"workers \[1\] of 1"):
        await asyncio.gather(sender.transmit(SMALL), asyncio.create_task(fails(stray)))
    await sender.close()


async def test_a_port_of_ones_own_is_free_again_at_once(peers: Peers) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    sender = t.ProcessGroupSender(port=port, timeout_s=LONG_S)
    for _ in range(2):
        await opened(sender, peers)
        await exchange(sender, SMALL, peers)
        await sender.close()  # before the worker: its connections linger at this end


async def test_an_error_that_is_kept_holds_no_port() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    sender = t.ProcessGroupSender(port=port, timeout_s=0.5)
    await sender.open(UPDATE)
    with pytest.raises(t.TransportTimeout) as kept:
        await sender.transmit(SMALL)
    await sender.close()
    assert (await sender.open(UPDATE))["port"] == port
    assert kept.value.__traceback__ is not None
    await sender.close()


async def test_two_workers_of_one_rank_are_an_error() -> None:
    sender = t.ProcessGroupSender(ranks=2, timeout_s=1.0)
    opening = await sender.open(UPDATE)
    announced = await sender.announce(SMALL)
    workers = [t.receiver(opening, rank=1), t.receiver(opening, rank=1)]
    *failures, sent = await asyncio.gather(
        *(asyncio.to_thread(worker.receive, announced) for worker in workers),
        sender.transmit(SMALL),
        return_exceptions=True,
    )
    assert any("a second worker joined as rank 1 of 2" in str(error) for error in failures)
    assert "workers [2] of 2 did not join" in str(sent)
    await sender.close()
