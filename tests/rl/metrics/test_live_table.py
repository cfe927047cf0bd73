"""The live table, and the lines that take its place in a file."""

import asyncio
import dataclasses
import io
import re

import pytest

pytest.importorskip("torch")  # the records of the engines are imported with it

from status_cases import status as status_record

from megatron_idempotent.rl.metrics.console import StatusTable, keep_showing

METRICS = {
    "train/reward": 0.4123,
    "train/loss": -0.01234,
    "train/staleness_mean": 0.75,
    "train/staleness_max": 2.0,
    "timing/train/tokens_per_s": 851.4,
    "timing/train/trainer_idle_ratio": 0.123,
    "timing/train/engine_idle_ratio": 0.031,
    "rollouts/wasted_fraction": 0.05,
}


def status(**changes):
    return dataclasses.asdict(status_record(**changes))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_table_shows_the_status_and_the_last_metrics(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    output = Terminal()
    table = StatusTable(output, until=200)
    table.show(status(rollouts_permitted=False), 1.0)
    table.log(METRICS, step=12)
    table.log({"evaluation/reward": 0.5}, step=12)
    table.show(status(trainer_version=13), 2.0)
    table.close()
    table.close()
    _, last = output.getvalue().split("12 of 200", 1)
    assert "none may start" in last.split("13 of 200")[0]
    assert "–" in last.split("13 of 200")[0], "metrics that are not there yet"
    shown = last.split("13 of 200", 1)[1]
    for told in (
        "engines serve 11",
        "0.412  loss -0.0123",
        "mean 0.75  max 2",
        "8 generating (may start)  3 ready  2 in the step",
        "61 submitted, 48 trained, 0 filtered, 0 evicted; wasted 5%",
        "trainer 12%  engines 3%",
        "851 tokens/s",
        "waiting for a group, last progress 0.2 s ago",
    ):
        assert told in shown
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).splitlines()
    assert max(map(len, lines)) <= 80


def test_in_a_file_there_is_a_line_now_and_then_and_one_at_the_end():
    output = io.StringIO()
    lines = StatusTable(output, until=200, every_s=10.0)
    lines.show(status(), 100.0)
    lines.log(METRICS, step=12)
    for at_s in (101.0, 109.9, 110.0, 115.0):
        lines.show(status(), at_s)
    lines.show(status(state="ended", doing="", trainer_version=13), 116.0)
    lines.close()
    first, second, last = output.getvalue().splitlines()
    assert "version 12 of 200, engines serve 11  reward –  loss –  lag mean –" in first
    for part in ("reward 0.412  loss -0.0123", "8 generating", "engines 3%", "851 tokens/s"):
        assert part in second
    assert last.startswith("run ended, epoch 0  version 13 of 200")


async def test_it_is_shown_until_it_is_cancelled():
    output = io.StringIO()
    seen, enough = [], asyncio.Event()

    async def ping():
        seen.append(len(seen))
        if len(seen) == 3:
            enough.set()
        return status_record(trainer_version=len(seen))

    table = StatusTable(output, every_s=0.0)
    showing = asyncio.ensure_future(keep_showing(table, ping, every_s=0.0))
    await asyncio.wait_for(enough.wait(), 30)
    showing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await showing
    shown = output.getvalue().splitlines()
    assert [re.search(r"version (\d+)", row)[1] for row in shown[:2]] == ["1", "2"]


def test_a_terminal_that_is_gone_ends_the_showing_and_nothing_else(capsys):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError("the terminal is gone")

    async def ping():
        return status_record()

    asyncio.run(asyncio.wait_for(keep_showing(StatusTable(Gone()), ping), 30))
    assert "the live table failed and is dropped: BrokenPipeError" in capsys.readouterr().err
