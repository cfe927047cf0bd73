"""Reports of a step and of its batches: each metric over its own normalizer, in any pieces."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from scenario import Bench, TokenLoss

pytestmark = pytest.mark.full


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
