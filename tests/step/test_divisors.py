"""Sums of a step are divided by what the loss says: tokens, groups, the caller's own number."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest


def divided(engine: str, options: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Runs on a rank: gradients of a loss under each divisor, against those of the bare sum."""
    import torch
    from scenario import ROWS, Bench, TokenLoss, cut

    from megatron_idempotent.step import StepCounts

    def run(
        kind: str, *, divisor: Any = None, at_end: bool = False, normalizers: Any = None
    ) -> tuple[float, Any]:
        loss = TokenLoss()
        loss.kind, loss.normalizers = kind, normalizers or {}
        bench = Bench(engine, loss=loss, config_overrides=overrides, **options)
        # Samples of three groups, of which one is all masked, dealt over both replicas.
        batch = bench.batch(2, full=True)
        batch["group_ids"] = torch.tensor([7, 7, 9, 3])
        batch["sample_mask"][3] = 0.0
        given = {"divisor": divisor}
        if at_end:
            given = {"global_batch_size": None, "finish": {"global_batch_size": 8, **given}}
        result = bench.run(list(cut(batch, [1, 1])), **given)
        return float(result.grad_norm), result

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


@pytest.mark.parametrize(
    ("engine", "per_token"), [("megatron", True), ("megatron", False), ("fsdp", None)]
)
def test_gradients_and_metrics_are_divided_as_the_loss_or_the_caller_says(
    megatron_ranks, engine, per_token
):
    overrides = {} if per_token is None else {"calculate_per_token_loss": per_token}
    megatron_ranks(2, divided, engine, {}, overrides)


def without_groups(engine: str) -> None:
    """Runs on both ranks: ids that are no groups, and the step that goes on."""
    import torch
    from scenario import Bench, TokenLoss, raised_by

    grouped = TokenLoss()
    grouped.kind = "group"
    bench = Bench(engine, loss=grouped)
    batch, step_id = bench.batch(1), bench.begin()
    for more, text in (
        ({}, "without 'group_ids'"),
        ({"group_ids": torch.ones(2)}, "whose 'group_ids' are torch.float32"),
    ):
        assert text in str(raised_by(bench.step.microbatch, step_id, {**batch, **more}))
    bench.step.microbatch(step_id, {**batch, "group_ids": torch.tensor([1, 2])})
    assert bench.step.finish(step_id).updated


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_ids_that_are_no_groups_are_refused(megatron_ranks, engine):
    megatron_ranks(2, without_groups, engine)


def weighed() -> None:
    """Runs on a rank: auxiliary losses of a loss that does not say what they count as."""
    from scenario import Bench, TokenLoss, cut, raised_by

    norms = []
    for kind, weight in (
        ("none", None),
        ("token", None),
        ("none", lambda microbatch: microbatch["input_ids"].numel()),
        ("none", 64.0),
        ("none", 0.0),
    ):
        loss = TokenLoss()
        loss.kind, loss.auxiliary_weight = kind, weight
        bench = Bench(loss=loss, experts=4, config_overrides={"moe_aux_loss_coeff": 1.0})
        if (kind, weight) == ("none", None):
            assert "model with moe_aux_loss_coeff" in str(raised_by(bench.begin))
            continue
        batch = bench.batch(2, full=True)
        assert batch["input_ids"].numel() / 2 == 64
        norms.append(bench.run(list(cut(batch, [1, 1])), divisor=4.0).grad_norm)
    assert norms[0] == norms[1] == norms[2] != norms[3]


def test_a_loss_that_is_divided_already_says_what_auxiliary_losses_count_as(megatron_ranks):
    megatron_ranks(1, weighed)
