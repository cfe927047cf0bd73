"""Ranks are let in by their token, and connections survive faults; both ends are real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
import sys

import pytest

from megatron_idempotent.rl.workers import wire
from megatron_idempotent.rl.workers.socket_ranks import Server

TOKEN = bytes(range(32))


@contextlib.asynccontextmanager
async def listening(tmp_path, size: int = 2):
    server = Server(size, TOKEN)
    address = server.listen(str(tmp_path / "ranks"))
    try:
        yield server, address
    finally:
        await server.close()
        assert len(asyncio.all_tasks()) <= 2  # wait_for may run this in a task of its own


async def dial(
    address: wire.Address, rank: int, generation: str | None = "", token: bytes = TOKEN
) -> tuple[socket.socket, str]:
    """A rank's side of the introduction: the connection, and the start that it belongs to."""

    def introduced() -> tuple[socket.socket, str]:
        connection = wire.connect(address, 10.0)
        try:
            hello = wire.Hello(generation=generation, rank=rank, pid=7)
            return connection, wire.introduce(connection, token, hello, 10.0)
        except BaseException:
            connection.close()
            raise

    return await asyncio.to_thread(introduced)


async def until_refused(server: Server, why: str) -> None:
    while why not in server.missing():
        await asyncio.sleep(0.01)


async def is_shut(end: socket.socket) -> bool:
    with end:
        return await asyncio.to_thread(end.recv, 1) == b""


async def test_ranks_come_in_any_order_once_and_are_handed_out_by_rank(tmp_path) -> None:
    async with listening(tmp_path) as (server, address):
        first, _ = await dial(address, 1)
        refused = [
            (1, "", "rank 1 is there already"),
            (2, "", "rank 2 of a group of 2"),
            (-1, None, "rank -1"),
            (0, "another", "it belongs to another start"),
        ]
        for rank, generation, says in refused:
            with pytest.raises(wire.WireError, match=says):
                await dial(address, rank, generation)
        assert "of 2 ranks rank 1 came; last refused: rank 0: it belongs" in server.missing()
        second, _ = await dial(address, 0)
        found = await server.complete(10.0)
        assert [each.hello.rank for each in found] == [0, 1]
        with pytest.raises(wire.WireError, match="another start"):
            await dial(address, 0)
        server.drop(found)
        assert await is_shut(first)
        assert await is_shut(second)


async def test_a_start_is_over_when_ranks_end_before_they_dial_or_the_time_is_up(tmp_path) -> None:
    async with listening(tmp_path, size=1) as (server, address):
        over = asyncio.get_running_loop().create_future()
        assert await server.complete(0.05, [over]) is None
        waiting = asyncio.ensure_future(server.complete(10.0, [over]))
        await asyncio.sleep(0)
        over.set_result(None)
        assert await waiting is None
        end, _ = await dial(address, 0)
        (found,) = await server.complete(10.0)
        assert found.hello.rank == 0
        server.drop([found])
        end.close()


async def test_another_token_is_refused_before_anything_is_unpickled(tmp_path) -> None:
    async with listening(tmp_path, size=1) as (server, address):
        with pytest.raises(wire.WireError, match="another token"):
            await dial(address, 0, token=bytes(32))
        await until_refused(server, "one with another token")
        # Pickles in place of an introduction are bytes like others; nor does silence hold it up.
        silent = await asyncio.to_thread(wire.connect, address, 10.0)
        with contextlib.closing(await asyncio.to_thread(wire.connect, address, 10.0)) as rude:
            rude.sendall(pickle.dumps({"a": 1}) * 100)
            with contextlib.suppress(ConnectionResetError):
                while await asyncio.to_thread(rude.recv, 1 << 16):
                    pass
        end, _ = await dial(address, 0)
        server.drop(await server.complete(10.0))
        end.close()
    assert silent.recv(1 << 16)  # the challenge, and then the end
    assert await is_shut(silent)


async def test_one_who_says_nothing_is_given_up(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(wire, "PROOF_S", 0.05)
    async with listening(tmp_path, size=1) as (server, address):
        with contextlib.closing(await asyncio.to_thread(wire.connect, address, 10.0)) as silent:
            while await asyncio.to_thread(silent.recv, 1 << 16):
                pass
        await until_refused(server, "one who did not introduce itself")


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"\0\0\0\x30#CHALLENGE#{sha256}" + bytes(29), "does not know the run's token"),
        (b"\0\0\0\x07HTTP OK", "another program listens there"),
    ],
)
def test_a_rank_does_not_trust_a_controller_that_lacks_the_token(sent, says) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent + b"\0\0\0\x09#WELCOME#" + b"\0\0\0\x20" + bytes(32))
        with pytest.raises(wire.WireError, match=says):
            wire.introduce(ours, TOKEN, wire.Hello(rank=0, pid=1), 10.0)


async def test_a_start_that_loses_a_rank_or_is_overtaken_is_dropped_as_a_whole(tmp_path) -> None:
    async with listening(tmp_path) as (server, address):
        lost, old = await dial(address, 0, None)
        peer, _ = await dial(address, 1, old)
        server.drop(await server.complete(10.0))  # it had begun, and torchrun starts ranks again
        lost.close()
        with pytest.raises(wire.WireError, match="another start"):
            await dial(address, 1, old)
        early, first = await dial(address, 0, None)
        new, second = await dial(address, 0, None)  # drops what waits
        assert await is_shut(early)
        with pytest.raises(wire.WireError, match="another start"):
            await dial(address, 1, first)
        other, _ = await dial(address, 1, second)
        server.drop(await server.complete(10.0))
        third, _ = await dial(address, 0, None)
        third.close()
        await until_refused(server, "rank 0 came and was lost again")
        assert "of 2 ranks none came" in server.missing()
        for each in (peer, new, other):
            each.close()


@pytest.mark.parametrize("busy", [False, True])
async def test_a_rank_ends_itself_when_its_connection_breaks_wherever_it_is(tmp_path, busy) -> None:
    program = (
        "import sys; from megatron_idempotent.rl.workers import WorkerSpec, wire;"
        f"connection = wire.RankConnection(sys.argv[1], {TOKEN!r}, 0);"
        "connection.serve(WorkerSpec(factory='importlib:import_module', argument='time'))"
    )

    async with listening(tmp_path, size=1) as (server, address):
        command = [sys.executable, "-c", program, address]
        rank = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            (connection,) = await server.complete(20.0)
            kind, _ = await connection.ask(wire.MAKE, [])
            assert kind == wire.RESULT
            if busy:
                call = wire.dump(("sleep", (600,)))
                await connection.send(wire.CALL, [len(call).to_bytes(4, "big"), *call])
            server.drop([connection])
            _, said = await asyncio.to_thread(rank.communicate, timeout=20)
        finally:
            rank.kill()
            rank.wait()
        assert (rank.returncode, "is gone" in said) == (wire.ENDED, True)


async def test_large_buffers_pass_beside_the_pickle_and_are_not_copied() -> None:
    large, small = pickle.PickleBuffer(bytearray(b"x" * (1 << 20))), b"y" * 10
    parts = wire.dump([large, small])
    assert [memoryview(part).nbytes for part in parts[1:]] == [1 << 20]
    large.raw()[0] = ord("z")
    assert bytes(memoryview(parts[1])[:2]) == b"zx"

    frame = [*parts, b""] * 600
    assert all(one is other for one, other in zip(wire.packed(b"R", frame)[1:], frame, strict=True))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sending = asyncio.to_thread(wire.send_frame, ours, b"R", frame)
        _, (kind, got) = await asyncio.gather(
            sending, asyncio.to_thread(wire.receive_frame, theirs)
        )
    assert (kind, len(got)) == (b"R", 3 * 600)
    assert got[2] == b""
    assert wire.load(got[-3:-1])[0][:2] == b"zx"
