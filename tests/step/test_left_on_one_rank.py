"""A rank that is interrupted where its peers are, or may be, in a collective: all ranks know."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contract_failures import raise_behind
from ranks import on_ranks
from scenario import Bench, cut, raised_by

from megatron_idempotent.step import status
from megatron_idempotent.window.agreement import is_poisoned


class Broken(Exception):
    """The interrupted rank raises this."""


def _on_the_way(step: Any) -> None:
    """Interrupts after the agreement on the last batch, and before it is run."""

    def run(*_: Any) -> None:
        raise Broken

    step._open._run = run


def _starting(model: Any, when: str, name: str) -> None:
    """Before a bucket group's collective is started, as it is put together, or after.

    After, nobody has its handle yet.
    """
    from megatron.core.distributed import param_and_grad_buffer

    group = model.chunks[0].bucket_groups[1]
    start, coalescing = getattr(group, name), param_and_grad_buffer._coalescing_manager

    @contextlib.contextmanager
    def left(*args: Any, **kwargs: Any) -> Iterator[Any]:
        param_and_grad_buffer._coalescing_manager = coalescing
        yield coalescing(*args, **kwargs).__enter__()
        raise Broken

    def started(*args: Any, **kwargs: Any) -> None:
        vars(group).pop(name)
        if when == "inside":
            param_and_grad_buffer._coalescing_manager = left
        if when != "before":
            start(*args, **kwargs)
        raise Broken

    setattr(group, name, started)


def left(
    places: list[str], last: bool = True, go_on: bool = True
) -> tuple[list[tuple[str, bool]], list[bool]]:
    """Runs on a rank: one rank leaves a step at each place; what this one is told, and whether the
    session has ended.

    To go on, the step is made again, in new process groups if the session has ended: then also
    whether all that the next step depends on is what it is where nobody has left.
    """

    def run(bench: Any, number: int) -> None:
        bench.run(list(cut(bench.batch(2, seed=number), [1, 1])), last=True)

    bench = Bench(overlap_param_gather=True, step={"deadline_s": 3})
    run(bench, 0)
    run(bench, 1)
    seen, got = [], []
    for number, where in enumerate(places, start=2):
        name = bench.begin()
        if bench.rank == 1:
            if where == "on the way":
                _on_the_way(bench.step)
            else:
                _starting(bench.model, *where.split())
        told = raised_by(bench.step.microbatch, name, bench.batch(2, seed=number), last=last)
        told = told or raised_by(bench.step.finish, name)
        raised_by(bench.step.abort)
        seen.append((type(told).__name__, is_poisoned()))
        if not go_on:
            return seen, []
        if is_poisoned():
            bench.rebuild()
        run(bench, number)
        got.append([each.clone() for each in bench.state()])

    bench = Bench(overlap_param_gather=True)
    right = []
    for number in range(2 + len(places)):
        run(bench, number)
        if number >= 2:
            right.append(all(map(torch.equal, got[number - 2], bench.state())))
    return seen, right


@pytest.mark.parametrize("where", ["on the way", "after start_grad_sync"])
def test_all_ranks_are_told(megatron_ranks, where):
    (told, _), ([(_, poisoned)], _) = megatron_ranks(2, left, [where], True, False)
    assert told == [("SessionPoisoned", True)]
    assert poisoned


# New process groups cost seconds, in each of them.
@pytest.mark.parametrize(
    ("where", "last"),
    [
        pytest.param("on the way", True, marks=pytest.mark.exhaustive),
        pytest.param("after start_grad_sync", True, marks=pytest.mark.exhaustive),
        ("after start_param_sync", True),
        pytest.param("after start_param_sync", False, marks=pytest.mark.exhaustive),
    ],
)
def test_the_next_step_is_right(megatron_ranks, where, last):
    (told, right), ([(_, poisoned)], also) = megatron_ranks(2, left, [where], last)
    assert told == [("SessionPoisoned", True)]
    assert poisoned
    assert right == also == [True]


def test_the_session_goes_on_where_nothing_was_started(megatron_ranks):
    whats, wheres = ("start_grad_sync", "start_param_sync"), ("before", "inside")
    places = [f"{where} {what}" for what in whats for where in wheres]
    (told, right), (here, also) = megatron_ranks(2, left, places)
    assert told == [("WindowAborted", False)] * 4
    assert not any(poisoned for _, poisoned in here)
    assert right == also == [True] * 4


@on_ranks(2)
def test_ranks_of_which_one_went_back_do_not_train_on() -> None:
    """One is interrupted as it hears that all have updated, and goes back alone."""
    bench = Bench(step={"deadline_s": 3, "undo": True})
    batch = bench.batch(2)
    bench.run([batch])
    if bench.rank == 1:
        raise_behind(status, "_all_gather_bytes", r"\x07updated")  # as pickle writes the word
    told = []
    for _ in range(2):
        told.append(str(raised_by(bench.run, [batch])))
        raised_by(bench.step.abort)
    assert is_poisoned()
    bench.rebuild()
    told.append(str(raised_by(bench.run, [batch], step_id="of both")))
    assert "rank 0: has made 2 updates, others [1]" in told[2]
