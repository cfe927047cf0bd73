"""A loss that cannot be trained with is named, on all ranks."""

from __future__ import annotations

import pytest
from engines import ENGINES


def losses_that_are_none(engine: str) -> None:
    """On a rank: rank 0's loss is a vector, has no graph, or is no tensor."""
    import torch
    from engines import bench_on
    from split_bench import ROWS, TokenLoss, data, raised_by, split_step

    bench = bench_on(engine)
    before = bench.parameters()
    for text, wrong in {
        "(2, 32) with requires_grad=True": lambda output: output,
        "() with requires_grad=False": lambda output: output.detach().sum(),
        "float": lambda output: float(output.sum()),
    }.items():

        class Loss(TokenLoss):
            def __call__(self, output, microbatch, wrong=wrong):
                return (wrong(output) if bench.replica == 0 else output.sum()), {}

        told = raised_by(split_step, bench.step, Loss(), data(1, ROWS, bench.replica), [1])
        assert text in str(told)
        bench.step.abort()
    assert torch.equal(bench.parameters(), before)
    split_step(bench.step, TokenLoss(), data(1, ROWS, bench.replica), [1])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_loss_that_is_no_scalar_with_a_graph_is_named(megatron_ranks, engine):
    megatron_ranks(2, losses_that_are_none, engine)
