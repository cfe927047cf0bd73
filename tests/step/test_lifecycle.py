"""A step is begun, fed and ended once per id; anything else is an error that changes nothing."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from scenario import Bench, TokenLoss, build, raised_by

import megatron_idempotent

pytestmark = pytest.mark.full


def _raised(error, call, *args, **kwargs):
    raised = raised_by(call, *args, **kwargs)
    assert isinstance(raised, error), raised
    return str(raised)


def messages(lengths: list[int]) -> list[tuple[str, int]]:
    """Runs on a rank: what is heard of ranks that each bring so many rows of metrics."""
    from megatron_idempotent.step.status import RankStatus, all_gather_status

    rank = dist.get_rank()
    rows = tuple({"loss": float(row), f"of {rank}": 1.0} for row in range(lengths[rank]))
    said = all_gather_status(
        RankStatus(phase="finish", step_id=f"step of {rank}", updates=0, rows=rows), 20.0
    )
    assert all(say.rows[-1]["loss"] == len(say.rows) - 1 for say in said if say.rows)
    return [(say.step_id, len(say.rows)) for say in said]


def test_what_ranks_say_arrives_whole_whatever_its_length(megatron_ranks):
    for lengths in ([0, 1], [2000, 0], [2000, 3000]):
        want = [(f"step of {rank}", length) for rank, length in enumerate(lengths)]
        assert megatron_ranks(2, messages, lengths) == [want] * 2


def all_fail() -> tuple[str, str]:
    """Runs on a rank: all losses fail; the first lines of the error, and of its pickled copy."""

    class Loss(TokenLoss):
        def __call__(self, output, microbatch):
            raise LookupError(f"bad sample of rank {bench.rank}\nin the file")

    bench = Bench(pp=2, layers_per_stage=1, loss=Loss())
    told = raised_by(bench.run, [bench.batch(1)], last=True)
    copy = pickle.loads(pickle.dumps(told))
    bench.step.abort()
    return str(told).splitlines()[0], str(copy).splitlines()[0]


def test_an_aborted_window_begins_with_the_ranks_own_error(megatron_ranks):
    found = megatron_ranks(4, all_fail)
    for rank in (2, 3):  # the last stages, which have the loss
        assert found[rank] == (f"rank {rank}: loss: LookupError: bad sample of rank {rank}",) * 2
    assert found[0][0].startswith("rank 2: loss: LookupError")


@on_ranks(2)
def test_what_it_stands_on_is_asked_for_before_any_collective() -> None:
    """No patches, no finalize function, no optimizer, a schedule called
    directly."""

    def apply(*excluded: str) -> None:
        megatron_idempotent.revert()
        megatron_idempotent.apply(exclude=excluded)

    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    model, _, _ = build(experts=4, config_overrides=bias)
    megatron_idempotent.revert()
    told = _raised(RuntimeError, megatron_idempotent.TrainStep, model.chunks, model.optimizer)
    assert "aux-loss-scale-left-set (disabled: " in told
    assert "forward-only-counts-tokens (disabled: " in told
    assert "counts for its expert bias" in told
    assert "megatron_idempotent.apply(), and exclude none of them" in told
    apply("forward-only-counts-tokens")
    told = _raised(RuntimeError, megatron_idempotent.TrainStep, model.chunks, model.optimizer)
    assert "forward-only-counts-tokens (disabled: " in told
    assert "aux-loss-scale-left-set" not in told
    bench = Bench()
    step, model = bench.step, bench.model
    apply("forward-only-counts-tokens")
    reference = megatron_idempotent.TrainStep(model.chunks)  # this model has no expert bias
    megatron_idempotent.apply()

    name = reference.begin(bench.loss, micro_batch_size=2, global_batch_size=8)
    assert "without an optimizer" in _raised(RuntimeError, reference.finish, name)
    reference.abort()

    name = bench.begin()
    step.microbatch(name, bench.batch(2))
    gradients = model.gradients()
    assert gradients.any()
    bench.step = megatron_idempotent.TrainStep(model.chunks, model.optimizer)
    assert "is open for these chunks" in _raised(RuntimeError, bench.begin)
    assert "is open for these chunks" in _raised(
        RuntimeError, model.forward_backward, 1, data_seed=1, zero_first=False
    )
    assert torch.equal(model.gradients(), gradients)
    finalize = model.config.finalize_model_grads_func
    model.config.finalize_model_grads_func = None
    assert "wire_train_config" in _raised(RuntimeError, step.finish, name)
    model.config.finalize_model_grads_func = finalize
    assert step.finish(name).updated
    # A config function that is None is None again, and the others are the caller's.
    assert model.config.finalize_model_grads_func is finalize
    assert model.config.grad_sync_func is None
    assert model.config.no_sync_func == model.chunks[0].no_sync
    model.forward_backward(1, data_seed=1)


SHARED = {"tp": 2, "sequence_parallel": True}


def refused_without(patch_id: str, layout: dict[str, Any], per_token: bool) -> tuple[bool, bool]:
    """Runs on a rank; returns whether this Megatron has the hazard, and whether a step refuses."""

    megatron_idempotent.revert()
    rows = {row.id: row.status for row in megatron_idempotent.apply(exclude=[patch_id])}
    overrides = {"calculate_per_token_loss": per_token}
    model, _, _ = build(experts=4, config_overrides=overrides, **layout)
    megatron_idempotent.revert()
    megatron_idempotent.apply(exclude=[patch_id])
    told = raised_by(megatron_idempotent.TrainStep, model.chunks, model.optimizer)
    refused = f"{patch_id} (disabled: " in str(told)
    assert refused == (told is not None), told
    return rows[patch_id] == "disabled", refused


@pytest.mark.parametrize(
    ("layout", "per_token"), [(SHARED, True), (SHARED, False), ({}, True)], ids=str
)
def test_auxiliary_losses_of_shared_sequences_want_their_patch(megatron_ranks, layout, per_token):
    """Their weight is wrong per token alone, and only where ranks share a sequence."""
    arguments = ("aux-loss-counts-own-tokens", layout, per_token)
    for there, refused in megatron_ranks(2, refused_without, *arguments):
        assert refused == (there and per_token and bool(layout))
