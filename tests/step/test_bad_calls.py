"""Models, optimizers and surroundings that a `TrainStep` cannot have are refused by name.

Bad batches and arguments are in `contract_refusals`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from scenario import Bench, build, cut, raised_by
from step_backend import refused

import megatron_idempotent
from megatron_idempotent import WindowAborted
from megatron_idempotent.step import microbatches

pytestmark = pytest.mark.full


@on_ranks(1)
def test_a_model_that_a_step_cannot_have_is_refused() -> None:
    """Chunks, optimizers and settings of Megatron's that a step cannot have."""

    bench = Bench()
    chunks, optimizer, _ = bench.parts
    for given, name in (
        ((chunks[0], optimizer), "chunks"),
        (([], optimizer), "chunk"),
        ((chunks, torch.optim.SGD([torch.ones(1)])), "SGD"),
    ):
        assert name in str(raised_by(megatron_idempotent.TrainStep, *given))
    for owner, name, value in (
        (bench.model.config, "overlap_moe_expert_parallel_comm", True),
        (bench.model.config, "gtp_weight_remat_size", 2),
        (bench.model.config, "expert_gtp_weight_remat_size", 2),
        (chunks[0].ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", True),
    ):
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        refused(ValueError, name, megatron_idempotent.TrainStep, chunks, optimizer)
        setattr(owner, name, before)
    assert bench.run([bench.batch(1)]).updated


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        ({}, ""),
        pytest.param({"distributed_optimizer": False}, "", marks=pytest.mark.exhaustive),
        ({"distributed_optimizer": False, "dtype": "bf16"}, "embedding"),
        pytest.param({"dtype": "bf16"}, "embedding", marks=pytest.mark.exhaustive),
        ({"experts": 4}, ""),
    ],
    ids=str,
)
@on_ranks(1)
def test_an_optimizer_of_another_model_is_refused(options: dict[str, Any], frozen: str) -> None:
    """An optimizer is for the model that it was made of, and for no other."""

    def freeze(module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))

    own, _, _ = build(before_ddp=freeze, **options)
    other, _, _ = build(before_ddp=freeze, **options)
    megatron_idempotent.TrainStep(own.chunks, own.optimizer)
    megatron_idempotent.TrainStep(other.chunks, other.optimizer)
    kind = megatron_idempotent.TrainStep
    refused(ValueError, "parameters are not the chunks'", kind, own.chunks, other.optimizer)


@on_ranks(1)
def test_an_optimizer_of_another_ddp_is_refused() -> None:
    """Two DDPs over the same modules, one of matrices and one of vectors."""

    def train(module: Any, *, vectors: bool) -> None:
        for parameter in module.parameters():
            parameter.requires_grad_((parameter.dim() == 1) is vectors)

    model, _, _ = build(before_ddp=lambda module: train(module, vectors=False))
    chunk = model.chunks[0]
    train(chunk.module, vectors=True)
    again = type(chunk)(chunk.config, chunk.ddp_config, chunk.module)
    refused(ValueError, "DDP", megatron_idempotent.TrainStep, [again], model.optimizer)


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
@on_ranks(2)
def test_autocast_and_parameters_that_are_frozen_later_are_named(
    layout: dict[str, Any],
) -> None:
    """Rank 1 is in autocast, then freezes all parameters after DDP was built."""
    bench = Bench(**layout)
    batch, here = bench.batch(2), bench.rank == 1
    step_id = bench.begin()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=here):
        told = raised_by(bench.step.microbatch, step_id, batch)
    if here or layout:
        assert "torch.autocast('cpu')" in str(told)
        bench.step.microbatch(step_id, batch)
    assert bench.step.finish(step_id).updated

    parameters = list(bench.module.parameters())
    step_id = bench.begin()
    for parameter in parameters:
        parameter.requires_grad_(not here)
    error = raised_by(bench.step.microbatch, step_id, batch)
    error = error or raised_by(bench.step.finish, step_id)
    assert ("are frozen now" in str(error)) if here else str(error).startswith("rank 1: ")
    bench.step.abort()
    for parameter in parameters:
        parameter.requires_grad_(True)
    assert bench.run([batch]).updated


@on_ranks(2)
def test_masks_on_a_device_are_judged_at_the_end() -> None:
    """Nothing may be read before the end of the step, as on a GPU.

    Counts with a fraction on one rank and without on the other are added up all the same.
    """
    bench = Bench()
    batch = bench.batch(2)
    [first] = cut(batch, [1])
    counts = 2, 7.5 if bench.rank == 1 else 8
    result = bench.run([[{**first, "counts": counts}]])
    assert (result.updated, result.global_valid_tokens) == (True, 15.5)

    microbatches.on_host = lambda values: False
    mask = batch["token_mask"] * (2 if bench.rank == 1 else 1)
    told = raised_by(bench.run, [{**batch, "token_mask": mask}])
    bench.step.abort()
    assert bench.run([batch]).updated
    assert "rank 1: ValueError: count 0 of 1" in str(told)


@on_ranks(1)
def test_a_window_without_a_deadline_is_refused() -> None:
    window = megatron_idempotent.window
    for call in (window.agree, window.guarded_window):
        refused(ValueError, "deadline_s", call, None, deadline_s=float("inf"))


@on_ranks(2)
def test_one_learning_rate_is_refused_if_a_group_has_its_own() -> None:
    """`--decoupled-lr` gives embeddings another rate, which one for all groups would overwrite."""
    rates = {"lr": 1e-3, "min_lr": 0.0, "decoupled_lr": 0.25, "decoupled_min_lr": 0.25}
    bench = Bench(optimizer_overrides=rates)
    groups = bench.optimizer.param_groups
    assert {group["max_lr"] for group in groups} == {1e-3, 0.25}
    before, batch = bench.digest(), bench.batch(1)
    own = [group for group in groups if group["max_lr"] == 0.25]
    for mixed_ranks in ({1}, {0, 1}):
        is_mixed = bench.rank in mixed_ranks  # else as a pipeline stage without embeddings
        for group in own:
            group.update(is_decoupled_lr=is_mixed, default_config=not is_mixed)
        error = raised_by(bench.run, [batch], finish={"lr": 2e-3})
        assert isinstance(error, WindowAborted)
        assert set(error.failures) == mixed_ranks
        assert "max_lr=0.25" in error.failures[1]
        bench.step.abort()
        assert bench.digest() == before
    bench.run([batch])
    warmed_up = 8 / 100  # `scheduler_of`'s, after 8 samples
    assert {group["lr"] for group in own} == {0.25 * warmed_up}
    # A step reports the common rate, wherever that group is in the list.
    for group in groups:
        group["wd_mult"] = 0.0 if group["max_lr"] == 1e-3 else 1.0  # the order of MuP's groups
    # Both numbers are rounded twice, each time by at most 2**-53 of them.
    assert bench.run([batch]).lr == pytest.approx(1e-3 * warmed_up, rel=2**-50)
