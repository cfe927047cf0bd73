"""A rank that is interrupted where its peers are, or may be, in a collective: all ranks know."""

from __future__ import annotations

from typing import Any

import pytest


class Broken(Exception):
    """What the interrupted rank raises."""


def _on_the_way(step: Any) -> None:
    """Behind the agreement on the last batch, and before it is run."""

    def run(*_: Any) -> None:
        raise Broken

    step._open._run = run


def _after(model: Any, name: str, number: int) -> None:
    """Behind the start of a bucket group's collective, before anybody has its handle."""
    group = model.chunks[0].bucket_groups[number]
    start = getattr(group, name)

    def started(*args: Any, **kwargs: Any) -> None:
        start(*args, **kwargs)
        vars(group).pop(name)
        raise Broken

    setattr(group, name, started)


def left(where: str) -> tuple[bool, bool]:
    """On a rank: one rank leaves a step; whether this one is told, and starts nothing more.

    Then the process groups are made anew, and the step.
    """
    import torch
    from split_bench import ROWS, TokenLoss, build, data, forward, raised_by, split_step, state

    from megatron_idempotent import TrainStep, rebuild_process_groups
    from megatron_idempotent.window.agreement import is_poisoned

    options = {"overlap_param_gather": True}
    model, scheduler, replica = build(**options)
    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=3)
    batches = [data(number, 2 * ROWS, replica) for number in range(3)]
    for batch in batches[:2]:
        split_step(step, TokenLoss(), batch, [1, 1], last=True)
    name = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    if torch.distributed.get_rank() == 1:
        if where == "on the way":
            _on_the_way(step)
        else:
            _after(model, where, 1)
    told = raised_by(step.microbatch, name, batches[2], last=True)
    told = told or raised_by(step.finish, name)
    raised_by(step.abort)
    poisoned = is_poisoned()
    rebuild_process_groups(model.chunks, model.optimizer)
    split_step(step, TokenLoss(), batches[2], [1, 1], last=True)
    got = state(model, scheduler)

    model, scheduler, _ = build(**options)
    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)
    for batch in batches:
        split_step(step, TokenLoss(), batch, [1, 1], last=True)
    assert all(map(torch.equal, got, state(model, scheduler)))
    return told is not None, poisoned


@pytest.mark.parametrize("where", ["on the way", "start_grad_sync", "start_param_sync"])
def test_all_ranks_are_told_and_the_next_step_is_right(megatron_ranks, where):
    assert megatron_ranks(2, left, where) == [(True, True)] * 2
