"""Asking a run where it stands, over its socket, whatever other clients do."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import sys

import pytest

pytest.importorskip("torch")  # the records of the engines are imported with it

from status_cases import status

from megatron_idempotent.controller.ping import SOCKET_FILE, PingError, PingServer, ask

DEADLINE_S = 30.0


async def answer():
    return status()


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, DEADLINE_S))


async def asked(path):
    """The client is synchronous, so it asks from a thread."""
    return await asyncio.get_running_loop().run_in_executor(None, ask, path, DEADLINE_S)


@contextlib.asynccontextmanager
async def client(path):
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def left_behind(path):
    """The file of a process that was killed."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))


def test_the_answer_is_the_status_and_the_socket_is_the_users_alone(tmp_path):
    path = tmp_path / SOCKET_FILE

    async def scenario():
        previous = os.umask(0)
        try:
            async with PingServer(answer, path):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
                return await asked(path)
        finally:
            os.umask(previous)

    told = run(scenario())
    assert (told["state"], told["trainer_version"], told["idle_s"]) == ("running", 12, 0.25)
    assert told["counts"]["submitted"] == 61
    assert not path.exists()


def test_a_connection_gets_an_answer_per_line_also_behind_garbage(tmp_path):
    path = tmp_path / SOCKET_FILE

    async def scenario():
        async with PingServer(answer, path), client(path) as (reader, writer):
            writer.write(b"ping\nGET / HTTP/1.1\n\xff\xfe\n\nping\r\n")
            return [json.loads(await reader.readline()) for _ in range(5)]

    first, http, bytes_, empty, last = run(scenario())
    assert first == last
    assert first["trainer_version"] == 12
    assert http == {"error": "asked 'GET / HTTP/1.1'; allowed: ping"}
    assert "allowed: ping" in bytes_["error"]
    assert "asked ''" in empty["error"]


def test_a_line_without_an_end_is_told_and_let_go(tmp_path):
    path = tmp_path / SOCKET_FILE

    async def scenario():
        async with PingServer(answer, path), client(path) as (reader, writer):
            writer.write(b"x" * (1 << 17))
            told = json.loads(await reader.readline())
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            assert (await asked(path))["trainer_version"] == 12
            return told

    assert run(scenario()) == {"error": "that line is too long"}


def test_clients_that_say_nothing_or_do_not_read_hold_up_no_other(tmp_path):
    path = tmp_path / SOCKET_FILE

    async def scenario():
        async with PingServer(answer, path), contextlib.AsyncExitStack() as clients:
            for _ in range(50):
                await clients.enter_async_context(client(path))
            _, deaf = await clients.enter_async_context(client(path))
            deaf.write(b"ping\n" * 20_000)
            answers = await asyncio.gather(*(asked(path) for _ in range(20)))
        return {each["trainer_version"] for each in answers}

    assert run(scenario()) == {12}


def test_a_silent_client_is_let_go_after_its_time(tmp_path):
    path = tmp_path / SOCKET_FILE

    async def scenario():
        async with PingServer(answer, path, idle_s=0.01), client(path) as (reader, _):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""

    run(scenario())


def test_a_client_has_its_whole_time_again_for_every_line(tmp_path, monkeypatch):
    path = tmp_path / SOCKET_FILE
    limits = []

    async def scenario():
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def remembered(delay, *args, **kwargs):
            handle = later(delay, *args, **kwargs)
            limits.extend([handle] if delay == 1_234.0 else [])
            return handle

        monkeypatch.setattr(loop, "call_later", remembered)
        async with PingServer(answer, path, idle_s=1_234.0), client(path) as (reader, writer):
            for asked_so_far in (1, 2, 3):
                writer.write(b"ping\n")
                await reader.readline()
                assert [each.cancelled() for each in limits[:asked_so_far]] == [True] * asked_so_far

    run(scenario())
    assert all(each.cancelled() for each in limits)


def test_closing_lets_every_client_go_and_leaves_no_task(tmp_path):
    path = tmp_path / SOCKET_FILE

    async def scenario():
        before = asyncio.all_tasks()
        server = PingServer(answer, path)
        await server.start()
        async with client(path) as (reader, deaf):
            deaf.write(b"ping\n" * 20_000)
            await reader.readline()
            await server.close()
            await server.close()
            assert asyncio.all_tasks() == before
        with pytest.raises(PingError, match="no controller listens"):
            ask(path)

    run(scenario())


def test_a_ping_that_raises_is_told_and_the_next_one_is_answered(tmp_path):
    path = tmp_path / SOCKET_FILE
    broken = [RuntimeError("not yet")]

    async def sometimes():
        if broken:
            raise broken.pop()
        return status()

    async def scenario():
        async with PingServer(sometimes, path):
            with pytest.raises(PingError, match="ping raised RuntimeError: not yet"):
                await asked(path)
            return await asked(path)

    assert run(scenario())["trainer_version"] == 12


def test_the_socket_of_a_dead_process_is_replaced_and_one_in_use_is_not(tmp_path):
    path = tmp_path / SOCKET_FILE
    left_behind(path)
    with pytest.raises(PingError, match=r"the controller that listened at .* is dead"):
        ask(path)

    async def scenario():
        async with PingServer(answer, path):
            with pytest.raises(PingError, match="another controller of that run does"):
                await PingServer(answer, path).start()
            return await asked(path)

    assert run(scenario())["trainer_version"] == 12


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / SOCKET_FILE
    path.write_text("mine")
    with pytest.raises(PingError, match="it is there and is no socket"):
        run(PingServer(answer, path).start())
    assert path.read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="long paths go through /proc")
def test_a_path_that_is_longer_than_the_system_takes_works_the_same(tmp_path):
    directory = tmp_path.joinpath(*["a-directory-with-a-long-name"] * 6)
    directory.mkdir(parents=True)
    path = directory / SOCKET_FILE
    assert len(os.fsencode(path)) > 150

    async def scenario():
        for _ in range(2):
            async with PingServer(answer, path):
                assert path.is_socket()
                with pytest.raises(PingError, match="another controller"):
                    await PingServer(answer, path).start()
                told = await asked(path)
        return told

    before = set(os.listdir("/proc/self/fd"))
    assert run(scenario())["trainer_version"] == 12
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the listing's own
    assert not path.exists()


def test_a_directory_that_takes_no_socket_is_told(tmp_path):
    with pytest.raises(PingError, match=r"cannot listen at .*No such file or directory"):
        run(PingServer(answer, tmp_path / "absent" / SOCKET_FILE).start())
    with pytest.raises(PingError, match=r"cannot ask the controller at .*too long"):
        ask(tmp_path / ("x" * 200))


def test_a_controller_that_is_stopped_is_told_in_time(tmp_path):
    path = tmp_path / SOCKET_FILE
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(path))
        stopped.listen(0)
        with pytest.raises(PingError, match=r"did not answer in 0\.05 s"):
            ask(path, 0.05)
        # That connection is still in the queue, which is full by now.
        with pytest.raises(PingError, match=r"did not answer in 0\.05 s"):
            ask(path, 0.05)


def test_a_stranger_behind_the_socket_is_told(tmp_path):
    path = tmp_path / SOCKET_FILE

    async def stranger(reader, writer):
        await reader.readline()
        writer.write(b"hello\n")
        writer.close()

    async def scenario():
        server = await asyncio.start_unix_server(stranger, path=str(path))
        with pytest.raises(PingError, match=r"answers without a status: b'hello\\n'"):
            await asked(path)
        server.close()
        await server.wait_closed()

    run(scenario())
