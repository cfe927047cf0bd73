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
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from contract_worker import FACTORY, FAILING_FACTORY, Unreadable

from megatron_idempotent.rl.workers.protocol import RankFailed, RankGroup, RanksLost, WorkerSpec

Made = TypeVar("Made")
Run = Callable[[Awaitable[Made]], Made]
MakeRanks = Callable[[WorkerSpec, int], RankGroup]

SPEC = WorkerSpec(factory=FACTORY, argument={"lr": 0.5})
LIMIT_S = 90.0


async def until(path: Path) -> None:
    """Wait for a file that a rank makes."""
    while not path.exists():
        await asyncio.sleep(0.005)


async def pids(ranks: RankGroup) -> list[int]:
    """Process ids by rank."""
    return [pid for _, _, pid, _ in await ranks.call("describe")]


def alive(pid: int) -> bool:
    """Return whether a process of this machine runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(pid: int) -> None:
    """Wait for a process of this machine to end."""
    while alive(pid):
        await asyncio.sleep(0.01)


class OnOneLoop:
    """One event loop for all tests of a class, so that they can share their ranks."""

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls) -> Iterator[Run[Any]]:
        """Run a scenario on it, and not for ever."""
        loop = asyncio.new_event_loop()
        try:
            yield lambda scenario: loop.run_until_complete(asyncio.wait_for(scenario, LIMIT_S))
            left = asyncio.all_tasks(loop)
            assert not left, f"tasks left behind: {left}"
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()


class RankContract(OnOneLoop):
    """Two ranks on this machine, which the tests share: calls, and how ranks are lost and ended."""

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, make_ranks: MakeRanks, run: Run[Any]) -> Iterator[RankGroup]:
        ranks = make_ranks(SPEC, 2)
        run(ranks.start())
        yield ranks
        run(ranks.close())

    @pytest.fixture
    def ranks(self, shared: RankGroup, run: Run[Any]) -> RankGroup:
        """Two started ranks; fresh ones where the test before has lost them."""

        async def alive() -> None:
            try:
                await shared.call("echo")
            except RanksLost:
                await shared.start()

        run(alive())
        return shared

    def test_results_come_by_rank_and_each_rank_has_a_process_of_its_own(self, ranks, run) -> None:
        assert ranks.size == 2
        found = run(ranks.call("describe"))
        assert [(rank, size, argument) for rank, size, _, argument in found] == [
            (0, 2, {"lr": 0.5}),
            (1, 2, {"lr": 0.5}),
        ]
        pids = {pid for _, _, pid, _ in found}
        assert len(pids) == 2
        assert os.getpid() not in pids

    def test_arguments_go_to_all_ranks_and_one_more_to_each(self, ranks, run) -> None:
        assert run(ranks.call("echo", 1, "two")) == [(1, "two")] * 2
        assert run(ranks.call("echo", 1, per_rank=["a", None])) == [(1, "a"), (1, None)]

    def test_a_per_rank_argument_for_another_number_of_ranks_is_refused(self, ranks, run) -> None:
        with pytest.raises(ValueError, match=r"3 .*2"):
            run(ranks.call("note", "never", per_rank=[1, 2, 3]))
        assert run(ranks.call("echo", 1)) == [(1,)] * 2

    def test_ranks_meet_in_a_collective_inside_a_call(self, ranks, run) -> None:
        assert run(ranks.call("add_up", 10.0)) == [21.0, 21.0]

    def test_what_raises_on_some_ranks_is_told_of_each_and_they_live_on(self, ranks, run) -> None:
        before = run(pids(ranks))
        with pytest.raises(RankFailed, match=r"fail\(\) raised .*LookupError.* rank 1") as one:
            run(ranks.call("fail", [1]))
        assert [error.rank for error in one.value.errors] == [1]
        with pytest.raises(RankFailed) as both:
            run(ranks.call("fail", [0, 1]))
        assert both.value.method == "fail"
        assert [error.rank for error in both.value.errors] == [0, 1]
        for rank, error in enumerate(both.value.errors):
            assert error.exception_type == "builtins.LookupError"
            assert error.message == f"rank {rank} was asked to fail"
            assert "contract_worker.py" in error.traceback
        assert run(ranks.call("add_up", 1.0)) == [3.0, 3.0]
        assert run(pids(ranks)) == before

    @pytest.mark.parametrize(
        ("method", "says"), [("no_such_method", "no_such_method"), ("__init__", "__init__")]
    )
    def test_a_method_that_the_worker_lacks_is_an_error(self, ranks, run, method, says) -> None:
        with pytest.raises(RankFailed, match=says):
            run(ranks.call(method))
        assert run(ranks.call("echo", 1)) == [(1,)] * 2

    def test_what_cannot_be_pickled_or_read_is_an_error_and_ranks_live_on(self, ranks, run) -> None:
        before = run(pids(ranks))
        with pytest.raises((TypeError, AttributeError, ValueError), match="lambda"):
            run(ranks.call("echo", lambda: None))
        with pytest.raises(RankFailed, match="lambda"):
            run(ranks.call("a_lambda"))
        with pytest.raises(RankFailed, match="this cannot be read"):
            run(ranks.call("unreadable"))
        with pytest.raises(RankFailed, match="this cannot be read"):
            run(ranks.call("echo", Unreadable()))
        assert run(pids(ranks)) == before

    def test_a_rank_that_a_method_wants_to_end_answers_instead(self, ranks, run) -> None:
        before = run(pids(ranks))
        with pytest.raises(RankFailed, match="SystemExit"):
            run(ranks.call("give_up"))
        assert run(pids(ranks)) == before

    def test_calls_run_in_the_order_in_which_they_were_made(self, ranks, run, tmp_path) -> None:
        async def scenario() -> list[list[Any]]:
            mark = len((await ranks.call("note", "mark"))[0])
            large = bytes(1 << 21)
            first = asyncio.ensure_future(ranks.call("wait_for", tmp_path / "go", "first"))
            await until(tmp_path / "go.rank-1")
            second = asyncio.ensure_future(ranks.call("note", large))
            third = asyncio.ensure_future(ranks.call("note", "third"))
            await asyncio.sleep(0)
            assert not first.done()
            (tmp_path / "go").touch()
            await asyncio.gather(first, second)
            noted = [found[mark:] for found in await third]
            assert noted == [["first", large, "third"]] * 2

        run(scenario())

    def test_a_cancelled_call_runs_to_its_end_before_the_next(self, ranks, run, tmp_path) -> None:
        async def scenario() -> None:
            mark = len((await ranks.call("note", "mark"))[0])
            running = asyncio.ensure_future(ranks.call("wait_for", tmp_path / "go", "cancelled"))
            queued = asyncio.ensure_future(ranks.call("note", "never sent"))
            behind = asyncio.ensure_future(ranks.call("note", "behind"))
            await until(tmp_path / "go.rank-1")
            running.cancel()
            queued.cancel()
            await asyncio.wait([running, queued])
            assert running.cancelled()
            assert queued.cancelled()
            assert not behind.done()
            (tmp_path / "go").touch()
            assert [found[mark:] for found in await behind] == [["cancelled", "behind"]] * 2

        run(scenario())

    def test_large_tensors_go_both_ways_bit_by_bit(self, ranks, run) -> None:
        from megatron_idempotent.rl.weights import checksum

        elements = 4 << 20
        found = run(ranks.call("seeded", 7, elements))
        expected = torch.randn(elements, generator=torch.Generator().manual_seed(7))
        assert all(torch.equal(each, expected) for each in found)
        sent = {
            "weights": expected,
            "half": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
            "empty": torch.empty(0, 3, dtype=torch.int64),
            "flag": torch.tensor(True),
            "rows": expected[: 64 * 64].reshape(64, 64).T,
        }
        for (got,) in run(ranks.call("echo", sent)):
            assert list(got) == list(sent)
            for name, tensor in sent.items():
                assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape)
                assert checksum(got[name]) == checksum(tensor)
                got[name].zero_()  # they may be written
        assert checksum(expected) == checksum(sent["weights"])

    def test_a_view_comes_without_the_rest_of_its_storage(self, ranks, run) -> None:
        row, column = run(ranks.call("view", 1024))[0]
        assert torch.equal(row, torch.arange(1024.0) + 1024)
        assert torch.equal(column, torch.arange(1024.0) * 1024 + 1)
        for each in (row, column):
            assert each.untyped_storage().nbytes() < 64 * 1024

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
