"""Failures of a step on some ranks or all: all ranks know, and the next step is as if none was."""

from __future__ import annotations

from typing import Any

import pytest
from fsdp_bench import same
from ranks import on_ranks
from scenario import Broken, raised_by
from step_backend import Backend

from megatron_idempotent import SessionPoisoned, WindowAborted
from megatron_idempotent.step import open_step
from megatron_idempotent.window.agreement import is_poisoned


def raise_behind(owner: Any, name: str, said: str) -> None:
    """Have a function of ours raise once, after what it does, where ranks said that."""
    stock = getattr(owner, name)

    def raising(*args: Any, **kwargs: Any) -> Any:
        value = stock(*args, **kwargs)
        if said in repr(args):
            setattr(owner, name, stock)
            raise Broken
        return value

    setattr(owner, name, raising)


class Failures(Backend):
    """A step fails in its loss, and in its update."""

    def broken(self, bench: Any) -> Any:
        """The error of a step whose inner optimizer raises after its update."""

        def out_of_memory(*_: Any) -> None:
            raise Broken("out of memory")

        first = getattr(bench.optimizer, "chained_optimizers", [bench.optimizer])[0]
        hook = getattr(first, "optimizer", first).register_step_post_hook(out_of_memory)
        told = raised_by(bench.run, [bench.batch(2, seed=2)])
        hook.remove()
        return told

    @on_ranks(2)
    def test_a_loss_that_failed_on_some_ranks_leaves_no_bit(self) -> None:
        def run(failing: bool) -> Any:
            bench = self.bench()
            for number, ranks in enumerate([(0, 1), (1,), (0, 1)]):
                if failing:
                    bench.loss.place = "loss" if bench.rank in ranks else None
                    told = raised_by(bench.run, [bench.batch(2, seed=9)], last=number == 2)
                    assert isinstance(told, (Broken, WindowAborted)), told
                    bench.step.abort()
                    bench.loss.place = None
                bench.run([bench.batch(2, seed=number)])
            return bench.state()

        assert same(run(True), run(False))

    @pytest.mark.parametrize("undo", [True, False])
    @on_ranks(2)
    def test_an_update_that_broke_off_on_all_ranks_can_be_undone(self, undo: bool) -> None:
        bench = self.bench(step={"undo": undo})
        bench.run([bench.batch(2)])
        before = bench.parameters()
        told = self.broken(bench)
        assert isinstance(told, WindowAborted), told
        assert undo or "undo=True" in str(told)
        bench.step.abort()
        if undo:
            assert bench.parameters().equal(before)
            bench.run([bench.batch(2, seed=2)])
            got, expected = bench.state(), self.bench()
            for seed in (1, 2):
                expected.run([expected.batch(2, seed=seed)])
            assert same(got, expected.state())
        else:
            assert isinstance(raised_by(bench.begin), RuntimeError)

    @pytest.mark.full
    @on_ranks(2)
    def test_an_update_that_broke_off_on_one_rank_ends_the_session(self) -> None:
        bench = self.bench(step={"undo": True, "deadline_s": 3.0})
        bench.run([bench.batch(2)])
        told = self.broken(bench) if bench.rank else raised_by(bench.run, [bench.batch(2, seed=2)])
        assert isinstance(told, SessionPoisoned), told
        assert is_poisoned()
        raised_by(bench.step.abort)
        assert isinstance(raised_by(bench.begin), SessionPoisoned)

    @on_ranks(2)
    def test_what_all_ranks_have_done_is_not_dropped_by_one(self) -> None:
        """All ranks have said that they have updated, and one is interrupted then."""

        def run(interrupted: bool) -> tuple[Any, Any]:
            bench = self.bench(step={"undo": True})
            step, batch = bench.step, bench.batch(4)
            bench.run([batch])
            name = bench.begin()
            step.microbatch(name, batch)
            if interrupted and bench.rank == 1:
                raise_behind(open_step, "failures_of", "phase='updated'")
                assert isinstance(raised_by(step.finish, name), Broken)
                for call, *args in (
                    (step.abort, name),
                    (step.abort,),
                    (step.microbatch, name, batch),
                ):
                    assert "finish() it again" in str(raised_by(call, *args))
            result = step.finish(name)
            bench.run([batch])
            return result, bench.parameters()

        (result, got), (expected, parameters) = run(True), run(False)
        assert result == expected
        assert got.equal(parameters)
