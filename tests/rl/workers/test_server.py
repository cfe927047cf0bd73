"""Admission of connections, and faults that they survive. Both ends are real sockets; no ranks."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator

import pytest

from megatron_idempotent.rl.workers import serve, wire
from megatron_idempotent.rl.workers.server import Server

TOKEN = bytes(range(32))
ONE, TWO = b"generation-one--", b"generation-two--"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


@contextlib.asynccontextmanager
async def listening(tmp_path, size: int = 2, **more: bytes):
    server = Server(size, TOKEN, **more)
    address = server.listen(f"unix:{tmp_path / 'ranks'}")
    try:
        yield server, address
    finally:
        await server.close()
        assert len(asyncio.all_tasks()) <= 2  # wait_for may run this in a task of its own


def dial(address: str, rank: int, generation: bytes = ONE, token: bytes = TOKEN) -> socket.socket:
    """A rank's side of the introduction."""
    connection = wire.connect(address, 10.0)
    try:
        wire.introduce(connection, token, wire.Hello(generation=generation, rank=rank, pid=7))
    except BaseException:
        connection.close()
        raise
    return connection


async def test_ranks_come_in_any_order_and_are_handed_out_by_rank(tmp_path) -> None:
    async with listening(tmp_path) as (server, address):
        ends = [await asyncio.to_thread(dial, address, rank) for rank in (1, 0)]
        found = await server.complete(10.0)
        assert [each.hello.rank for each in found] == [0, 1]
        for each in (*found,):
            each.shut()
            await each.closed()
        for end in ends:
            assert end.recv(1) == b""
            end.close()


async def test_a_start_is_over_when_ranks_end_before_they_dial_or_the_time_is_up(tmp_path) -> None:
    async with listening(tmp_path, size=1) as (server, address):
        over = asyncio.get_running_loop().create_future()
        assert await server.complete_unless([over], 0.05) is None
        waiting = asyncio.ensure_future(server.complete_unless([over], 10.0))
        await asyncio.sleep(0)
        over.set_result(None)
        assert await waiting is None
        end = await asyncio.to_thread(dial, address, 0)
        still = asyncio.get_running_loop().create_future()
        found = await server.complete_unless([still], 10.0)
        assert found is not None
        assert found[0].hello.rank == 0
        found[0].shut()
        await found[0].closed()
        end.close()


async def test_another_token_is_refused_before_anything_is_unpickled(tmp_path) -> None:
    async with listening(tmp_path, size=1) as (server, address):
        with pytest.raises(wire.WireError, match="another token"):
            await asyncio.to_thread(dial, address, 0, ONE, bytes(32))
        # Pickles in place of an introduction are bytes like others.
        with contextlib.closing(await asyncio.to_thread(wire.connect, address, 10.0)) as rude:
            bad = pickle.dumps({"a": 1}) * 100
            await asyncio.to_thread(rude.sendall, bad[: wire.HELLO.size + wire.PROOF])
            await asyncio.to_thread(wire.receive, rude, wire.GREETING.size)
            with pytest.raises(EOFError):
                await asyncio.to_thread(wire.receive, rude, 1)
        assert "another token" in server.missing()
        with contextlib.closing(await asyncio.to_thread(dial, address, 0)):
            (found,) = await server.complete(10.0)
            found.shut()
            await found.closed()


def test_a_rank_does_not_trust_a_controller_that_lacks_the_token() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(wire.GREETING.pack(wire.MAGIC, bytes(wire.NONCE)))
        theirs.sendall(wire.VERDICT.pack(wire.WELCOME, 0) + bytes(wire.PROOF))
        with pytest.raises(wire.WireError, match="does not know the run's token"):
            wire.introduce(ours, TOKEN, wire.Hello(generation=ONE, rank=0, pid=1))


async def test_one_who_is_not_of_this_start_is_told_why(tmp_path) -> None:
    async with listening(tmp_path) as (server, address):
        first = await asyncio.to_thread(dial, address, 0)
        for rank, says in (
            (0, "there already"),
            (2, "rank 2 of a group of 2"),
            (-2, "rank -2"),
        ):
            with pytest.raises(wire.WireError, match=says):
                await asyncio.to_thread(dial, address, rank)
        second = await asyncio.to_thread(dial, address, 1)
        found = await server.complete(10.0)
        with pytest.raises(wire.WireError, match="earlier start"):
            await asyncio.to_thread(dial, address, 0)
        for each in found:
            each.shut()
            await each.closed()
        first.close()
        second.close()
    async with listening(tmp_path / "..", size=1, expected=TWO) as (server, address):
        with pytest.raises(wire.WireError, match="another start"):
            await asyncio.to_thread(dial, address, 0, ONE)


async def test_a_start_that_loses_a_rank_or_is_overtaken_is_dropped_as_a_whole(tmp_path) -> None:
    async with listening(tmp_path) as (server, address):
        lost = await asyncio.to_thread(dial, address, 0, ONE)
        peer = await asyncio.to_thread(dial, address, 1, b"generation-zero-")
        lost.close()
        new = await asyncio.to_thread(dial, address, 0, TWO)  # drops what waits
        assert await asyncio.to_thread(peer.recv, 1) == b""
        with pytest.raises(asyncio.TimeoutError):
            await server.complete(0.05)
        assert "of 2 ranks rank 0 came" in server.missing()
        new.close()
        peer.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_rank_ends_itself_when_its_connection_breaks_wherever_it_is(tmp_path, busy) -> None:
    program = (
        "import os, sys; from megatron_idempotent.rl.workers import WorkerSpec, serve, wire;"
        f"hello = wire.Hello(generation={ONE!r}, rank=0, pid=os.getpid());"
        f"connection = serve.RankConnection(sys.argv[1], {TOKEN!r}, hello);"
        "connection.serve(WorkerSpec(factory='importlib:import_module', argument='time'))"
    )

    async with listening(tmp_path, size=1) as (server, address):
        command = [sys.executable, "-c", program, address]
        rank = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            (connection,) = await server.complete(20.0)
            kind, _ = await connection.ask(b"M", [])
            assert kind == b"R"
            if busy:
                call = wire.dump(("sleep", (600,)))
                await connection.send(b"C", [len(call).to_bytes(4, "big"), *call])
            connection.shut()
            await connection.closed()
            _, said = await asyncio.to_thread(rank.communicate, timeout=20)
        finally:
            rank.kill()
            rank.wait()
        assert (rank.returncode, "is gone" in said) == (serve.ENDED, True)


def test_importing_the_controllers_side_imports_neither_torch_nor_megatron() -> None:
    program = (
        "import sys, megatron_idempotent.rl.workers as w; w.EmbeddedRanks; w.TorchrunRanks;"
        "from megatron_idempotent.rl.workers import wire; wire.load(wire.dump([1, b'2']));"
        "print([name for name in ('torch', 'megatron', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


async def test_large_buffers_pass_beside_the_pickle_and_are_not_copied(ends) -> None:
    large, small = pickle.PickleBuffer(bytearray(b"x" * (1 << 20))), b"y" * 10
    parts = wire.dump([large, small])
    assert [memoryview(part).nbytes for part in parts[1:]] == [1 << 20]
    large.raw()[0] = ord("z")
    assert bytes(memoryview(parts[1])[:2]) == b"zx"

    sending = asyncio.to_thread(wire.send_frame, ends[0], b"R", [*parts, b""] * 600)
    receiving = asyncio.to_thread(wire.receive_frame, ends[1])
    _, (kind, got) = await asyncio.gather(sending, receiving)
    assert (kind, len(got)) == (b"R", 3 * 600)
    assert got[2] == b""
    assert wire.load(got[-3:-1])[0][:2] == b"zx"


def test_a_head_that_asks_for_too_much_is_refused(ends) -> None:
    ends[0].sendall(wire.HEAD.pack(b"R", wire.MOST_PARTS + 1))
    with pytest.raises(wire.WireError, match="parts"):
        wire.receive_frame(ends[1])
