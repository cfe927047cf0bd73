"""Disturbances of an open step: each is refused, or changes nothing.

The next step has the bits of one that nothing has disturbed. What cannot be seen is in
docs/train-step/failures.md alone.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from fsdp_bench import same
from ranks import on_ranks
from scenario import Bench, TokenLoss, cut, forward, raised_by
from step_backend import Backend, refused

from megatron_idempotent import WindowAborted
from megatron_idempotent.window.agreement import is_poisoned

BOTH, MEGATRON, FSDP = ("megatron", "fsdp"), ("megatron",), ("fsdp",)


class Disturbance(NamedTuple):
    """Does something to a bench whose step is open; it may look at a batch."""

    act: Callable[[Any, dict[str, Any]], Any]
    engines: tuple[str, ...]
    by_all: bool = False
    """True where all ranks take part in it, and not rank 1 alone."""
    named: str = ""
    """The word by which the error calls that which was written."""
    last: bool = False
    """True where the batch before it is given as the last one."""
    dtype: str | None = None
    """The type of the models that have this row; None for any."""


def _own_backward(bench: Bench, batch: dict[str, Any]) -> None:
    forward(bench.model.chunks[0], next(cut(batch, [1]))).sum().backward()


def _write(bench: Bench, batch: dict[str, Any]) -> None:
    with torch.no_grad():
        for parameter in bench.module.parameters():
            parameter.mul_(1.5)


def _write_through_data(bench: Bench, batch: dict[str, Any]) -> None:
    for parameter in bench.module.parameters():
        parameter.data.mul_(1.5)


def _load(bench: Bench, batch: dict[str, Any]) -> None:
    state = bench.module.state_dict()
    bench.module.load_state_dict({name: _scaled(value) for name, value in state.items()})


def _scaled(value: Any) -> Any:
    return value * 2 if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _schedule(bench: Bench, batch: dict[str, Any]) -> None:
    bench.model.schedule(iter([]), 1)


def _optimizers(bench: Bench) -> list[Any]:
    return getattr(bench.optimizer, "chained_optimizers", [bench.optimizer])


def _gradients_away_and_back(bench: Bench, batch: dict[str, Any]) -> None:
    for chunk in bench.model.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            kept = buffer.grad_data.clone()
            buffer.grad_data.zero_()
            buffer.grad_data.copy_(kept)


def _read(bench: Bench, batch: dict[str, Any]) -> None:
    with bench.step.reading() as models:
        assert all(not model.training for model in models)


#: Refused in the call itself, so that nothing has happened and the step goes on.
AT_ONCE = {
    "`optimizer.step()`": Disturbance(lambda bench, _: bench.optimizer.step(), BOTH),
    "`step()` of one optimizer of a chain": Disturbance(
        lambda bench, _: _optimizers(bench)[-1].step(), MEGATRON
    ),
    "a schedule that trains the chunks": Disturbance(_schedule, MEGATRON),
    "a forward with gradients": Disturbance(
        lambda bench, batch: bench.module(batch["input_ids"]), FSDP
    ),
}
GRADIENTS, PARAMETERS, MAIN = "gradients", "parameters", "main parameters"
#: Refused in `finish`, on all ranks.
IN_FINISH = {
    "`zero_grad_buffer()`": Disturbance(
        lambda bench, _: [chunk.zero_grad_buffer() for chunk in bench.model.chunks],
        *(MEGATRON, False, GRADIENTS),
    ),
    "`scale_gradients()`": Disturbance(
        lambda bench, _: [chunk.scale_gradients(0.5) for chunk in bench.model.chunks],
        *(MEGATRON, False, GRADIENTS),
    ),
    "a backward of your own": Disturbance(_own_backward, MEGATRON, True, GRADIENTS),
    "a reduction of your own": Disturbance(
        lambda bench, _: [chunk.finish_grad_sync() for chunk in bench.model.chunks],
        *(MEGATRON, True, GRADIENTS),
    ),
    "`zero_grad()` after `last=True`": Disturbance(
        lambda bench, _: bench.module.zero_grad(), FSDP, False, GRADIENTS, last=True
    ),
    "weights written in place": Disturbance(_write, BOTH, False, PARAMETERS, dtype="fp32"),
    "`load_state_dict()`": Disturbance(_load, MEGATRON, False, PARAMETERS, dtype="fp32"),
    "weights written through `.data`": Disturbance(
        _write_through_data, MEGATRON, False, MAIN, dtype="bf16"
    ),
}
#: Changes nothing: the step has the same bits. docs/train-step/failures.md has these names.
HARMLESS = {
    "`optimizer.zero_grad()`": Disturbance(lambda bench, _: bench.optimizer.zero_grad(), BOTH),
    "`step()` of the torch optimizer inside of Megatron's": Disturbance(
        lambda bench, _: [each.optimizer.step() for each in _optimizers(bench)], MEGATRON
    ),
    "gradients copied away and back, Megatron": Disturbance(_gradients_away_and_back, MEGATRON),
    "`model.eval()`": Disturbance(lambda bench, _: bench.module.eval(), BOTH),
    "parameters moved to other memory, FSDP2": Disturbance(
        lambda bench, _: bench.module._apply(torch.clone), FSDP
    ),
    # A gather on FSDP2.
    "`reading()`": Disturbance(_read, BOTH, by_all=True),
}
#: What a loss does beside its sum, and what the error names.
LOSSES: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("backward", lambda total, _: total.backward()),
    ("backward", lambda total, _: total.backward(retain_graph=True)),
    ("StopIteration", lambda *_: next(iter(()))),
    ("SystemExit", lambda *_: sys.exit(3)),
]
CONTEXTS = {"torch.no_grad()": torch.no_grad, "torch.inference_mode()": torch.inference_mode}


class Doing(TokenLoss):
    """Does something beside its sum."""

    def __init__(self, also: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.also = also

    def __call__(self, output: Any, microbatch: Any) -> Any:
        total, metrics = super().__call__(output, microbatch)
        self.also(total, output)
        return total, metrics


def ends(*_: Any) -> Any:
    """Raise the StopIteration of another loop."""
    return next(iter(()))


#: Functions of a step beside its loss, as options of the step and of `begin()`.
FUNCTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "forward": ({"forward": ends}, {}),
    "shape": ({"shape": ends}, {}),
    "counts": ({"counts": ends}, {}),
    "divisor": ({}, {"divisor": ends}),
}


@contextlib.contextmanager
def kept(bench: Bench) -> Iterator[None]:
    """Put weights back that are written inside."""
    values = [(p, p.detach().clone()) for p in bench.module.parameters()]
    yield
    for parameter, value in values:
        parameter.data.copy_(value)


class Disturbances(Backend):
    """Each test compares with a run that nothing has disturbed."""

    def fitting(self, table: dict[str, Disturbance]) -> Iterator[tuple[str, Disturbance]]:
        """The rows for this engine and layout."""
        for name, row in table.items():
            # Ranks of which one waits for the stage before would not come to the end.
            waits = row.act is _own_backward and "pp" in self.layout
            of_this_type = row.dtype in (None, self.layout.get("dtype", "fp32"))
            if self.engine in row.engines and of_this_type and not waits:
                yield name, row

    @on_ranks(2)
    def test_what_is_written_between_two_calls_is_refused_in_finish(self) -> None:
        def run(bad: bool) -> Any:
            bench = self.bench()
            batch = bench.batch(2)
            for name, row in self.fitting(IN_FINISH) if bad else ():
                with kept(bench):
                    step_id = bench.begin()
                    bench.step.microbatch(step_id, batch, last=row.last)
                    if row.by_all or bench.rank == 1:
                        row.act(bench, batch)
                    if not row.last:
                        bench.step.microbatch(step_id, batch)
                    told = refused(WindowAborted, row.named, bench.step.finish, step_id)
                    assert "rank 1: " in told, name
                    assert not row.by_all or "rank 0: " in told, name
                    bench.step.abort()
            assert bench.run([batch]).updated
            return bench.state()

        assert same(run(True), run(False))

    @pytest.mark.full
    @on_ranks(2)
    def test_a_step_goes_on_after_what_is_refused_at_once_or_harmless(self) -> None:
        def run(bad: bool) -> Any:
            bench = self.bench()
            batch = bench.batch(2)
            for _ in range(2):
                step_id = bench.begin()
                for piece in cut(batch, [1, 1]):
                    bench.step.microbatch(step_id, piece)
                    for name, row in self.fitting({**AT_ONCE, **HARMLESS}) if bad else ():
                        if row.by_all or bench.rank == 1:
                            told = raised_by(row.act, bench, batch)
                            kind = RuntimeError if name in AT_ONCE else type(None)
                            assert type(told) is kind, (name, told)
                assert bench.step.finish(step_id).updated
                assert "step" not in vars(bench.optimizer) or self.fsdp
            return bench.state()

        assert same(run(True), run(False))

    @pytest.mark.full
    @on_ranks(2)
    def test_a_loss_that_does_more_than_a_loss_is_refused_by_name(self) -> None:
        """Rank 1 alone does so, and on FSDP2 would wait for others inside of its backward."""

        def run(bad: bool) -> Any:
            bench = self.bench()
            batch = bench.batch(2)
            # Ranks that share experts meet in a backward, and rank 1 would wait there alone.
            rows = LOSSES[2:] if "ep" in self.layout else LOSSES
            for name, also in rows if bad else ():
                loss = Doing(also) if bench.rank == 1 else TokenLoss()
                told = raised_by(bench.run, [batch], loss=loss)
                assert name in str(told), (name, told)
                bench.step.abort()

            def look(total: Any, output: Any) -> None:
                torch.autograd.grad(total, output, retain_graph=True)

            assert bench.run([batch], loss=Doing(look) if bad else TokenLoss()).updated
            return bench.state()

        assert same(run(True), run(False))

    @pytest.mark.full
    @on_ranks(2)
    def test_a_function_of_a_step_that_ends_a_loop_is_named(self) -> None:
        for name, (options, begin) in FUNCTIONS.items():
            bench = self.bench(step=options)
            told = raised_by(bench.run, [list(cut(bench.batch(1), [1]))], **begin)
            assert name in str(told)
            assert "StopIteration" in str(told)
            bench.step.abort()
            if is_poisoned():
                bench.rebuild()

    @pytest.mark.full
    @on_ranks(2)
    def test_a_context_without_gradients_is_named(self) -> None:
        """Around `begin` on all ranks; around a batch or `finish` on one, whom others wait for."""

        def run(bad: bool) -> Any:
            bench = self.bench()
            batch = bench.batch(1)
            for name, context in CONTEXTS.items() if bad else ():
                with context():
                    refused(RuntimeError, name, bench.begin)
                step_id = bench.begin()
                if bench.rank or self.coupled:
                    with context() if bench.rank else torch.enable_grad():
                        told = raised_by(bench.step.microbatch, step_id, batch)
                    assert name in str(told), told
                with context():
                    told = raised_by(bench.step.finish, step_id)
                assert name in str(told), told
                bench.step.abort()
            assert bench.run([batch]).updated
            return bench.state()

        assert same(run(True), run(False))

    @pytest.mark.full
    @on_ranks(2)
    def test_a_parameter_that_is_nan_on_one_replica_stops_all_of_them(self) -> None:
        """Rank 1's embedding of a token that no batch has is NaN."""

        def steps(rule: str, bad: bool) -> Any:
            bench = self.bench(step={"non_finite": rule})
            rows = bench.batch(2)
            rows["input_ids"] = rows["input_ids"] % 8 + 8
            named = bench.module.named_parameters()
            [table] = [p.detach() for n, p in named if "word_emb" in n or n == "embedding.weight"]
            table = table.to_local() if self.fsdp else table
            if bad:
                before, step_id = table[3, 5].clone(), bench.begin()
                if bench.rank == 1:
                    table[3, 5] = float("nan")
                bench.step.microbatch(step_id, rows)
                error = raised_by(bench.step.finish, step_id)
                told = str(error) if error else bench.step.finish(step_id).skipped
                assert "rank 1: its parameter '" in told
                assert "is nan at [3, 5]" in told
                bench.step.abort() if error else None
                table[3, 5] = before
            assert bench.run([rows]).updated
            return bench.state()

        replicas = "pp" not in self.layout
        for rule in ("refuse", "skip")[: 1 if self.fsdp else 2] if replicas else ():
            assert same(steps(rule, True), steps(rule, False)), rule

    @on_ranks(2)
    def test_a_reading_changes_nothing_and_ends_with_its_errors(self) -> None:
        """Modes, random state and buffers are put back; nothing records gradients."""

        def run(read: bool) -> Any:
            bench = self.bench()
            step_id = bench.begin()
            for piece in cut(bench.batch(2), [1, 1]):
                bench.step.microbatch(step_id, piece)
                before, modes = bench.digest(), [each.training for each in bench.module.modules()]
                for error in (None, LookupError("lost")) if read else ():
                    told = raised_by(self.read, bench, error)
                    assert told is error
                    assert (bench.digest(), modes) == (
                        before,
                        [each.training for each in bench.module.modules()],
                    )
            result = bench.step.finish(step_id)
            return [*bench.bits(result), *bench.state()]

        assert same(run(True), run(False))

    def read(self, bench: Any, error: Exception | None) -> None:
        with bench.step.reading() as models:
            assert not any(each.training for model in models for each in model.modules())
            assert not torch.is_grad_enabled()
            torch.rand(3)
            for buffer in bench.module.buffers():
                buffer += 1
            if error is not None:
                raise error
