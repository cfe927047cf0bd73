"""Reports of a step: each metric over its own normalizer, whatever the pieces."""

from __future__ import annotations

from typing import Any

import pytest


def _step(**options):
    from scenario import build, forward

    from megatron_idempotent import TrainStep

    model, scheduler, replica = build(**options)
    step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)
    return model, scheduler, replica, step


def reported(options: dict[str, Any]) -> None:
    """Runs on a rank: metrics against float64 sums over all ranks' rows, taken from the masks."""
    import torch
    from scenario import ROWS, TokenLoss, data, split_step

    results = []
    for sizes in ([4], [1, 3], [1, 1, 1, 1]):
        _, scheduler, replica, step = _step(**options)
        number = torch.distributed.get_world_size() // (options.get("tp", 1) * options.get("pp", 1))
        batches = [data(1, 4 * ROWS, each) for each in range(number)]
        before = scheduler.num_steps
        results.append(split_step(step, TokenLoss(), batches[replica], sizes, last=len(sizes) > 1))
        assert scheduler.num_steps == before + 8
    first = results[0]
    assert all(result == first for result in results[1:]), results
    tokens = sum(float((b["token_mask"][:, 1:] * b["sample_mask"][:, None]).sum()) for b in batches)
    sequences = sum(float(b["sample_mask"].sum()) for b in batches)
    assert (first.global_valid_tokens, first.global_valid_sequences) == (tokens, sequences)
    assert first.updated
    assert first.skipped is None
    assert first.microbatches == 4 * number == len(first.rows)
    assert first.auxiliary_loss_scale == 0.25
    rows = first.rows
    assert first.metrics["rows"] == 4 * ROWS * number
    for row in rows:
        assert row["global_valid_toks"] == tokens
        assert row["global_valid_seqs"] == sequences
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


@pytest.mark.parametrize("options", [{}, {"pp": 2}, {"tp": 2}], ids=["dp2", "pp2", "tp2"])
def test_metrics_are_those_of_the_whole_step_on_all_ranks(megatron_ranks, options):
    megatron_ranks(2, reported, options)


def rates() -> None:
    """Runs on a rank: what a step used of the schedule, and that the schedule moved after it."""
    from scenario import ROWS, TokenLoss, data, split_step

    model, scheduler, replica, step = _step()
    seen = []
    for number in range(3):
        group = model.optimizer.param_groups[0]
        used = group["lr"], group["weight_decay"]
        result = split_step(step, TokenLoss(), data(number, 2 * ROWS, replica), [1, 1])
        assert (result.lr, result.weight_decay) == used
        seen.append(used)
    assert len(set(seen)) == 3
    assert scheduler.num_steps == 24


def test_rates_are_those_of_the_step_and_not_of_the_next_one(megatron_ranks):
    megatron_ranks(2, rates)


def nothing_valid() -> None:
    """Runs on a rank: a step of masked rows, one of no rows, and none at all, and then a good
    one."""
    import torch
    from scenario import ROWS, TokenLoss, data, parameters, split_step

    def run(empty: bool):
        model, scheduler, replica, step = _step(overlap_param_gather=True)
        batch = data(1, 2 * ROWS, replica)
        masked = {**batch, "sample_mask": torch.zeros(2 * ROWS)}
        if empty:
            before = parameters(model)
            for pieces, last in (([1, 1], False), ([1, 1], True), ([0], False), ([], False)):
                result = split_step(step, TokenLoss(), masked, pieces, last=last)
                assert not result.updated
                assert result.skipped == "no valid token on any rank"
                assert result.grad_norm is None
                assert not model.gradients().any()
                assert scheduler.num_steps == 0
            assert torch.equal(parameters(model), before)
        result = split_step(step, TokenLoss(), batch, [1, 1])
        return result, parameters(model), model.optimizer.optimizer.state_dict()["state"]

    want, got = run(False), run(True)
    assert want[0].metrics == got[0].metrics
    assert want[0].grad_norm == got[0].grad_norm
    assert torch.equal(want[1], got[1])


def test_a_step_with_nothing_valid_is_skipped_and_harms_none(megatron_ranks):
    megatron_ranks(2, nothing_valid)


def overflowed() -> None:
    """Runs on a rank: an infinite loss on one rank under dynamic scaling, between two good
    steps."""
    import torch
    from scenario import ROWS, TokenLoss, data, parameters, split_step

    class Infinite(TokenLoss):
        def __call__(self, output, microbatch):
            loss, metrics = super().__call__(output, microbatch)
            return loss * float("inf"), metrics

    dynamic = {"initial_loss_scale": 1024.0, "min_loss_scale": 1.0, "hysteresis": 1}

    def run(overflow: bool):
        model, scheduler, replica, step = _step(dtype="fp16", optimizer_overrides=dynamic)
        split_step(step, TokenLoss(), data(1, 2 * ROWS, replica), [1, 1])
        if overflow:
            before = parameters(model)
            loss = Infinite() if replica == 1 else TokenLoss()
            result = split_step(step, loss, data(2, 2 * ROWS, replica), [1, 1])
            assert not result.updated
            assert "overflow" in result.skipped
            assert torch.equal(parameters(model), before)
            assert scheduler.num_steps == 8
            assert float(model.optimizer.get_loss_scale()) == 512.0
            for one in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
                one.grad_scaler._scale.fill_(1024.0)
        result = split_step(step, TokenLoss(), data(3, 2 * ROWS, replica), [1, 1])
        assert float(model.optimizer.get_loss_scale()) == 1024.0
        return result.grad_norm, parameters(model)

    want, got = run(False), run(True)
    assert want[0] == got[0]
    assert torch.equal(want[1], got[1])


def test_an_overflow_skips_the_step_and_the_next_one_is_right(megatron_ranks):
    megatron_ranks(2, overflowed)
