"""A loss that cannot be trained with is named, on all ranks."""

from __future__ import annotations

import pytest


def losses_that_are_none(engine: str) -> None:
    """Runs on a rank: rank 0's loss is a vector, has no graph, is no tensor, or takes a row's
    name."""
    import torch
    from scenario import ROWS, Bench, TokenLoss, data, raised_by, split_step

    bench = Bench(engine)
    before = bench.parameters()
    for text, wrong, metrics in (
        ("(2, 32) with requires_grad=True", lambda output: output, {}),
        ("() with requires_grad=False", lambda output: output.detach().sum(), {}),
        ("float", lambda output: float(output.sum()), {}),
        ("named 'lr', 'rank'", lambda output: output.sum(), {"lr": 1.0, "rank": 1.0, "kl": 0.0}),
    ):

        class Loss(TokenLoss):
            def __call__(self, output, microbatch, wrong=wrong, metrics=metrics):
                return (wrong(output) if bench.replica == 0 else output.sum()), metrics

        told = raised_by(split_step, bench.step, Loss(), data(1, ROWS, bench.replica), [1])
        assert text in str(told)
        bench.step.abort()
    assert torch.equal(bench.parameters(), before)
    split_step(bench.step, TokenLoss(), data(1, ROWS, bench.replica), [1])


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_loss_that_is_no_scalar_with_a_graph_is_named(megatron_ranks, engine):
    megatron_ranks(2, losses_that_are_none, engine)
