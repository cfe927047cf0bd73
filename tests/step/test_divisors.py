"""Sums of a step are divided by what the loss says: tokens, groups, the caller's own number."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest


def divided(engine: str, options: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Runs on a rank: gradients of a loss under each divisor, against those of the bare sum."""
    import torch
    from scenario import ROWS, Bench, TokenLoss, data, split_step

    from megatron_idempotent.step import StepCounts

    def run(
        kind: str, *, divisor: Any = None, at_end: bool = False, normalizers: Any = None
    ) -> tuple[float, Any]:
        bench = Bench(engine, config_overrides=overrides, **options)
        loss = TokenLoss()
        loss.kind, loss.normalizers = kind, normalizers or {}
        # Samples of three groups, of which one is all masked, dealt over both replicas.
        batch = data(1, 2 * ROWS, bench.replica, full=True)
        batch["group_ids"] = torch.tensor([7, 7, 9, 3])
        batch["sample_mask"][3] = 0.0
        if not at_end:
            result = split_step(bench.step, loss, batch, [1, 1], divisor=divisor)
        else:
            step_id = bench.step.begin(loss, micro_batch_size=ROWS)
            bench.step.microbatch(step_id, batch)
            result = bench.step.finish(step_id, global_batch_size=8, divisor=divisor)
        seen.append(result)
        return float(result.grad_norm), result

    seen: list[Any] = []
    whole, bare = run("none", normalizers={"nll": "groups", "rows": "microbatches"})
    replicas = bare.microbatches // 2
    counts = StepCounts(
        tokens=bare.global_valid_tokens,
        sequences=3.0 * replicas,
        groups=2,  # 7 and 9, on all replicas; the only sample of 3 is masked
        microbatches=2 * replicas,
    )
    assert bare.updated
    assert bare.global_valid_sequences == counts.sequences
    # A sum that nothing divides, over groups, and over microbatches.
    assert bare.metrics["nll"] == bare.metrics["loss"] / 2
    assert bare.metrics["rows"] == ROWS
    asked: list[StepCounts] = []

    def function(found: StepCounts) -> float:
        asked.append(found)
        return found.groups + 0.5

    for divisor, given in (
        (2, {"kind": "group"}),
        (counts.tokens, {"kind": "token"}),
        (counts.sequences, {"kind": "sequence"}),
        (3.25, {"kind": "token", "divisor": 3.25}),
        (3.25, {"kind": "token", "divisor": 3.25, "at_end": True}),
        (2.5, {"kind": "group", "divisor": function}),
    ):
        norm, result = run(**given)
        # Both norms and the division are rounded in float32, of at most 2 ** 17 squares.
        assert norm * divisor == pytest.approx(whole, rel=2**-24 * 2 * 20)
        # The same sum of float64, times 1 / divisor: two roundings, and one of the division here.
        assert result.metrics["loss"] == pytest.approx(
            bare.metrics["loss"] / divisor, rel=3 * 2.0**-53, abs=0
        )
    assert [dataclasses.replace(each, reported={}) for each in asked] == [counts]
    # The sums of all ranks, not divided, for a loss that counts what it is a mean over.
    rows = float(ROWS * counts.microbatches)
    sums = {"loss": bare.metrics["loss"], "nll": bare.metrics["loss"], "rows": rows}
    assert {name: asked[0].reported[name] for name in sums} == sums


@pytest.mark.parametrize("per_token", [True, False])
def test_gradients_and_metrics_are_divided_as_the_loss_or_the_caller_says(
    megatron_ranks, per_token
):
    megatron_ranks(2, divided, "megatron", {}, {"calculate_per_token_loss": per_token})


def test_those_on_fsdp2_are_too(megatron_ranks):
    megatron_ranks(2, divided, "fsdp", {}, {})


def refused(engine: str) -> None:
    """Runs on both ranks: what cannot be divided by, and the step that goes on."""
    import torch
    from scenario import ROWS, Bench, TokenLoss, data, raised_by

    bench = Bench(engine)
    loss = TokenLoss()
    batch = data(1, ROWS, bench.replica)
    for divisor in (0, -1.0, float("nan"), float("inf"), "2", True):
        told = raised_by(bench.step.begin, loss, divisor=divisor)
        assert f"begin() got divisor={divisor!r}" in str(told)
    grouped = TokenLoss()
    grouped.kind = "group"
    step_id = bench.step.begin(grouped, micro_batch_size=ROWS, global_batch_size=8)
    for ids, text in (
        (None, "without 'group_ids'"),
        (torch.ones(ROWS), "whose 'group_ids' are torch.float32"),
    ):
        wrong = batch if ids is None else {**batch, "group_ids": ids}
        told = raised_by(bench.step.microbatch, step_id, wrong)
        assert text in str(told)
    bench.step.microbatch(step_id, {**batch, "group_ids": torch.tensor([1, 2])})
    assert bench.step.finish(step_id).updated
    # Given twice, and otherwise.
    step_id = bench.step.begin(loss, micro_batch_size=ROWS, global_batch_size=8, divisor=2.0)
    bench.step.microbatch(step_id, batch)
    for name, value in (("divisor", 3.0), ("global_batch_size", 4)):
        told = raised_by(bench.step.finish, step_id, **{name: value})
        assert f"finish() got {name}={value!r}, and begin()" in str(told)
    assert bench.step.finish(step_id, divisor=2.0).updated
    before = bench.parameters()
    # A function that looks at what one rank has, or fails there, stops all ranks before the update.
    rank = torch.distributed.get_rank()
    for function, text in (
        (lambda counts: 1.0 + rank, "divisor=2.0 where rank 0 has 1.0"),
        (lambda counts: -1.0 if rank else 1.0, r"returned -1.0: return a finite number from 0 on"),
    ):
        step_id = bench.step.begin(loss, micro_batch_size=ROWS, global_batch_size=8)
        bench.step.microbatch(step_id, batch)
        told = raised_by(bench.step.finish, step_id, divisor=function)
        assert text in str(told)
        bench.step.abort()
    assert torch.equal(bench.parameters(), before)


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_what_cannot_be_divided_by_is_refused_before_anything_is_updated(megatron_ranks, engine):
    megatron_ranks(2, refused, engine)


def weighed() -> None:
    """Runs on a rank: auxiliary losses of a loss that does not say what they count as."""
    from scenario import DEADLINE_S, ROWS, TokenLoss, build, data, forward, raised_by, split_step

    from megatron_idempotent import TrainStep

    model, scheduler, _ = build(experts=4, config_overrides={"moe_aux_loss_coeff": 1.0})
    step = TrainStep(
        model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=DEADLINE_S
    )
    loss = TokenLoss()
    loss.kind = "none"
    told = raised_by(step.begin, loss, global_batch_size=8)
    assert "model with moe_aux_loss_coeff" in str(told)
    batch = data(1, 2 * ROWS, 0, full=True)
    norms = []
    for kind, weight, divisor in (
        ("token", None, 4.0),
        ("none", lambda microbatch: microbatch["input_ids"].numel(), 4.0),
        ("none", float(batch["input_ids"].numel() / 2), 4.0),
        ("none", 0.0, 4.0),
    ):
        loss = TokenLoss()
        loss.kind, loss.auxiliary_weight = kind, weight
        model, scheduler, _ = build(experts=4, config_overrides={"moe_aux_loss_coeff": 1.0})
        step = TrainStep(
            model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=DEADLINE_S
        )
        norms.append(split_step(step, loss, batch, [1, 1], divisor=divisor).grad_norm)
    assert norms[0] == norms[1] == norms[2] != norms[3]


def test_a_loss_that_is_divided_already_says_what_auxiliary_losses_count_as(megatron_ranks):
    megatron_ranks(1, weighed)
