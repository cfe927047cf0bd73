"""The contract of every kind of `RankGroup`. Subclass `RankContract` and give it a `make_ranks`.

    @pytest.fixture(scope="module")
    def make_ranks():
        yield lambda spec, size: EmbeddedRanks(spec, size)

    class TestEmbedded(RankContract):
        pass

`make_ranks(spec, size)` returns a group that is not started; the test starts and closes it, on one
event loop per class. It is class- or session-scoped, and there is one group at a time. Ranks must
be able to import `contract_worker`, which stands beside this file. A kind whose ranks are dear to
start leaves out what it need not show: `test_… = None` in the subclass.
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from contract_calls import (
    SPEC,
    CallContract,
    MakeRanks,
    OnOneLoop,
    Run,
    gone,
    path_for_ranks,
    pids,
    until,
)
from contract_worker import FAILING_FACTORY

from megatron_idempotent.rl.workers.protocol import RankFailed, RanksLost, WorkerSpec

__all__ = [
    "SPEC",
    "FactoryContract",
    "MakeRanks",
    "RankContract",
    "Run",
    "gone",
    "path_for_ranks",
    "pids",
    "until",
]


class RankContract(CallContract):
    """All tests of the contract: those of `CallContract`, and how ranks are lost and ended."""

    def test_a_rank_that_dies_while_idle_is_noticed_and_all_others_end(self, ranks, run) -> None:
        async def scenario() -> None:
            first, second = await pids(ranks)
            os.kill(second, signal.SIGKILL)
            await gone(first)
            await gone(second)
            for _ in range(2):
                with pytest.raises(RanksLost, match="rank 1"):
                    await ranks.call("echo")

        run(scenario())

    def test_a_rank_that_dies_in_a_call_loses_that_call_and_those_behind(self, ranks, run) -> None:
        async def scenario() -> None:
            dying = asyncio.ensure_future(ranks.call("die", [1]))
            behind = asyncio.ensure_future(ranks.call("echo"))
            for each in (dying, behind):
                with pytest.raises(RanksLost, match="rank 1"):
                    await each

        run(scenario())

    def test_a_rank_that_dies_leaves_nobody_in_a_collective(self, ranks, run) -> None:
        async def scenario() -> None:
            before = await pids(ranks)
            with pytest.raises(RanksLost, match="rank 0"):
                await ranks.call("die_in_collective", [0])
            for pid in before:
                await gone(pid)
            await ranks.start()
            after = await ranks.call("describe")
            assert not {pid for _, _, pid, _ in after} & set(before)
            assert await ranks.call("add_up", 0.0) == [1.0, 1.0]
            assert await ranks.call("note", "fresh") == [["fresh"]] * 2

        run(scenario())

    def test_ranks_that_do_not_answer_in_time_are_ended(self, ranks, run) -> None:
        async def scenario() -> None:
            before = await pids(ranks)
            with pytest.raises(RanksLost, match=r"hang\(\).* 0.2 s"):
                await ranks.call("hang", timeout_s=0.2)
            for pid in before:
                await gone(pid)

        run(scenario())

    def test_calls_before_the_start_and_behind_the_end_say_so(self, make_ranks, run) -> None:
        async def scenario() -> None:
            ranks = make_ranks(SPEC, 2)
            with pytest.raises(RanksLost, match=r"start\(\)"):
                await ranks.call("echo")
            await ranks.close()
            await ranks.close()

        run(scenario())

    def test_ranks_are_ended_by_close_and_twice_is_fine(self, ranks, run) -> None:
        async def scenario() -> None:
            before = await pids(ranks)
            running = asyncio.ensure_future(ranks.call("hang"))
            await asyncio.sleep(0.05)
            await ranks.close()
            await ranks.close()
            for pid in before:
                await gone(pid)
            with pytest.raises(RanksLost):
                await running
            with pytest.raises(RanksLost, match=r"start\(\)"):
                await ranks.call("echo")
            await ranks.start()
            assert await ranks.call("add_up", 0.0) == [1.0, 1.0]

        run(scenario())


class FactoryContract(OnOneLoop):
    """A factory that raises. Apart, because it needs a group of its own."""

    def test_a_factory_that_raises_is_told_with_its_rank(self, make_ranks, run) -> None:
        async def scenario() -> None:
            ranks = make_ranks(WorkerSpec(factory=FAILING_FACTORY, argument="x"), 2)
            try:
                with pytest.raises(RankFailed, match="no worker for 'x'") as failed:
                    await ranks.start()
                assert [error.rank for error in failed.value.errors] == [1]
                with pytest.raises(RanksLost, match=r"start\(\)"):
                    await ranks.call("echo")
            finally:
                await ranks.close()

        run(scenario())
