"""Frames go over a real pipe, and a rank ends when its pipe breaks."""

from __future__ import annotations

import asyncio
import pickle
import socket
import subprocess
import sys

import pytest

from megatron_idempotent.rl.workers import frames
from megatron_idempotent.rl.workers.pipes import PipeLink
from megatron_idempotent.rl.workers.served import ENDED

PROGRAM = """
import socket, sys
from megatron_idempotent.rl.workers import WorkerSpec
from megatron_idempotent.rl.workers.served import Served, make_worker, serve_pipe
spec = WorkerSpec(factory="importlib:import_module", argument="time")
serve_pipe(socket.socket(fileno=int(sys.argv[1])), Served(0, lambda: make_worker(spec)))
"""


@pytest.mark.parametrize("busy", [False, True])
async def test_a_rank_ends_itself_when_its_pipe_breaks_wherever_it_is(busy) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        rank = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
    link = PipeLink(ours)
    try:
        assert await asyncio.wait_for(link.ready(), 20) == rank.pid
        kind, _ = await link.ask(frames.MAKE, [])
        assert kind == frames.RESULT
        asked = None
        if busy:
            call = frames.dump(("sleep", (600,)))
            parts = [len(call).to_bytes(4, "big"), *call]
            asked = asyncio.ensure_future(link.ask(frames.CALL, parts))
            await asyncio.sleep(0.2)
        link.shut()
        _, said = await asyncio.to_thread(rank.communicate, timeout=20)
        await link.closed()
        if asked is not None:
            asked.cancel()
    finally:
        rank.kill()
        rank.wait()
    assert (rank.returncode, "is gone" in said) == (ENDED, True)


async def test_the_end_of_a_rank_is_told_once() -> None:
    ours, theirs = socket.socketpair()
    link, ends = PipeLink(ours), []
    link.on_end = lambda: ends.append(link.ended)
    theirs.close()
    await link.closed()
    await link.leave()
    assert ends == ["its pipe was closed"]


async def test_large_buffers_pass_beside_the_pickle_and_are_not_copied() -> None:
    large, small = pickle.PickleBuffer(bytearray(b"x" * (1 << 20))), b"y" * 10
    parts = frames.dump([large, small])
    assert [memoryview(part).nbytes for part in parts[1:]] == [1 << 20]
    large.raw()[0] = ord("z")
    assert bytes(memoryview(parts[1])[:2]) == b"zx"

    frame = [*parts, b""] * 600
    sent = frames.packed(b"R", frame)[1:]
    assert all(one is other for one, other in zip(sent, frame, strict=True))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sending = asyncio.to_thread(frames.send_frame, ours, b"R", frame)
        _, (kind, received) = await asyncio.gather(
            sending, asyncio.to_thread(frames.receive_frame, theirs)
        )
    assert (kind, len(received)) == (b"R", 3 * 600)
    assert received[2] == b""
    assert frames.load(received[-3:-1])[0][:2] == b"zx"
