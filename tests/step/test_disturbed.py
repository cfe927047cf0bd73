"""Disturbances of an open step: each is refused by name, or changes nothing.

The next step has the bits of one that nothing has disturbed. What cannot be seen is in
docs/train-step/failures.md alone.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_bench import same
from ranks import on_ranks
from scenario import Bench, TokenLoss, cut, forward, raised_by

pytestmark = pytest.mark.full

#: Disturbs a bench whose step is open; the second argument is a batch.
Disturbance = Callable[[Bench, dict[str, Any]], Any]
#: Name → the disturbance, what the error says, and whether all ranks take part in it.
Table = dict[str, tuple[Disturbance, str, bool]]


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
    from megatron.core.pipeline_parallel import get_forward_backward_func

    get_forward_backward_func()(
        forward_step_func=None,
        data_iterator=iter([]),
        model=bench.model.chunks,
        num_microbatches=1,
        seq_length=1,
        micro_batch_size=1,
    )


def _part_steps(bench: Bench, batch: dict[str, Any]) -> None:
    getattr(bench.optimizer, "chained_optimizers", [bench.optimizer])[-1].step()


#: Refused in the call itself, so that nothing has happened and the step goes on.
AT_ONCE: Table = {
    "`optimizer.step()`": (
        lambda bench, _: bench.optimizer.step(),
        r"\.step\(\) was called while a step is open, .*Nothing was updated",
        False,
    ),
    "`step()` of one optimizer of a chain": (_part_steps, "Nothing was updated", False),
    "a schedule that trains the chunks": (_schedule, "a schedule was called to train", False),
    "a forward with gradients, FSDP2": (
        lambda bench, batch: bench.module(batch["input_ids"]),
        "a forward was called that records gradients",
        False,
    ),
}
GRADIENTS = "gradients were written between two calls of the step"
PARAMETERS = r"(\d+) of \1 trained parameters were written while the step was open"
#: Refused in `finish`, on all ranks.
IN_FINISH: Table = {
    "`zero_grad_buffer()`": (
        lambda bench, _: [chunk.zero_grad_buffer() for chunk in bench.model.chunks],
        GRADIENTS,
        False,
    ),
    "`scale_gradients()`": (
        lambda bench, _: [chunk.scale_gradients(0.5) for chunk in bench.model.chunks],
        GRADIENTS,
        False,
    ),
    "a backward of your own": (_own_backward, GRADIENTS, True),
    "a reduction of your own": (
        lambda bench, _: [chunk.finish_grad_sync() for chunk in bench.model.chunks],
        GRADIENTS,
        True,
    ),
    "`zero_grad()` after `last=True`, FSDP2": (
        lambda bench, _: bench.module.zero_grad(),
        GRADIENTS,
        False,
    ),
    "weights written in place": (_write, PARAMETERS, False),
    "`load_state_dict()`": (_load, PARAMETERS, False),
    "weights written through `.data`, 16 bits": (
        _write_through_data,
        "main parameters do not round to the model's",
        False,
    ),
}
#: Changes nothing: the step has the same bits.
HARMLESS: dict[str, Disturbance] = {
    "`optimizer.zero_grad()`": lambda bench, _: bench.optimizer.zero_grad(),
    "`step()` of the torch optimizer inside of Megatron's": lambda bench, _: _inner_step(bench),
    "gradients copied away and back, Megatron": lambda bench, _: _gradients_away_and_back(bench),
    "`model.eval()`": lambda bench, _: bench.module.eval(),
    "parameters moved to other memory, FSDP2": lambda bench, _: bench.module._apply(torch.clone),
    "`reading()`": lambda bench, _: _read(bench),
}
#: What a loss does beside its sum, and what the error says; None if the step has the same bits.
LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str | None]] = {
    "`loss.backward()` in the loss": (lambda total, _: total.backward(), "ran a backward"),
    "`loss.backward(retain_graph=True)` in the loss": (
        lambda total, _: total.backward(retain_graph=True),
        "ran a backward through the model by itself",
    ),
    "`torch.autograd.grad()` of the output in the loss": (
        lambda total, output: torch.autograd.grad(total, output, retain_graph=True),
        None,
    ),
    "StopIteration from the loss": (
        lambda *_: next(iter(())),
        "the loss raised StopIteration, which a `for`",
    ),
    "SystemExit from the loss": (lambda *_: sys.exit(3), "the loss raised SystemExit: 3, which"),
}


def _gradients_away_and_back(bench: Bench) -> None:
    for chunk in bench.model.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            kept = buffer.grad_data.clone()
            buffer.grad_data.zero_()
            buffer.grad_data.copy_(kept)


def _inner_step(bench: Bench) -> None:
    for one in getattr(bench.optimizer, "chained_optimizers", [bench.optimizer]):
        one.optimizer.step()


def _read(bench: Bench) -> None:
    with bench.step.reading() as models:
        assert all(not model.training for model in models)


def _fits(name: str, engine: str, layout: dict[str, Any]) -> bool:
    """Return whether a row is of this engine and layout."""
    if engine == "fsdp":
        known = "`optimizer.step()`", "weights written in place", *HARMLESS
        return "FSDP2" in name or (name in known and "Megatron" not in name)
    if "own" in name and "pp" in layout:  # it would wait for the stage before
        return False
    if IN_FINISH.get(name, ("", ""))[1] == PARAMETERS and layout.get("dtype") == "bf16":
        return False  # they are named as those that differ from the main parameters
    return "FSDP2" not in name and ("16 bits" not in name or layout.get("dtype") == "bf16")


@contextmanager
def _kept(bench: Bench) -> Iterator[None]:
    """Put weights back that are written inside."""
    values = [(p, p.detach().clone()) for p in bench.module.parameters()]
    yield
    for parameter, value in values:
        parameter.data.copy_(value)


def disturbed(engine: str, layout: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Runs on a rank: the error of each disturbance, and whether the next step has its bits."""

    def run(bad: bool) -> Any:
        bench, told = Bench(engine, **layout), {}
        batch = bench.batch(2)
        for name, (disturb, _, by_all) in {**AT_ONCE, **IN_FINISH}.items() if bad else ():
            if not _fits(name, engine, layout):
                continue
            with _kept(bench):
                step_id, here = bench.begin(), by_all or bench.rank == 1
                bench.step.microbatch(step_id, batch, last="last" in name)
                error = raised_by(disturb, bench, batch) if here else None
                if name in IN_FINISH:
                    assert error is None, (name, error)
                    if "last" not in name:
                        bench.step.microbatch(step_id, batch)
                    error = raised_by(bench.step.finish, step_id)
                bench.step.abort()
            told[name] = f"{type(error).__name__}: {error}"
        assert bench.run([batch]).updated
        return told, bench.state()

    told, got = run(True)
    return told, same(got, run(False)[1])


LAYOUTS = [
    ("megatron", {}),
    ("megatron", {"dtype": "bf16"}),
    ("megatron", {"distributed_optimizer": False}),
    ("megatron", {"pp": 2}),
    ("fsdp", {}),
]
EACH = pytest.mark.parametrize(("engine", "layout"), LAYOUTS, ids=str)


@EACH
def test_a_disturbance_is_refused_and_the_next_step_has_its_bits(megatron_ranks, engine, layout):
    (other, _), (told, right) = megatron_ranks(2, disturbed, engine, layout)
    for name, (_, text, by_all) in {**AT_ONCE, **IN_FINISH}.items():
        if not _fits(name, engine, layout):
            continue
        assert re.search(text, told[name], re.DOTALL), (name, told[name])
        if name in AT_ONCE:
            assert told[name].startswith("RuntimeError"), name
            assert other[name] == "NoneType: None"
        else:
            assert told[name].startswith("WindowAborted"), name
            named = r"rank 0: .*rank 1: " if by_all else "^WindowAborted: rank 1: "
            assert re.search(named, other[name], re.DOTALL), (name, other[name])
            assert "abort() the step on all ranks, and begin again" in other[name] or layout
    assert right


@EACH
@on_ranks(2)
def test_a_step_goes_on_after_what_is_refused_at_once_or_harmless(
    engine: str, layout: dict[str, Any]
) -> None:

    def run(bad: bool) -> Any:
        bench = Bench(engine, **layout)
        batch = bench.batch(2)
        for _ in range(2):
            step_id = bench.begin()
            for piece in cut(batch, [1, 1]):
                bench.step.microbatch(step_id, piece)
                rows = [(name, row[0]) for name, row in AT_ONCE.items()]
                for name, disturb in (*rows, *HARMLESS.items()) if bad else ():
                    # A reading is a gather on FSDP2, and on all ranks alike.
                    if _fits(name, engine, layout) and (bench.rank or name == "`reading()`"):
                        assert (raised_by(disturb, bench, batch) is None) is (name in HARMLESS)
            assert bench.step.finish(step_id).updated
            assert "step" not in vars(bench.optimizer) or engine == "fsdp"
        return bench.state()

    assert same(run(True), run(False))


class _Loss(TokenLoss):
    """Does something beside its sum."""

    def __init__(self, also: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.also = also

    def __call__(self, output: Any, microbatch: Any) -> Any:
        total, metrics = super().__call__(output, microbatch)
        self.also(total, output)
        return total, metrics


@pytest.mark.parametrize(
    ("engine", "layout"), [("megatron", {}), ("megatron", {"pp": 2}), ("fsdp", {})], ids=str
)
@on_ranks(2)
def test_a_loss_that_does_more_than_a_loss_is_refused_by_name(
    engine: str, layout: dict[str, Any]
) -> None:
    """Rank 1 alone does so, and on FSDP2 would wait for others inside of its backward."""

    def run(bad: bool) -> Any:
        bench = Bench(engine, **layout)
        batch, told = bench.batch(2), {}
        for name, (also, text) in LOSSES.items() if bad else ():
            if text is not None:
                loss = _Loss(also) if bench.rank == 1 else TokenLoss()
                told[name] = str(raised_by(bench.run, [batch], loss=loss))
                bench.step.abort()
        [harmless] = [also for also, text in LOSSES.values() if text is None]
        assert bench.run([batch], loss=_Loss(harmless) if bad else TokenLoss()).updated
        return told, bench.state()

    told, got = run(True)
    for name, text in told.items():
        assert LOSSES[name][1] in text, (name, text)
    assert same(got, run(False)[1])


def _ends(*_: Any) -> Any:
    return next(iter(()))


#: Functions of a step beside its loss.
FUNCTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "forward": ({"forward": _ends}, {}),
    "shape": ({"shape": _ends}, {}),
    "counts": ({"counts": _ends}, {}),
    "divisor": ({}, {"divisor": _ends}),
}


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@on_ranks(1)
def test_a_function_of_a_step_that_ends_a_loop_is_named(engine: str) -> None:
    for name, (options, begin) in FUNCTIONS.items():
        bench = Bench(engine, step=options)
        rows = list(cut(bench.batch(1), [1]))
        told = raised_by(bench.run, [rows], **begin)
        assert f"{name} raised StopIteration, which a `for`" in str(told), name
        bench.step.abort()


@on_ranks(1)
def test_an_exit_by_a_signal_goes_through_a_loss() -> None:
    """A handler that ends the process on SIGTERM is not the loss's own."""

    def end(number: int, frame: Any) -> None:
        sys.exit(7)

    before = signal.signal(signal.SIGTERM, end)
    try:
        bench = Bench()
        with pytest.raises(SystemExit, match="7"):
            bench.run([bench.batch(1)], loss=_Loss(lambda *_: signal.raise_signal(signal.SIGTERM)))
        bench.step.abort()
    finally:
        signal.signal(signal.SIGTERM, before)


CONTEXTS = {"torch.no_grad": torch.no_grad, "torch.inference_mode": torch.inference_mode}


@pytest.mark.parametrize(
    ("engine", "layout"), [("megatron", {}), ("megatron", {"pp": 2}), ("fsdp", {})], ids=str
)
@on_ranks(2)
def test_a_context_without_gradients_is_named(engine: str, layout: dict[str, Any]) -> None:
    """Around `begin` on all ranks; around a batch or `finish` on one, whom others wait for."""

    def run(bad: bool) -> Any:
        bench = Bench(engine, **layout)
        batch, waits = bench.batch(1), engine == "fsdp" or layout
        for name, context in CONTEXTS.items() if bad else ():
            with context():
                assert f"begin() was called inside of {name}()" in str(raised_by(bench.begin))
            step_id = bench.begin()
            if bench.rank or waits:
                with context() if bench.rank else torch.enable_grad():
                    error = raised_by(bench.step.microbatch, step_id, batch)
                assert f"microbatch() was called inside of {name}()" in str(error)
            with context():
                error = raised_by(bench.step.finish, step_id)
            assert f"finish() was called inside of {name}()" in str(error)
            bench.step.abort()
        assert bench.run([batch]).updated
        return bench.state()

    assert same(run(True), run(False))


def test_the_page_names_what_changes_nothing() -> None:
    page = (Path(__file__).parents[2] / "docs" / "train-step" / "failures.md").read_text("utf-8")
    section = page.partition("## What disturbs an open step?\n")[2].partition("\n## ")[0]
    section = " ".join(section.split())
    for name in (*HARMLESS, *(loss for loss, (_, error) in LOSSES.items() if error is None)):
        assert f"{name}; " in section or f"{name}. " in section, name
