"""Reductions that end between two calls of a step are no disturbance of it."""

from __future__ import annotations

import time

import pytest
import torch
from ranks import on_ranks
from scenario import Bench, TokenLoss, raised_by, split_step


class SlowOnRank1(TokenLoss):
    """Lets rank 0 leave its backward with the reduction in flight."""

    def __call__(self, *args, **kwargs):
        if torch.distributed.get_rank() == 1:
            time.sleep(0.3)
        return super().__call__(*args, **kwargs)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@on_ranks(2)
def test_a_reduction_may_end_before_finish_and_zeroed_gradients_are_still_seen(
    distributed_optimizer: bool,
) -> None:
    bench = Bench(loss=SlowOnRank1(), distributed_optimizer=distributed_optimizer)
    batch = bench.batch(2)

    def wait(_: str) -> None:
        time.sleep(0.6)

    for _ in range(3):  # the first step's reductions start in finish()
        step = split_step(bench.step, bench.loss, batch, [1, 1], last=True, between=wait)
        assert step.updated

    def zero(_: str) -> None:
        bench.model.chunks[0].zero_grad_buffer()

    refused = raised_by(split_step, bench.step, bench.loss, batch, [2], last=True, between=zero)
    assert "gradients were written between two calls of the step" in str(refused)
    bench.step.abort()
    assert split_step(bench.step, bench.loss, batch, [1, 1], last=True, between=wait).updated
