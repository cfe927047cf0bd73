"""Ranks that get different amounts of data, at different turns, make one step together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ranks import on_ranks, tiered
from scenario import ROWS, Bench, T, cut, data

# Microbatches by replica, of each `microbatch` call; None is a rank that does not call at all.
SHARES: dict[str, list[list[int] | None]] = {
    "more on one": [[1, 2], [1]],
    "all on one": [[2, 1], None],
    "nothing on the first": [None, [3]],
    "empty batches": [[0, 2, 0], [0]],
}


def shared(options: dict[str, Any], share: list[list[int] | None], last: bool) -> bool:
    """Runs on a rank: two steps with this share against the sum of its microbatches' gradients."""
    rows = [ROWS * sum(each or [0]) for each in share]

    def run(split: bool) -> list[Any]:
        bench = Bench(**options)
        batch = data(1, rows[bench.replica], bench.replica)
        if split:
            pieces = list(cut(batch, share[bench.replica] or []))
        else:  # the same microbatches, and masked ones where there are none
            pieces = [_padded(batch, max(rows))]
        return [each for _ in range(2) for each in bench.bits(bench.run(pieces, last=last))]

    return all(map(torch.equal, run(True), run(False)))


def _padded(batch: dict[str, Any], rows: int) -> dict[str, Any]:

    def zeros(value: Any) -> Any:
        return value.new_zeros(rows - len(value), *value.shape[1:])

    return {name: torch.cat((value, zeros(value))) for name, value in batch.items()}


#: Gathers, and whether the last batch is given as such, of each share; the rest is exhaustive.
ALWAYS = [
    ("more on one", False, False),
    ("all on one", True, True),
    ("nothing on the first", True, True),
    ("empty batches", True, True),
]


@pytest.mark.parametrize(
    ("share", "gathers", "last"),
    tiered(itertools.product(SHARES, (False, True), (False, True)), ALWAYS),
)
def test_replicas_with_different_amounts_of_data(megatron_ranks, share, last, gathers):
    options = {"overlap_param_gather": gathers}
    assert all(megatron_ranks(2, shared, options, SHARES[share], last))


PIPELINES = {
    "pp2": ({"pp": 2}, [[2, 1], None], True),
    # The schedule gathers there.
    "aligned": (
        {"pp": 2, "vpp": 2, "layers_per_stage": 1, "align": True},
        [[2, 2], [2]],
        False,
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_with_different_amounts_of_data(megatron_ranks, name):
    options, share, last = PIPELINES[name]
    options = {**options, "overlap_param_gather": True}
    assert all(megatron_ranks(4, shared, options, share, last, timeout_s=120))


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
