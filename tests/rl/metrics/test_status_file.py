"""`status.json`: whole or not there, old if nobody writes it, and never a reason to end a run."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")  # the records of the engines are imported with it

from status_cases import status

from megatron_idempotent.rl.controller.status_file import (
    STATUS_FILE,
    StatusError,
    StatusFile,
    read_status,
)


async def answer():
    return status()


async def test_the_status_is_written_at_once_again_and_at_the_end(tmp_path):
    path, told = tmp_path / STATUS_FILE, []

    async def ping():
        told.append(len(told))
        return status(trainer_version=told[-1])

    async with StatusFile(ping, path, every_s=0.01):
        assert read_status(path)["trainer_version"] == 0
        while read_status(path)["trainer_version"] < 3:
            await asyncio.sleep(0.01)
        assert os.listdir(tmp_path) == [STATUS_FILE] or ".status" in str(os.listdir(tmp_path))
    assert read_status(path)["trainer_version"] == told[-1]
    assert os.listdir(tmp_path) == [STATUS_FILE]


def test_an_old_status_is_refused_unless_the_run_has_ended(tmp_path):
    path = tmp_path / STATUS_FILE
    with pytest.raises(StatusError, match="is not there: the run has not begun"):
        read_status(path)

    async def scenario(last):
        async def ping():
            return status(state=last)

        async with StatusFile(ping, path):
            pass

    asyncio.run(scenario("running"))
    os.utime(path, (1_000, 1_000))
    with pytest.raises(StatusError, match=rf"process {os.getpid()} was killed, is stopped, or its"):
        read_status(path)
    asyncio.run(scenario("ended"))
    os.utime(path, (1_000, 1_000))
    assert read_status(path)["state"] == "ended"


async def test_a_second_controller_of_a_run_is_refused_and_a_dead_ones_file_is_not(tmp_path):
    path = tmp_path / STATUS_FILE
    async with StatusFile(answer, path):
        with pytest.raises(StatusError, match="another controller writes"):
            await StatusFile(answer, path).__aenter__()
    content = json.loads(path.read_text())
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    path.write_text(json.dumps({**content, "pid": int(ended.stdout)}))  # killed just now
    async with StatusFile(answer, path):
        assert read_status(path)["state"] == "running"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"every_s": 1}', json.dumps({"status": 3})])
def test_what_is_no_status_is_told(tmp_path, text):
    (tmp_path / STATUS_FILE).write_text(text)
    with pytest.raises(StatusError, match="holds no status"):
        read_status(tmp_path / STATUS_FILE)


async def test_a_directory_that_is_not_there_is_told_and_one_that_vanishes_ends_nothing(tmp_path):
    with pytest.raises(StatusError, match=r"cannot write .*No such file"):
        await StatusFile(answer, tmp_path / "absent" / STATUS_FILE).__aenter__()
    folder = tmp_path / "run"
    folder.mkdir()
    async with StatusFile(answer, folder / STATUS_FILE, every_s=0.01):
        for file in folder.iterdir():
            file.unlink()
        folder.rename(tmp_path / "aside")
        await asyncio.sleep(0.05)
