"""Ranks that a launcher forks: the contract, and what only they do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from contract_ranks import SPEC, FactoryContract, MakeRanks, RankContract, alive, gone, pids

from megatron_idempotent.rl.workers import EmbeddedRanks, RanksLost, embedded


@pytest.fixture(scope="class")
def make_ranks(megatron_rank_pool) -> MakeRanks:
    """Runs on the launcher that all tests share."""
    return lambda spec, size: EmbeddedRanks(spec, size, pool=megatron_rank_pool)


class TestEmbedded(RankContract):
    """Two ranks, forked again after each loss."""


class TestEmbeddedFactory(FactoryContract):
    """A group of its own."""


def test_a_group_that_the_launchers_pool_cannot_hold_is_refused(megatron_rank_pool) -> None:
    size = megatron_rank_pool.max_world_size + 1
    with pytest.raises(ValueError, match=f"{size} ranks.*up to {size - 1}"):
        EmbeddedRanks(SPEC, size, pool=megatron_rank_pool)
    with pytest.raises(ValueError, match="size is 0"):
        EmbeddedRanks(SPEC, 0)


async def test_what_ranks_print_goes_to_a_file_of_each(megatron_rank_pool, tmp_path) -> None:
    ranks = EmbeddedRanks(SPEC, 2, log_dir=tmp_path / "logs", pool=megatron_rank_pool)
    for life in ("first", "second"):
        await ranks.start()
        await ranks.call("say", per_rank=[f"{life} of 0", f"{life} of 1"])
        await ranks.close()
    for rank in range(2):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert log == [f"first of {rank}", f"second of {rank}"]


async def test_how_a_rank_ended_is_told(megatron_rank_pool) -> None:
    ranks = EmbeddedRanks(SPEC, 2, pool=megatron_rank_pool)
    await ranks.start()
    with pytest.raises(RanksLost, match=r"rank 1 was lost in die\(\).*signal SIGKILL"):
        await ranks.call("die", [1])
    await ranks.start()
    with pytest.raises(RanksLost, match=r"rank 0 was lost in exit_at_once\(\).*exit code 9"):
        await ranks.call("exit_at_once", [0], 9)
    await ranks.close()


async def test_ranks_that_are_stopped_are_killed(megatron_rank_pool, monkeypatch) -> None:
    monkeypatch.setattr(embedded, "_END_S", 0.2)
    ranks = EmbeddedRanks(SPEC, 2, pool=megatron_rank_pool)
    await ranks.start()
    launcher = megatron_rank_pool._launcher
    found = await pids(ranks)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    await ranks.close()
    for pid in found:
        await gone(pid)
    assert megatron_rank_pool._launcher is launcher  # which would cost the imports again


async def test_a_process_group_that_cannot_be_made_is_an_error_of_the_start(
    megatron_rank_pool, monkeypatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")

    ranks = EmbeddedRanks(SPEC, 2, pool=megatron_rank_pool)
    with pytest.raises(RanksLost, match=r"could not be started: (?s:.*)no-such-interface"):
        await ranks.start()
    await ranks.close()


async def test_a_start_that_is_cancelled_as_the_last_rank_comes_leaves_nobody(
    megatron_rank_pool, monkeypatch
) -> None:
    ready = embedded.PipeLink.ready

    ranks = EmbeddedRanks(SPEC, 2, pool=megatron_rank_pool)
    await ranks.start()
    await ranks.close()
    launcher = megatron_rank_pool._launcher

    waiting_ranks = [0, 1]

    async def cancelled_then(link: embedded.PipeLink) -> int:
        pid = await ready(link)
        waiting_ranks.pop()
        if not waiting_ranks:
            asyncio.get_running_loop().call_soon(starting.cancel)  # before the start hears of it
        return pid

    with monkeypatch.context() as patch:
        patch.setattr(embedded.PipeLink, "ready", cancelled_then)
        starting = asyncio.ensure_future(ranks.start())
        with pytest.raises(asyncio.CancelledError):
            await starting
    await ranks.start()
    assert megatron_rank_pool._launcher is launcher, "it was ended, for its ranks lived on"
    await ranks.close()


async def test_a_start_that_is_cancelled_leaves_nobody_and_another_works(
    megatron_rank_pool,
) -> None:
    ranks = EmbeddedRanks(SPEC, 2, pool=megatron_rank_pool)
    await ranks.start()
    await ranks.close()
    launcher = megatron_rank_pool._launcher
    for rounds in (1, 3, 10):
        starting = asyncio.ensure_future(ranks.start())
        for _ in range(rounds):
            await asyncio.sleep(0.002)
        while not starting.cancel():  # on a busy machine it has ended before
            await starting
            await ranks.close()
            starting = asyncio.ensure_future(ranks.start())
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await starting
        with pytest.raises(RanksLost, match=r"start\(\)"):
            await ranks.call("echo")
    await ranks.start()
    assert megatron_rank_pool._launcher is launcher
    assert await ranks.call("add_up", 0.0) == [1.0, 1.0]
    await ranks.close()
    assert len(asyncio.all_tasks()) <= 2  # wait_for may run this in a task of its own


@pytest.mark.parametrize(
    "how",
    [
        "killed",  # the launcher sees the same end of its connection in all of them
        *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("interrupted", "no close")),
    ],
)
def test_ranks_and_launcher_end_with_their_controller_however_it_ends(how) -> None:
    program = Path(__file__).with_name("embedded_controller_program.py")
    process = subprocess.Popen(
        [sys.executable, str(program), how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # once its ranks sit in a collective
        if how != "no close":
            process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGINT)
        process.wait(timeout=30)
    finally:
        process.kill()
        process.communicate()
    found = json.loads(line)
    assert len(found) == 3
    until = time.monotonic() + 20
    while any(alive(pid) for pid in found):
        assert time.monotonic() < until, f"left behind: {[pid for pid in found if alive(pid)]}"
        time.sleep(0.02)
