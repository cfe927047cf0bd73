"""`megatron-idempotent ping`, against a run in another thread's event loop."""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading

import pytest

pytest.importorskip("torch")  # the records of the engines are imported with it

from status_cases import status

from megatron_idempotent.cli.ping import main
from megatron_idempotent.rl.controller.status_file import STATUS_FILE, StatusFile
from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, JsonlLogger

DEADLINE_S = 30.0


@contextlib.contextmanager
def running(directory, answers):
    """A run that writes one status after the other, and stays at the last."""
    left = list(answers)

    async def ping():
        return left.pop(0) if len(left) > 1 else left[0]

    directory.mkdir(parents=True, exist_ok=True)
    ready, done = threading.Event(), threading.Event()

    async def serve():
        async with StatusFile(ping, directory / STATUS_FILE, every_s=0.1):
            ready.set()
            await asyncio.get_running_loop().run_in_executor(None, done.wait, DEADLINE_S)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(DEADLINE_S)
        yield
    finally:
        done.set()
        thread.join(DEADLINE_S)


def test_a_run_is_asked_once_and_told_with_its_last_metrics(tmp_path, capsys):
    logger = JsonlLogger(tmp_path / METRICS_FILE)
    logger.log({"train/reward": 0.2, "rollouts/wasted_fraction": 0.5}, step=11)
    logger.log({"train/reward": 0.4}, step=12)
    logger.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 13, "train/rew')  # being written
    with running(tmp_path, [status()]):
        assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "version     12, engines serve 11\n" in shown
    assert "reward      0.400  loss –\n" in shown
    assert "wasted 50%" in shown


def test_only_the_end_of_a_long_metrics_file_is_read(tmp_path, capsys):
    rows = [json.dumps({"step": n, "train/reward": n / 1e6, "x" * 500: 0}) for n in range(1_000)]
    (tmp_path / METRICS_FILE).write_text("not JSON\n" + "\n".join(rows) + "\n")
    with running(tmp_path, [status()]):
        assert main([str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "reward      0.001" in told.out
    assert told.err == ""


def test_as_json_the_answer_is_the_status(tmp_path, capsys):
    with running(tmp_path, [status()]):
        assert main([str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["submitted"] == 61


def test_a_run_is_watched_until_it_has_ended(tmp_path, capsys):
    stages = [status(), status(trainer_version=13), status(trainer_version=13, state="ended")]
    with running(tmp_path, stages):
        assert main([str(tmp_path), "--watch", "--json", "--every", "0.01"]) == 0
    shown = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    assert shown[-1] == dataclasses.asdict(stages[-1])
    assert [row["state"] for row in shown[:-1]] == ["running"] * (len(shown) - 1)
    (tmp_path / STATUS_FILE).unlink()
    with running(tmp_path, stages):
        assert main([str(tmp_path), "--watch", "--every", "0.01"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("version 13 (")


def test_a_run_that_vanishes_while_it_is_watched_ends_the_watching(tmp_path, capsys, monkeypatch):
    with running(tmp_path, [status()]):
        pass
    # The first pause between two looks is when it goes away.
    monkeypatch.setattr("time.sleep", lambda _: (tmp_path / STATUS_FILE).unlink())
    assert main([str(tmp_path), "--watch"]) == 0
    told = capsys.readouterr()
    assert told.out.count("version 12") == 1
    assert "is not there" in told.err


def test_a_run_whose_status_grows_old_is_watched_on(tmp_path, capsys, monkeypatch):
    file, pauses = tmp_path / STATUS_FILE, []
    with running(tmp_path, [status()]):
        pass

    def pause(_):
        pauses.append(file.exists())
        if len(pauses) == 1:
            os.utime(file, (1_000, 1_000))
        else:
            file.unlink()

    monkeypatch.setattr("time.sleep", pause)
    assert main([str(tmp_path), "--watch", "--timeout", "1"]) == 0
    told = capsys.readouterr().err
    assert "was killed, is stopped, or its event loop is blocked" in told
    assert "is not there" in told


def test_without_a_status_the_exit_code_is_1_and_without_a_run_2(tmp_path, capsys, monkeypatch):
    assert main([str(tmp_path)]) == 1
    assert main([str(tmp_path), "--watch"]) == 1
    assert capsys.readouterr().err.count("is not there: the run has not begun") == 2
    assert main([str(tmp_path / "absent")]) == 2
    assert "absent: no such directory" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    assert "runs: no run has a status there; name the run" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--every", "0"])
    assert ended.value.code == 2


def test_without_a_name_it_is_the_run_whose_status_is_the_newest(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    older, newer = tmp_path / "runs" / "b", tmp_path / "runs" / "a"
    for folder, version in ((newer, 7), (older, 3)):
        with running(folder, [status(trainer_version=version)]):
            pass
    os.utime(older / STATUS_FILE, (1_000, 1_000))
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trainer_version"] == 7


def test_what_watches_a_run_needs_no_torch(tmp_path):
    program = (
        "import sys\n"
        "import megatron_idempotent.cli.ping\n"
        "import megatron_idempotent.rl.metrics.chart\n"
        "import megatron_idempotent.rl.metrics.loggers\n"
        "import megatron_idempotent.rl.metrics.names\n"
        "import megatron_idempotent.rl.metrics.timeline\n"
        "print([name for name in ('torch', 'rich', 'matplotlib', 'wandb') if name in sys.modules])"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert told.stdout.strip() == "[]"
