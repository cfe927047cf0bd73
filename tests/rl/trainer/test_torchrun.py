"""The command on ranks that a real torchrun starts: the bits of a run that starts its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")  # comes with the extra `trainer`

import kill_points
import recovery_command
from listeners import rows_of_torchrun, table, watched
from trainer_cases import SYNC, TIMEOUT_S, digest, job_for, needs_megatron_training, rows

from megatron_idempotent.rl.trainer import loop, output
from megatron_idempotent.rl.trainer.main import main

pytestmark = [pytest.mark.full, needs_megatron_training]
LAST = 4
SMALL = (*SYNC, f"run.rollouts={LAST}", "run.checkpoint_every=1", "evaluation.every=2")
OPTIONS = [word for setting in SMALL for word in ("--set", setting)]


class Started:
    """A torchrun with two ranks, and what all of them have printed."""

    def __init__(self, folder, *arguments):
        self._log = folder / "torchrun.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node=2", "--monitor-interval=0.1"),
                    *("-m", "megatron_idempotent", "train", *arguments),
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def said(self):
        return self._log.read_text()

    def until(self, happened):
        """Wait for something; fail with what was printed if torchrun ends, or nothing happens."""
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := happened()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                code = self.process.poll()
                pytest.fail(f"torchrun: {code=} after {TIMEOUT_S:g} s at most:\n{self.said()}")
            time.sleep(0.01)
        return found

    def ranks(self):
        """The process ids of the ranks, by rank."""
        found = {}
        for pid in kill_points.descendants(self.process.pid):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes()
                if rank := re.search(rb"\0RANK=(\d+)\0", environ):
                    found[int(rank[1])] = pid
        return found

    def ended(self):
        """The exit code, once torchrun has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(TIMEOUT_S)
        pytest.fail(f"torchrun goes on after {TIMEOUT_S:g} s:\n{self.said()}")


@pytest.fixture
def torchrun(tmp_path):
    """`torchrun(*arguments)` starts one; it is ended after the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            started = Started(tmp_path, *arguments)
            stack.callback(started.process.wait)
            stack.callback(started.process.kill)  # its ranks end with it
            return started

        yield start


@pytest.fixture
def forked(megatron_rank_pool, tmp_path):
    """`forked(*arguments, restarts=0)` returns the exit code of a torchrun, and what it printed.

    It and its ranks are forked, which saves them imports of 20 s.
    """

    def run(*arguments, restarts=0):
        said, folder = tmp_path / "said", str(tmp_path)
        start = recovery_command.train_under_torchrun
        (code,) = megatron_rank_pool.run(
            *(1, start, list(arguments), str(said), restarts, folder),
            distributed=False,
            timeout_s=TIMEOUT_S,
        )
        return code, said.read_text()

    return run


@pytest.fixture(scope="module")
def embedded(megatron_rank_pool, tmp_path_factory):
    """The job of a run that nothing disturbs, on ranks of this session's pool."""
    job = job_for(tmp_path_factory.mktemp("embedded") / "run", *SMALL)
    megatron_rank_pool.run(2, loop.work, job, timeout_s=TIMEOUT_S)
    return job


def check(out, embedded):
    """Compare a run under torchrun with the one that started its ranks, bit by bit."""
    job = output.Job(config=embedded.config, out=out)
    assert rows(job) == rows(embedded)
    assert digest(job, LAST) == digest(embedded, LAST)
    model = "model/model.safetensors"
    assert (out / model).read_bytes() == (embedded.out / model).read_bytes()


def test_a_run_has_the_bits_of_one_that_starts_its_own_ranks(torchrun, embedded, tmp_path):
    with watched() as seen:
        started = torchrun(*OPTIONS)
        ranks = started.until(lambda: len(found := started.ranks()) == 2 and found)
        assert started.ended() == 0, started.said()
    assert rows_of_torchrun(seen, started.process.pid, ranks.values()) == table("torchrun")
    out = tmp_path / "runs" / "train-001"
    check(out, embedded)
    # One of them speaks, of one run.
    assert not out.with_name("train-002").exists()
    phases = ("checking settings", "starting 2 ranks", "building the model")
    for told in (*phases, "held-out reward at the end"):
        assert started.said().count(told) == 1, started.said()
    for name in ("curves.png", "config.toml", "logs/rank-0.log", "logs/rank-1.log"):
        assert (out / name).stat().st_size > 0


def test_ranks_that_fail_are_started_again_and_the_run_goes_on(forked, embedded, tmp_path):
    out = tmp_path / "run"
    (tmp_path / "verifier.py").write_text(
        "import os\n"
        "from megatron_idempotent.rl.trainer.task.reward import position_reward\n"
        "def broken_once(response, answer, *, finished):\n"
        "    if os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] == '10':\n"
        "        raise ValueError('a bug of mine')\n"
        "    return position_reward(response, answer, finished=finished)\n"
    )
    # The words of a restart are those of the first start, when there is nothing to resume.
    again = ["--resume", "--out", str(out), "--set", "task.reward=verifier:broken_once"]
    code, said = forked(*OPTIONS, *again, restarts=1)
    assert code == 0, said
    log = out / "logs" / "rank-1.log"
    told = f"rank 1 failed; what it printed is in {log}\ncontinue with --resume --out {out}\n"
    assert "ValueError: a bug of mine" in said
    assert told in said
    assert said.count("building the model") == 2, said
    check(out, embedded)


def test_ranks_end_with_their_torchrun(torchrun):
    started = torchrun(*OPTIONS, "--rollouts", "1000")
    started.until(lambda: "building the model" in started.said())
    ranks = started.ranks()
    assert sorted(ranks) == [0, 1]
    started.process.kill()
    deadline = time.monotonic() + 10
    while alive := [pid for pid in ranks.values() if kill_points.alive(pid)]:
        if time.monotonic() > deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"ranks go on without torchrun: {alive}")
        time.sleep(0.01)


def test_ranks_that_cannot_run_end_with_2_and_the_reason(torchrun):
    started = torchrun("--async")
    assert started.ended() == 1
    before, _, _ = started.said().partition("Traceback")  # torchrun's own
    assert "(exitcode: 2)" in before
    assert "starts its ranks itself: leave torchrun out, and use --cluster ray" in before


def test_a_run_that_takes_too_long_is_ended_with_its_stacks(forked):
    code, said = forked(*OPTIONS, "--set", "run.timeout_s=0.5")
    assert code == 1
    assert "run.timeout_s is 0.5 s; raise it with --set run.timeout_s=…" in said
    assert "most recent call first" in said


_OTHERS = "and torchrun has started 2 (WORLD_SIZE); start as many"


@pytest.mark.parametrize(
    ("rank", "arguments", "message"),
    [
        (0, ["--async"], "run.mode is 'async', and torchrun has started this process; an asynch"),
        (1, ["--async"], "run.mode is 'async', and torchrun has started this process; an asynch"),
        (0, ["--ranks", "4"], f"run.ranks is 4, {_OTHERS}"),
        (1, ["--config", "mine.toml"], f"run.ranks is 4, {_OTHERS}"),
        (0, ["--resume"], "runs: no run to resume; name its directory with --out"),
        (0, ["--resume", "--out", "foreign"], "foreign: neither a complete checkpoint nor the con"),
    ],
)
def test_what_torchrun_cannot_run_is_told(rank, arguments, message, tmp_path, monkeypatch, capsys):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("[run]\nranks = 4\n")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file").touch()
    assert main([*arguments, "--quiet"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {message}")
    assert told.count("\n") == 1
