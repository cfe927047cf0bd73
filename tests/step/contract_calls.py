"""Calls of a step: once per id, in their order, alike on all ranks, one thread at a time."""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, ClassVar

import pytest
import torch
from fsdp_bench import same
from ranks import on_ranks
from scenario import SequenceLoss, TokenLoss, cut, raised_by
from step_backend import Backend, refused

from megatron_idempotent import WindowAborted


class Calls(Backend):
    """Calls that are out of order or differ are errors that change nothing."""

    @on_ranks(2)
    def test_calls_out_of_order_are_errors_that_name_the_step(self) -> None:
        bench = self.bench()
        step, batch = bench.step, bench.batch(2)
        step.abort()
        for call, *arguments in ((step.microbatch, "step-0", batch), (step.finish, "step-0")):
            refused(RuntimeError, "'step-0'", call, *arguments)
        first = bench.begin()
        assert step.open_step_id == first
        refused(RuntimeError, repr(first), bench.begin)
        refused(RuntimeError, repr(first), step.microbatch, "other", batch)
        refused(RuntimeError, repr(first), step.abort, "other")
        step.abort(first)
        assert step.open_step_id is None
        refused(RuntimeError, "aborted", step.finish, first)
        refused(RuntimeError, "aborted", bench.begin, step_id=first)
        second = bench.begin()
        assert second != first
        step.microbatch(second, batch, last=True)
        refused(RuntimeError, "last batch", step.microbatch, second, batch)
        step.finish(second)
        refused(RuntimeError, "was finished", step.microbatch, second, batch)
        refused(RuntimeError, repr(second), step.abort, second)
        step.abort()

    @on_ranks(2)
    def test_what_is_sent_again_changes_nothing(self) -> None:
        """The same ids again, and the numbers of a run in which nothing was repeated."""

        def run(times: int) -> Any:
            bench = self.bench()
            step, results = bench.step, []
            for number in range(2):
                name = f"outer {number}"
                pieces = list(cut(bench.batch(4, seed=number), [1, 3]))
                for _ in range(times):
                    assert bench.begin(step_id=name) == name
                for index, piece in enumerate(pieces):
                    first = step.microbatch(name, piece, microbatch_id=f"piece {index}")
                    for _ in range(times - 1):
                        assert bench.begin(step_id=name) == name
                        again = step.microbatch(name, piece, microbatch_id=f"piece {index}")
                        assert again is first
                result = step.finish(name)
                for _ in range(times - 1):
                    assert step.finish(name) is result
                    assert bench.begin(step_id=name) == name
                results.append(result)
            assert step.open_step_id is None
            bench.begin(step_id="third")
            refused(RuntimeError, "(2, 1)", bench.begin, micro_batch_size=1, step_id="third")
            step.abort()
            return results, bench.parameters()

        once, twice = run(1), run(3)
        assert once[0] == twice[0]
        assert torch.equal(once[1], twice[1])

    @pytest.mark.full
    @on_ranks(2)
    def test_an_id_that_comes_again_with_another_batch_is_refused(self) -> None:
        def steps(again: bool) -> Any:
            bench = self.bench()
            batch = bench.batch(2)
            for form in ("rows", "ready"):
                step_id = bench.begin()

                def send(batch: Any, form: str = form, step_id: str = step_id) -> Any:
                    given = {"batch": batch}
                    if form == "ready":
                        given = {"microbatches": list(cut(batch, [1, 1]))}
                    return bench.step.microbatch(step_id, **given, microbatch_id="a")

                receipt = send(batch)
                if again:
                    assert send({name: value.clone() for name, value in batch.items()}) is receipt
                    for name in batch:
                        other = {**batch, name: batch[name].clone()}
                        other[name].view(-1)[-1] = 1 - other[name].view(-1)[-1].long()
                        told = refused(ValueError, "microbatch_id='a'", send, other)
                        assert f"[{name!r}]" in told
                    less = {name: value for name, value in batch.items() if name != "token_mask"}
                    refused(ValueError, "token_mask", send, less)
                bench.step.finish(step_id)
            return bench.state()

        assert same(steps(True), steps(False))

    @pytest.mark.full
    @on_ranks(2)
    def test_arguments_that_differ_are_named_with_their_ranks(self) -> None:
        """Rank 1 begins or ends a step otherwise."""

        class OtherMetrics(TokenLoss):
            normalizers: ClassVar = {"rows": "tokens"}

        bench = self.bench()
        batch, before, odd = bench.batch(2), bench.digest(), bench.rank == 1
        ready: dict[str, Any] = {"micro_batch_size": None, "max_tokens_per_microbatch": 96 + odd}
        rows: list[tuple[str, dict[str, Any]]] = [
            ("kind='sequence'", {"loss": (SequenceLoss if odd else TokenLoss)()}),
            ("global_batch_size=9", {"global_batch_size": 8 + odd}),
            ("normalizers=", {"loss": (OtherMetrics if odd else TokenLoss)()}),
        ]
        rows += [(name, {**more, "last": True}) for name, more in rows]
        rows += [
            ("max_tokens_per_microbatch=97", ready),
            ("finish(lr)=2.0", {"finish": {"lr": 1.0 + odd}}),
            ("divisor=2.0", {"finish": {"divisor": lambda _: 1.0 + odd}}),
            ("divisor", {"finish": {"divisor": lambda _: -1.0 if odd else 1.0}}),
        ]
        for name, more in rows:
            error = raised_by(bench.run, [[batch]] if more is ready else [batch], **more)
            assert isinstance(error, WindowAborted), (name, error)
            assert name in error.failures[1]
            bench.step.abort()
            assert bench.digest() == before
        # Sizes of microbatches, and how many there are, are each replica's own.
        sizes = {"micro_batch_size": 1 if odd and bench.replica else 2, "rank_batch_size": 4}
        assert bench.run([batch], **sizes).updated
        ways: dict[str, Any] = {"non_finite": "skip" if odd else "update"}
        if not self.fsdp:
            ways["order_stable"] = odd
        other = self.bench(step=ways)
        error = raised_by(other.run, [batch])
        assert all(f"{name}=" in error.failures[1] for name in ways)

    @pytest.mark.full
    @on_ranks(2)
    def test_a_step_is_told_its_learning_rate_and_batch_size_when_it_ends(self) -> None:
        """Against a step with twice the rate, as Tinker's client tells it. What is given twice is
        the same.
        """
        found = []
        for lr in (1e-3, 2e-3):
            bench = self.bench()
            before = bench.parameters()
            step_id = bench.begin(global_batch_size=None)
            bench.step.microbatch(step_id, bench.batch(1))
            for wrong in (-1.0, float("nan"), "1e-3", True):
                refused(ValueError, "lr", bench.step.finish, step_id, lr=wrong)
            if not self.fsdp:
                refused(ValueError, "global_batch_size", bench.step.finish, step_id, lr=lr)
            result = bench.step.finish(step_id, lr=lr, global_batch_size=8)
            assert result.lr == result.rows[0]["lr"] == lr
            found.append((bench.parameters() - before).double())
        # Adam's first update is the learning rate times a number near 1 that does not depend on
        # it, plus decay by the rate: two roundings of a parameter, each of half a unit in its last
        # place, and a third one of the difference.
        unit = 2**-9 if self.layout.get("dtype") == "bf16" else 2**-24
        bound = 3 * unit * bench.parameters().double().abs().max() * 2
        assert (found[0] * 2 - found[1]).abs().max() <= bound
        assert found[0].abs().max() > 5e-4
        step_id = bench.begin(divisor=2.0)
        bench.step.microbatch(step_id, bench.batch(1))
        for name, value in (("divisor", 3.0), ("global_batch_size", 4)):
            refused(ValueError, name, bench.step.finish, step_id, **{name: value})
        assert bench.step.finish(step_id, divisor=2.0).updated

    @pytest.mark.full
    @on_ranks(2)
    def test_a_second_thread_is_refused_and_the_first_one_finishes(self) -> None:
        """A second thread comes while the first one waits in `finish()`."""

        def steps(second: bool) -> Any:
            bench = self.bench()
            batch, step_id = bench.batch(2), bench.begin()
            bench.step.microbatch(step_id, batch)
            torch.distributed.barrier()
            if not second or bench.rank == 1:
                if second:
                    torch.distributed.barrier()  # the other one has been refused by then
                assert bench.step.finish(step_id).updated
                return bench.state()
            results: list[Any] = []
            first = threading.Thread(target=lambda: results.append(bench.step.finish(step_id)))
            first.start()
            while not bench.step._caller:
                time.sleep(0.01)
            for call in (
                functools.partial(bench.step.finish, step_id),
                bench.step.abort,
                functools.partial(bench.step.microbatch, step_id, batch),
            ):
                refused(RuntimeError, "another thread is in finish()", call)
            torch.distributed.barrier()
            first.join()
            assert results[0].updated
            assert bench.step.finish(step_id) is results[0]
            return bench.state()

        assert same(steps(True), steps(False))
