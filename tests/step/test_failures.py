"""A rank that fails, and what all ranks are told; see test_stop_anywhere.py for where."""

from __future__ import annotations

import time
from typing import Any

import pytest


class Broken(Exception):
    """The failing rank raises this."""


def in_the_loss(options: dict[str, Any], last: bool) -> list[str]:
    """Runs on a rank: the loss raises on the last rank; what each call of the step came to."""
    import torch
    from scenario import ROWS, TokenLoss, build, data, forward, parameters, raised_by, split_step

    from megatron_idempotent import TrainStep

    rank = torch.distributed.get_rank()

    class Failing(TokenLoss):
        armed = True

        def __call__(self, output, microbatch):
            if self.armed and rank == torch.distributed.get_world_size() - 1:
                raise Broken("no reward")
            return super().__call__(output, microbatch)

    def run(fail: bool):
        model, scheduler, replica = build(**options)
        step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)
        batch = data(1, 4 * ROWS, replica)
        told: list[BaseException | None] = []
        if fail:
            step_id = step.begin(Failing(), global_batch_size=8, micro_batch_size=ROWS)
            told.append(raised_by(step.microbatch, step_id, batch, last=last))
            told.append(raised_by(step.finish, step_id) if told[0] is None else None)
            step.abort(step_id)
        split_step(step, TokenLoss(), batch, [4])
        return told, parameters(model)

    told, got = run(True)
    _, want = run(False)
    assert torch.equal(got, want)
    return [f"{type(each).__name__}: {each}" for each in told]


@pytest.mark.parametrize("last", [False, True])
def test_where_nobody_waits_the_failing_rank_raises_what_it_raised(megatron_ranks, last):
    fine, failing = megatron_ranks(2, in_the_loss, {"overlap_param_gather": True}, last)
    assert failing == ["Broken: no reward", "NoneType: None"]
    assert fine[0] == "NoneType: None"
    assert fine[1].startswith("WindowAborted: rank 1: Broken: no reward")


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({"pp": 2}, False),
        ({"pp": 2}, True),
        pytest.param({"tp": 2}, False, marks=pytest.mark.exhaustive),
        ({"tp": 2}, True),
        ({"ep": 2, "experts": 4}, False),
        pytest.param({"ep": 2, "experts": 4}, True, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_where_others_wait_all_raise_at_the_same_batch(megatron_ranks, options, last):
    for told in megatron_ranks(2, in_the_loss, options, last):
        assert told[0].startswith("WindowAborted: rank 1: loss: Broken: no reward")
        assert told[1] == "NoneType: None"


def in_a_layer(options: dict[str, Any]) -> str:
    """Runs on a rank: a layer raises on rank 1, where the other waits for it; what that comes
    to."""
    import torch
    from scenario import ROWS, TokenLoss, build, data, forward, raised_by

    from megatron_idempotent import TrainStep

    model, scheduler, replica = build(**options)
    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=3)

    def broken(*_: Any) -> None:
        raise Broken("out of memory")

    if torch.distributed.get_rank() == 1:
        model.chunks[0].module.decoder.layers[1].mlp.register_forward_pre_hook(broken)
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    told = raised_by(step.microbatch, step_id, data(1, ROWS, replica))
    return type(told).__name__


@pytest.mark.parametrize("options", [{"tp": 2}, {"ep": 2, "experts": 4}], ids=["tp2", "ep2"])
def test_a_layer_that_raises_where_others_wait_inside_poisons_the_session(megatron_ranks, options):
    assert megatron_ranks(2, in_a_layer, options) == ["SessionPoisoned"] * 2


def a_bad_batch() -> None:
    """Runs on a rank: a batch that one stage cannot take, one that differs, and then a good one.

    Only the second replica has them; the first goes on without a word.
    """
    import torch
    from scenario import ROWS, TokenLoss, build, data, forward, raised_by

    from megatron_idempotent import TrainStep, WindowAborted

    model, scheduler, replica = build(pp=2)
    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)
    batch = data(1, 2 * ROWS, replica)
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    rank = torch.distributed.get_rank()
    last = rank == 3
    for given, part in (
        ({**batch, "sample_mask": torch.ones(1)} if last else batch, "rank 3: ValueError"),
        ({n: v[:ROWS] for n, v in batch.items()} if last else batch, "give all of them the same"),
    ):
        if replica == 0:
            continue
        told = raised_by(step.microbatch, step_id, given)
        assert isinstance(told, WindowAborted)
        assert part in str(told)
        assert "as it was" in str(told)
    step.microbatch(step_id, batch)
    assert step.finish(step_id).updated


def test_a_batch_that_one_stage_cannot_take_is_taken_by_none(megatron_ranks):
    megatron_ranks(4, a_bad_batch)


def in_the_update(undo: bool) -> list[str]:
    """Runs on a rank: the inner optimizer raises after its update, on all ranks."""
    import torch
    from scenario import ROWS, TokenLoss, build, data, forward, parameters, raised_by, split_step

    from megatron_idempotent import TrainStep, WindowAborted

    model, scheduler, replica = build()
    step = TrainStep(
        model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20, undo=undo
    )
    batch = data(1, 2 * ROWS, replica)
    split_step(step, TokenLoss(), batch, [2])
    before = parameters(model)
    chained = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    inner = chained[0].optimizer
    update = inner.step

    def broken(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        raise Broken("out of memory")

    inner.step = broken
    told = raised_by(split_step, step, TokenLoss(), batch, [2])
    inner.step = update
    assert isinstance(told, WindowAborted)
    step.abort()
    again = raised_by(step.begin, TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    return [str(told), str(again), str(torch.equal(parameters(model), before))]


def test_an_update_that_broke_off_can_be_undone(megatron_ranks):
    for told, again, untouched in megatron_ranks(2, in_the_update, True):
        assert "All ranks can go back" in told
        assert (again, untouched) == ("None", "True")


def test_without_a_copy_a_checkpoint_is_asked_for(megatron_ranks):
    for told, again, untouched in megatron_ranks(2, in_the_update, False):
        assert "undo=True" in told
        assert "load a checkpoint" in again
        assert untouched == "False"


def absent() -> float:
    """Runs on a rank: the other one never comes to the end of the step; seconds until that is
    told."""
    import torch
    from scenario import ROWS, TokenLoss, build, data, forward, raised_by

    from megatron_idempotent import SessionPoisoned, TrainStep

    model, scheduler, replica = build()
    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=3)
    step_id = step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    step.microbatch(step_id, data(1, ROWS, replica))
    start = time.monotonic()
    if torch.distributed.get_rank() == 1:
        time.sleep(6)
        return 3.0
    told = raised_by(step.finish, step_id)
    assert isinstance(told, SessionPoisoned)
    assert "not all ranks came to finish of step 'step-0' within 3 s" in str(told)
    waited = time.monotonic() - start
    step.abort()
    assert isinstance(
        raised_by(step.begin, TokenLoss(), global_batch_size=8, micro_batch_size=ROWS),
        SessionPoisoned,
    )
    return waited


def test_a_rank_that_does_not_come_ends_the_session_within_the_deadline(megatron_ranks):
    for waited in megatron_ranks(2, absent):
        assert 2 < waited < 5.5
