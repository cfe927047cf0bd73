"""The file by which ranks find a controller, and what must not be trusted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

import pytest

from megatron_idempotent.rl.workers import rendezvous, wire
from megatron_idempotent.rl.workers.rendezvous import ControllerAddress, RendezvousError
from megatron_idempotent.rl.workers.server import Server


def an_address(address: str = "tcp:127.0.0.1:1", **changes: object) -> ControllerAddress:
    fields = {"address": address, "token": "ab" * 32, "node": socket.gethostname(), "pid": 1}
    return ControllerAddress(**{**fields, **changes})


def test_it_is_read_as_it_was_written_and_by_nobody_else(tmp_path) -> None:
    written = an_address(run_id="x")
    written.write(tmp_path / "run")
    assert ControllerAddress.read(tmp_path / "run") == written
    assert (tmp_path / "run" / rendezvous.FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "run").iterdir()] == [rendezvous.FILE]
    an_address(run_id="y").remove(tmp_path / "run")  # another controller's is left alone
    assert ControllerAddress.read(tmp_path / "run") == written
    written.remove(tmp_path / "run")
    assert ControllerAddress.read(tmp_path / "run") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"address": "tcp:1', "not complete"),
        ("", "not complete"),
        ("[]", "list"),
        ("{}", "does not say where"),
        ('{"address": "a", "token": "zz", "node": "n", "pid": 1}', "does not say where"),
    ],
)
def test_one_that_is_cut_short_names_the_file(tmp_path, text, says) -> None:
    path = tmp_path / rendezvous.FILE
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(RendezvousError, match=rf"{rendezvous.FILE} .*{says}.*remove it"):
        ControllerAddress.read(tmp_path)


def test_one_that_others_may_read_or_that_is_a_link_is_not_trusted(tmp_path) -> None:
    an_address().write(tmp_path)
    path = tmp_path / rendezvous.FILE
    path.chmod(0o640)
    with pytest.raises(RendezvousError, match="mode 640"):
        ControllerAddress.read(tmp_path)
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    with pytest.raises(RendezvousError, match="cannot be read"):
        ControllerAddress.read(tmp_path)


def test_one_of_another_user_is_not_trusted(tmp_path, monkeypatch) -> None:
    an_address().write(tmp_path)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(RendezvousError, match=rf"of user {other - 1}, and this is user {other}"):
        ControllerAddress.read(tmp_path)


def test_an_exit_code_is_of_one_run_id(tmp_path) -> None:
    assert rendezvous.exit_code(tmp_path, "a") is None
    rendezvous.write_private(tmp_path / rendezvous.EXIT_FILE, {"run_id": "a", "code": 3})
    assert rendezvous.exit_code(tmp_path, "a") == 3
    assert rendezvous.exit_code(tmp_path, "b") is None
    assert json.loads((tmp_path / rendezvous.EXIT_FILE).read_text())["code"] == 3


async def test_a_controller_answers_only_where_it_is_and_knows_the_token() -> None:
    token = wire.new_token()
    server = Server(1, token)
    address = server.listen("tcp:127.0.0.1:0")
    good = an_address(address, token=token.hex())
    other = an_address(address, token=wire.new_token().hex())
    assert await asyncio.to_thread(good.answers)
    assert not await asyncio.to_thread(other.answers)
    await server.close()
    assert not await asyncio.to_thread(good.answers)


def test_a_controller_that_lives_and_is_silent_is_not_given_a_second_one(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_PROBE_S", 0.2)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = f"tcp:127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RendezvousError, match=f"process id {os.getpid()} does not answer"):
            an_address(address, pid=os.getpid()).answers()
        assert not an_address(address, pid=_dead_pid()).answers()


def _dead_pid() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not Path(f"/proc/{pid}").exists()
    return pid
