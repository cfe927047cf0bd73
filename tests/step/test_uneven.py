"""Replicas that share experts and get different amounts of data make one step together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from scenario import ROWS, Bench, T, cut


def _padded(batch: dict[str, Any], rows: int) -> dict[str, Any]:

    def zeros(value: Any) -> Any:
        return value.new_zeros(rows - len(value), *value.shape[1:])

    return {name: torch.cat((value, zeros(value))) for name, value in batch.items()}


@pytest.mark.parametrize(
    ("turns", "last"),
    [
        pytest.param([[1, 2], [2, 1]], False, marks=pytest.mark.exhaustive),
        pytest.param([[2, 1], [0, 1]], True, marks=pytest.mark.exhaustive),
        # Fewer, none at all, and more than the other.
        ([[2, 1, 1], [1, 0, 2]], True),
        pytest.param([[0, 0], [1, 2]], True, marks=pytest.mark.exhaustive),
    ],
)
@on_ranks(2)
def test_replicas_that_share_experts(turns: list[list[int]], last: bool) -> None:
    """Replicas that share experts; those with less data send ghosts through
    them."""
    bias = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
    }
    most = [max(each) for each in zip(*turns, strict=True)]

    def run(padded: bool, overrides: dict[str, Any]) -> Any:
        bench = Bench(experts=4, ep=2, config_overrides=overrides)
        step, mine = bench.step, turns[bench.replica]
        for number in range(2):
            pieces: list[Any] = list(cut(bench.batch(sum(mine), seed=number), mine))
            if padded:
                pieces = [_padded(p, n * ROWS) for p, n in zip(pieces, most, strict=True)]
            step_id = bench.begin()
            for index, piece in enumerate(pieces):
                given = piece if len(piece["input_ids"]) else None
                step.microbatch(step_id, given, last=last and index == len(pieces) - 1)
            counted = [
                module.local_tokens_per_expert.clone()
                for module in bench.module.modules()
                if getattr(module, "expert_bias", None) is not None
            ]
            result = step.finish(step_id)
        return result, bench.parameters(), bench.gradients(), counted

    # Masked rows would have auxiliary losses; ghosts have none.
    balancing = {"moe_router_load_balancing_type": "none"}
    result, *got, _ = run(False, balancing)
    want, *wanted, _ = run(True, balancing)
    assert result.global_valid_tokens == want.global_valid_tokens
    # The experts multiply matrices of other sizes, whose sums round in another order: 32 products
    # of a hidden layer of 256 and 1024 tokens, relative to the largest element.
    bound = 2.0**-23 * (256 + 1024) ** 0.5
    assert result.metrics["nll"] == pytest.approx(want.metrics["nll"], rel=bound)
    for one, other in zip(got, wanted, strict=True):
        assert float((one - other).abs().max()) <= bound * float(other.abs().max())

    *_, counted = run(False, bias)
    assert len(counted) == 2
    for tokens in counted:
        torch.distributed.all_reduce(tokens)
        assert float(tokens.sum()) == 2 * T * ROWS * sum(map(sum, turns))  # two experts a token
