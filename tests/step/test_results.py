"""Reports of a step and of its batches: each metric over its own normalizer, in any pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from scenario import ROWS, Bench, TokenLoss, cut, data, mask_of, split_step

pytestmark = pytest.mark.full


@pytest.mark.parametrize("options", [{}, {"pp": 2}, {"tp": 2}], ids=["dp2", "pp2", "tp2"])
@on_ranks(2)
def test_metrics_are_those_of_the_whole_step_on_all_ranks(options: dict[str, Any]) -> None:
    """Metrics against float64 sums over all ranks' rows, taken from the masks."""
    results = []
    for sizes in ([4], [1, 3], [1, 1, 1, 1]):
        bench = Bench(**options)
        scheduler, replica = bench.scheduler, bench.replica
        number = torch.distributed.get_world_size() // (options.get("tp", 1) * options.get("pp", 1))
        batches = [data(1, 4 * ROWS, each) for each in range(number)]
        before = scheduler.num_steps
        last = len(sizes) > 1
        results.append(split_step(bench.step, bench.loss, batches[replica], sizes, last=last))
        assert scheduler.num_steps == before + 8
    first = results[0]
    assert all(result == first for result in results[1:]), results
    tokens = sum(float((b["token_mask"][:, 1:] * b["sample_mask"][:, None]).sum()) for b in batches)
    sequences = sum(float(b["sample_mask"].sum()) for b in batches)
    assert (first.global_valid_tokens, first.global_valid_sequences) == (tokens, sequences)
    assert (first.updated, first.skipped, first.auxiliary_loss_scale) == (True, None, 0.25)
    assert first.microbatches == 4 * number == len(first.rows)
    rows = first.rows
    assert first.metrics["rows"] == 4 * ROWS * number
    for row in rows:
        assert (row["global_valid_toks"], row["global_valid_seqs"]) == (tokens, sequences)
        assert (row["lr"], row["wd"]) == (first.lr, first.weight_decay)
        assert row["rows"] == ROWS
        # The same sum under two normalizers, and one that is not named.
        assert row["nll"] * tokens == pytest.approx(row["nll_by_sequence"] * sequences, rel=1e-12)
        assert row["loss"] == row["nll"]
    for name in ("nll", "nll_by_sequence", "loss"):
        assert first.metrics[name] == pytest.approx(sum(row[name] for row in rows), rel=1e-12)
    assert first.metrics["nll_max"] == max(row["nll_max"] for row in rows)
    assert first.metrics["nll_min"] == min(row["nll_min"] for row in rows)
    assert 2 < first.metrics["nll_min"] < first.metrics["nll"] < first.metrics["nll_max"] < 8
    # An untrained model is about as good as guessing: the mean is over valid tokens.
    assert 4 < first.metrics["nll"] < 6
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, first)
    assert all(other == first for other in everywhere)
    # One row per microbatch, whichever rank joins what ranks report; each says whose it is.
    assert tuple(row for other in everywhere for row in other.own_rows) == rows
    assert [row["replica"] for row in rows] == [each for each in range(number) for _ in range(4)]
    assert len({row["rank"] for row in rows}) == number
    # Every rank of a replica can tell its own, those without losses too.
    assert first.replica_rows == tuple(row for row in rows if row["replica"] == replica)
    assert sum(row["loss"] for row in first.own_rows) in (
        0.0,  # of a rank for which another one of its replica reports
        pytest.approx(sum(row["loss"] for row in rows if row["replica"] == replica), rel=1e-12),
    )


@on_ranks(2)
def test_rates_are_those_of_the_step_and_not_of_the_next_one() -> None:
    bench = Bench()
    seen = []
    for number in range(3):
        group = bench.optimizer.param_groups[0]
        used = group["lr"], group["weight_decay"]
        result = bench.run([bench.batch(2, seed=number)])
        assert (result.lr, result.weight_decay) == used
        seen.append(used)
    assert len(set(seen)) == 3
    assert bench.scheduler.num_steps == 24


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("megatron", {"overlap_param_gather": True}),
        ("megatron", {"pp": 2}),
        ("megatron", {"tp": 2}),
        ("fsdp", {}),
    ],
    ids=["dp2", "pp2", "tp2", "fsdp"],
)
@on_ranks(2)
def test_a_step_in_which_nothing_is_valid_does_as_it_was_told(
    engine: str, options: dict[str, Any]
) -> None:
    """Steps of masked samples, of no rows and of nothing, under both rules; some
    losses are a constant 0."""

    class Constant(TokenLoss):
        def __call__(self, output, microbatch):
            if not microbatch["sample_mask"].any():
                return 0.0, {"nll": 0.0}
            return super().__call__(output, microbatch)

    for rule, updated in (("skip", False), ("update", True)):
        bench = Bench(engine, step={"nothing_valid": rule}, **options)
        masked = {**bench.batch(2), "sample_mask": torch.zeros(2 * ROWS).cuda()}
        # Momentum, which moves parameters in a step without gradients.
        bench.run([bench.batch(1, seed=2)])
        before, steps = bench.parameters(), getattr(bench.scheduler, "num_steps", 0)
        ways: list[tuple[list[Any], bool]] = [([masked], False), (list(cut(masked, [1, 1])), True)]
        if rule == "skip":
            ways += [(list(cut(masked, [0])), False), ([], False)]
        for loss in (Constant(), TokenLoss()):
            for pieces, last in ways:
                result = bench.run(pieces, last=last, loss=loss)
                assert result.updated == updated
                assert result.skipped == (None if updated else "no valid token on any rank")
                assert result.grad_norm == (0.0 if updated else None)
                assert result.metrics.get("nll", 0.0) == 0.0
                # Also those that are reduced already.
                dropped = engine == "megatron" or updated
                assert dropped or all(each.grad is None for each in bench.module.parameters())
        assert torch.equal(bench.parameters(), before) != updated
        assert updated or getattr(bench.scheduler, "num_steps", 0) == steps
    # Half of the microbatches have a constant loss, on one rank only: they count as zeros.
    norms = []
    for loss in (Constant(), TokenLoss()):
        bench = Bench(engine, **options)
        mine = bench.batch(2, full=True)
        if bench.replica == 0:
            mine["sample_mask"][:ROWS] = 0
        norms.append(bench.run(list(cut(mine, [1, 1])), loss=loss).grad_norm)
    assert norms[0] == norms[1] > 0


@on_ranks(2)
def test_an_overflow_skips_the_step_and_the_next_one_is_right() -> None:
    """An infinite loss on one rank under dynamic scaling, between two good
    steps."""

    dynamic = {"initial_loss_scale": 1024.0, "min_loss_scale": 1.0, "hysteresis": 1}

    def run(overflow: bool):
        bench = Bench(dtype="fp16", optimizer_overrides=dynamic)
        bench.run([bench.batch(2)])
        if overflow:
            before = bench.parameters()
            loss = TokenLoss(float("inf") if bench.replica == 1 else 1.0)
            result = bench.run([bench.batch(2, seed=2)], loss=loss)
            assert not result.updated
            assert "overflow" in result.skipped
            assert torch.equal(bench.parameters(), before)
            assert bench.scheduler.num_steps == 8
            assert float(bench.optimizer.get_loss_scale()) == 512.0
            for one in getattr(bench.optimizer, "chained_optimizers", [bench.optimizer]):
                one.grad_scaler._scale.fill_(1024.0)
        result = bench.run([bench.batch(2, seed=3)])
        assert float(bench.optimizer.get_loss_scale()) == 1024.0
        return bench.bits(result)

    assert all(map(torch.equal, run(False), run(True)))


@pytest.mark.parametrize(
    ("engine", "options"),
    [("megatron", {}), ("megatron", {"pp": 2}), ("fsdp", {})],
    ids=["dp2", "pp2", "fsdp"],
)
@on_ranks(2)
def test_a_batch_returns_outputs_of_each_sample_in_order(
    engine: str, options: dict[str, Any]
) -> None:
    """Outputs in the order given, from rows and ready lists."""

    class Loss(TokenLoss):
        outputs = ("logprobs", "token_sums", "ragged")

        def __call__(self, output, microbatch):
            total, metrics = super().__call__(output, microbatch)
            elementwise = -output.float() * mask_of(microbatch)
            return total, {
                **metrics,
                "logprobs": elementwise,
                "token_sums": elementwise.sum(1),
                "ragged": [row[:index] for index, row in enumerate(elementwise)],
            }

    bench = Bench(engine, loss=Loss(), **options)
    last = bench.step._backend.has_losses
    batch = data(1, 3 * ROWS + 1, bench.replica)
    step_id = bench.begin()
    rows = bench.step.microbatch(step_id, batch, microbatch_id="rows")
    ready = [*cut(batch, [1, 1, 1]), {name: value[-1:] for name, value in batch.items()}]
    again = bench.step.microbatch(step_id, microbatches=ready)
    assert bench.step.microbatch(step_id, batch, microbatch_id="rows") is rows
    number = len(batch["input_ids"])
    for receipt in (rows, again):
        assert (receipt.rows, receipt.microbatches) == (number, 4)
        if not last:
            assert (receipt.outputs, receipt.metrics()) == ({}, {})
            continue
        assert set(receipt.outputs) == set(Loss.outputs)
        values = receipt.outputs["logprobs"]
        assert len(values) == number
        assert not any(each.requires_grad for each in values)
        mask_BT = mask_of(batch)
        for index, each in enumerate(values):
            assert torch.equal(each != 0, mask_BT[index] != 0), "not in the order of the rows"
            assert torch.equal(receipt.outputs["token_sums"][index], each.sum())
            assert len(receipt.outputs["ragged"][index]) == index % ROWS
        sums = receipt.metrics()
        total = torch.stack(values).double().sum()
        # 32 products to a sum of a row, rounded in float32, and float64 beyond that.
        bound = sum(float(each.abs().sum()) for each in values) * 2**-24 * 32 * 4
        assert abs(sums["nll"] + float(total)) <= bound
        assert sums["rows"] == number
        assert sums["nll_max"] >= -float(torch.stack(values).min())
    if last:
        for one, two in zip(rows.outputs["logprobs"], again.outputs["logprobs"], strict=True):
            assert torch.equal(one, two) or engine == "fsdp"  # which has dropout
    bench.step.finish(step_id)


@on_ranks(1)
def test_values_of_a_pack_are_split_by_sequence() -> None:
    """Values of a pack's tokens are split by sequence, without padding."""

    class Loss(TokenLoss):
        outputs = ("values", "ids")

        def __call__(self, output, microbatch):
            place_T = torch.arange(output.shape[1], device=output.device)
            return output.float().sum(), {"values": place_T[None], "ids": torch.arange(3)}

    bench = Bench(loss=Loss())
    pack = {
        "input_ids": torch.ones(1, 32, dtype=torch.int64).cuda(),
        "cu_seqlens": torch.tensor([0, 5, 5, 9]),
        "cu_seqlens_padded": torch.tensor([0, 8, 8, 32]),
    }
    receipt = bench.step.microbatch(bench.begin(), microbatches=[pack])
    found = [each.tolist() for each in receipt.outputs["values"]]
    assert found == [[0, 1, 2, 3, 4], [], [8, 9, 10, 11]]
    assert [each.tolist() for each in receipt.outputs["ids"]] == [0, 1, 2]
    bench.step.abort()
