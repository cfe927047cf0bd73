"""Ranks of a real torchrun: the contract with a controller in this process, and whole lives."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from contract_ranks import MakeRanks, RankContract, path_for_ranks
from contract_worker import FACTORY

from megatron_idempotent.rl.workers import RanksLost, TorchrunRanks, WorkerSpec, torchrun
from megatron_idempotent.rl.workers.torchrun import ControllerAddress, RendezvousError, TorchrunRank

HERE = Path(__file__).parent


def start_torchrun(directory: Path, *command: str, restarts: int = 3) -> subprocess.Popen[bytes]:
    """Two ranks, and what they print in a file."""
    with (directory / "torchrun.log").open("ab") as log:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
                *("--standalone", f"--max-restarts={restarts}", "--monitor-interval=0.1"),
                *(str(HERE / "torchrun_rank_program.py"), FACTORY, json.dumps({"lr": 0.5})),
                *(str(directory), *command),
            ],
            env={**os.environ, "PYTHONPATH": path_for_ranks(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="class")
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the ranks of a class, and end them after it."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        end(process)


@pytest.fixture(scope="class")
def make_ranks(tmp_path_factory, started) -> MakeRanks:
    """torchrun is started when the controller listens, so that rank 0 finds it."""

    def make(spec: Any, size: int) -> TorchrunRanks:
        assert (spec.factory, size) == (FACTORY, 2)
        directory = tmp_path_factory.mktemp("torchrun")
        ranks = TorchrunRanks(size, directory, start_timeout_s=180.0)

        def when_it_listens() -> None:
            waiting = threading.Event()
            while not (directory / "controller.json").exists():
                waiting.wait(0.02)
            started.append(start_torchrun(directory))

        threading.Thread(target=when_it_listens, daemon=True).start()
        return ranks

    return make


class TestTorchrun(RankContract):
    """One start. Ranks that are lost and come again are in the test below."""

    test_a_rank_that_dies_while_idle_is_noticed_and_all_others_end = None
    test_a_rank_that_dies_leaves_nobody_in_a_collective = None
    test_a_rank_that_dies_in_a_call_loses_that_call_and_those_behind = None
    test_ranks_that_do_not_answer_in_time_are_ended = None
    test_calls_before_the_start_and_behind_the_end_say_so = None
    test_ranks_are_ended_by_close_and_twice_is_fine = None

    def test_sigterm_at_torchrun_is_the_controllers_to_answer(self, ranks, run, started) -> None:
        async def scenario() -> None:
            loop, told = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(signal.SIGTERM, told.set)
            try:
                started[0].send_signal(signal.SIGTERM)
                await told.wait()
                assert await ranks.call("add_up", 1.0) == [3.0, 3.0]
                await ranks.close()
            finally:
                loop.remove_signal_handler(signal.SIGTERM)

        run(scenario())


# With the third restart torchrun asks a last controller, which has nothing left to do.
@pytest.mark.parametrize(
    ("restarts", "ends_with"), [(2, 1), pytest.param(3, 0, marks=pytest.mark.exhaustive)]
)
def test_a_run_outlives_controllers_and_ranks_and_ends_as_the_last_controller(
    tmp_path, restarts, ends_with
) -> None:
    program = [sys.executable, str(HERE / "torchrun_controller_program.py"), str(tmp_path)]
    process = start_torchrun(tmp_path, *program, restarts=restarts)
    try:
        code = process.wait(timeout=120)
    finally:
        end(process)
    log = (tmp_path / "torchrun.log").read_text()
    assert code == ends_with, log
    said = (tmp_path / "said").read_text().splitlines()
    controllers = {line for line in said if line.startswith("controller")}
    assert len(controllers) == restarts
    lost = [line for line in said if line.startswith("rank 1 was lost in die_in_collective()")]
    assert len(lost) == 1
    assert [line for line in said if line not in {*controllers, *lost}] == [
        "sum [3.0, 3.0]",
        "sum [3.0, 3.0]",
        "sum [5.0, 5.0]",
    ]
    assert "(exitcode: 3)" in log  # after the goodbye: the ranks ended as their controller
    assert not (tmp_path / "controller.json").exists()
    left = json.loads((tmp_path / "controller-exit.json").read_text())
    assert left["code"] == (0 if restarts == 3 else 3)


@pytest.fixture
def rank_0(tmp_path, monkeypatch) -> Callable[..., TorchrunRank]:
    """A rank 0 that looks for its controller, without torch."""
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of a rank, not of a controller")
    spec = WorkerSpec(factory=FACTORY)
    return lambda *command, timeout_s=30.0: TorchrunRank(spec, tmp_path, command, timeout_s)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ((sys.executable, "-c", "raise SystemExit(4)"), r"code 4 before it listened.*SystemExit"),
        (("/no/such/program",), "exit code 127"),
        ((), "by hand"),
    ],
)
def test_a_controller_that_does_not_come_is_an_error(rank_0, command, says) -> None:
    with pytest.raises(RendezvousError, match=says):
        rank_0(*command, timeout_s=30.0 if command else 0.1)._find()


def test_a_controller_with_nothing_left_to_do_ends_the_ranks_well(rank_0) -> None:
    program = (
        "import os, sys; sys.exit('WORLD_SIZE' in os.environ or 'TORCHELASTIC' in str(os.environ))"
    )
    assert rank_0(sys.executable, "-c", program)._find() is None


def run_without_work(directory: str) -> int:
    """Runs on a rank, as torchrun starts it; returns the exit code where the controller ends at
    once."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(port)}
    nothing = (sys.executable, "-c", "import time; time.sleep(0.2)")
    return TorchrunRank(WorkerSpec(factory=FACTORY), Path(directory), nothing, 30.0).run()


def test_ranks_whose_controller_has_nothing_left_to_do_end_well(megatron_ranks, tmp_path) -> None:
    assert megatron_ranks(1, run_without_work, str(tmp_path)) == [0]


@pytest.mark.parametrize(("number", "code"), [(None, 5), (signal.SIGTERM, 7)])
def test_a_controllers_end_is_filed_and_signals_reach_it(tmp_path, number, code) -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"open({str(tmp_path / 'up')!r}, 'w').close()\n"
        f"time.sleep({0 if number is None else 60})\n"
        "sys.exit(5)"
    )
    process = torchrun.start(tmp_path, "life", [sys.executable, "-c", program])
    try:
        while not (tmp_path / "up").exists():
            assert process.poll() is None
            time.sleep(0.01)
        if number is not None:
            process.send_signal(number)
        assert process.wait(timeout=20) == code
    finally:
        process.kill()
        process.wait()
    assert torchrun.exit_code(tmp_path, "life") == code
    assert torchrun.exit_code(tmp_path, "another") is None


def an_address(address: tuple[str, int] = ("127.0.0.1", 1), **changes: Any) -> ControllerAddress:
    fields = {"address": address, "token": "ab" * 32, "node": socket.gethostname(), "pid": 1}
    return ControllerAddress(**{**fields, **changes})


def kept(directory: Path, text: str, mode: int = 0o600) -> Path:
    path = directory / torchrun.FILE
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ('{"address": ["a', 0o600, "not complete.*remove it"),
        ("", 0o600, "not complete.*remove it"),
        ("[]", 0o600, "holds list.*remove it"),
        ("{}", 0o600, "does not say where.*remove it"),
        ('{"address": ["a", 1], "token": "zz", "node": "n", "pid": 1}', 0o600, "does not say"),
        ("{}", 0o640, "mode 640"),
    ],
)
def test_an_address_that_is_cut_short_or_open_to_others_is_not_trusted(
    tmp_path, text, mode, says
) -> None:
    path = kept(tmp_path, text, mode)
    with pytest.raises(RendezvousError, match=rf"{torchrun.FILE} .*{says}"):
        ControllerAddress.read(tmp_path)
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    with pytest.raises(RendezvousError, match="cannot be read"):
        ControllerAddress.read(tmp_path)


def test_an_address_of_another_user_is_not_trusted(tmp_path, monkeypatch) -> None:
    kept(tmp_path, "{}")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(RendezvousError, match=rf"of user {other - 1}, and this is user {other}"):
        ControllerAddress.read(tmp_path)


async def test_a_controller_is_found_where_it_is_until_it_closes_and_says_who_came(
    tmp_path,
) -> None:
    ranks = TorchrunRanks(2, tmp_path, start_timeout_s=0.05)
    with pytest.raises(RanksLost, match=r"of 2 ranks none came within 0.05 s.*--max-restarts"):
        await ranks.start()
    found = ControllerAddress.read(tmp_path)
    assert found is not None
    assert (tmp_path / torchrun.FILE).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [torchrun.FILE]
    other = an_address(found.address, token="cd" * 32)
    assert await asyncio.to_thread(other.begin) is None
    await ranks.close()
    assert await asyncio.to_thread(found.begin) is None
    assert ControllerAddress.read(tmp_path) is None


async def test_the_address_of_another_controller_is_left_alone(tmp_path) -> None:
    ranks = TorchrunRanks(1, tmp_path, start_timeout_s=0.05)
    with pytest.raises(RanksLost):
        await ranks.start()
    other = an_address(run_id="y")
    torchrun.write_private(tmp_path / torchrun.FILE, dataclasses.asdict(other))
    await ranks.close()
    assert ControllerAddress.read(tmp_path) == other


def test_a_controller_that_lives_and_is_silent_is_not_given_a_second_one(monkeypatch) -> None:
    monkeypatch.setattr(torchrun, "_PROBE_S", 0.2)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent:
        address = silent.getsockname()
        with pytest.raises(RendezvousError, match=f"process id {os.getpid()} does not answer"):
            an_address(address, pid=os.getpid()).begin()
        dead = subprocess.Popen(["true"])
        dead.wait()
        assert an_address(address, pid=dead.pid).begin() is None
