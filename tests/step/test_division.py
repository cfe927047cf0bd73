"""Divisors of gradients: what the loss or the caller says, and those of auxiliary losses.

Two ranks, and microbatches, rows and positions by powers of two, so that every division is exact
and equal means equal to the bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from ranks import on_ranks, tiered
from scenario import ROWS, Bench, SequenceLoss, T, TokenLoss, build, cut, data, forward, raised_by

from megatron_idempotent.step import StepCounts

MOE = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.5}


def _split_gradient(kind: str, per_token: bool, options: dict[str, Any], full: bool) -> Any:
    overrides = {**options.get("config_overrides", {}), "calculate_per_token_loss": per_token}
    loss = {"token": TokenLoss, "sequence": SequenceLoss}[kind]()
    bench = Bench(loss=loss, **{**options, "config_overrides": overrides})
    bench.optimizer.step = lambda: (True, None, None)  # the gradients are what is asked for
    bench.run(list(cut(bench.batch(4, full=full), [1, 3])))
    return bench.model.gradients()


def _plain_gradient(options: dict[str, Any]) -> Any:
    """One schedule call with a mean loss, which Megatron averages over microbatches and ranks."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    overrides = {**options.get("config_overrides", {}), "calculate_per_token_loss": False}
    model, _, replica = build(**{**options, "config_overrides": overrides})

    def forward_step(data_iterator, chunk):
        microbatch = next(data_iterator)

        def loss_func(output):
            return SequenceLoss()(output, microbatch)[0] / ROWS, {}

        return forward(chunk, microbatch), loss_func

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=cut(data(1, 4 * ROWS, replica, full=True), [1] * 4),
        model=model.chunks,
        num_microbatches=4,
        seq_length=T,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    return model.gradients()


def compared(what: str, options: dict[str, Any]) -> bool:
    """Runs on a rank: whether two ways to the same gradient give the same bits."""
    if what == "plain":
        want = _plain_gradient(options)
        return all(
            torch.equal(_split_gradient("sequence", per_token, options, full=True), want)
            for per_token in (False, True)
        )
    summed = _split_gradient(what, True, options, full=False)
    assert summed.abs().max() > 0
    shift = 0
    if options.get("dtype") == "fp16":
        # Where DDP averages, a step divides its losses by a power of two not below what the sum of
        # a replica is over, here 4 sequences of 32 tokens, and multiplies with it at the end. So a
        # scale that is larger by as much gives the same bits on the way.
        shift = {"token": 7, "sequence": 2}[what]
        options = {**options, "loss_scale": options["loss_scale"] * 2**shift}
    averaged = _split_gradient(what, False, options, full=False)
    return torch.equal(summed, averaged * 2.0**-shift)


LAYOUTS = {
    "dense": {},
    "all-reduce": {"distributed_optimizer": False, "overlap_grad_reduce": False},
    "pp2": {"pp": 2},
    "experts": {"experts": 4, "config_overrides": MOE},
    "fp16 experts": {
        "experts": 4,
        "config_overrides": MOE,
        "dtype": "fp16",
        "loss_scale": 64.0,
    },
    # Not fp16, whose small gradients round by where the division is made.
    "scaled experts": {
        "experts": 4,
        "config_overrides": MOE,
        "dtype": "bf16",
        "loss_scale": 64.0,
    },
}


#: Those whose losses and auxiliary losses are divided in a way of their own, and each layout once.
ALWAYS = [
    ("dense", "token"),
    ("experts", "token"),
    ("experts", "sequence"),
    ("fp16 experts", "token"),
    ("pp2", "sequence"),
]


@pytest.mark.parametrize(
    ("layout", "kind"),
    tiered(itertools.product(LAYOUTS, ("token", "sequence")), ALWAYS),
)
def test_ddp_may_sum_or_average(megatron_ranks, layout, kind):
    assert all(megatron_ranks(2, compared, kind, LAYOUTS[layout]))


@pytest.mark.parametrize(
    "layout",
    [
        "dense",
        pytest.param("all-reduce", marks=pytest.mark.exhaustive),
        pytest.param("experts", marks=pytest.mark.exhaustive),
        "scaled experts",
    ],
)
def test_auxiliary_losses_count_as_in_a_plain_mean(megatron_ranks, layout):
    assert all(megatron_ranks(2, compared, "plain", LAYOUTS[layout]))


def divided(engine: str, options: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Runs on a rank: gradients of a loss under each divisor, against those of the bare sum."""

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


@on_ranks(1)
def test_a_loss_that_is_divided_already_says_what_auxiliary_losses_count_as() -> None:
    """Auxiliary losses of a loss that does not say what they count as."""
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
