"""Ranks that get different amounts of data, at different turns, make one step together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

# Microbatches by replica, of each `microbatch` call; None is a rank that does not call at all.
SHARES: dict[str, list[list[int] | None]] = {
    "more on one": [[1, 2], [1]],
    "all on one": [[2, 1], None],
    "nothing on the first": [None, [3]],
    "empty batches": [[0, 2, 0], [0]],
}


def shared(options: dict[str, Any], share: list[list[int] | None], last: bool) -> bool:
    """Runs on a rank: two steps with this share against the sum of its microbatches' gradients."""
    import torch
    from scenario import ROWS, TokenLoss, build, cut, data, forward, parameters

    from megatron_idempotent import TrainStep

    loss, sizes = TokenLoss(), {"global_batch_size": 8, "micro_batch_size": ROWS}
    of_replica = [data(1, ROWS * sum(each or [0]), index) for index, each in enumerate(share)]

    def run(split: bool):
        model, scheduler, replica = build(**options)
        step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)
        seen = []
        for _ in range(2):
            step_id = step.begin(loss, **sizes)
            if split:
                pieces = list(cut(of_replica[replica], share[replica] or []))
            else:
                # The same microbatches, and masked ones where there are none.
                most = max(sum(each or [0]) for each in share)
                padded = _padded(of_replica[replica], most * ROWS)
                pieces = list(cut(padded, [most]))
            for index, piece in enumerate(pieces):
                step.microbatch(step_id, piece, last=last and index == len(pieces) - 1)
            result = step.finish(step_id)
            seen += [torch.tensor(result.grad_norm), model.gradients(), parameters(model)]
        return seen

    return all(map(torch.equal, run(True), run(False)))


def _padded(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    import torch

    return {
        name: torch.cat(
            (value, torch.zeros(rows - len(value), *value.shape[1:], dtype=value.dtype))
        )
        for name, value in batch.items()
    }


#: Gathers, and whether the last batch is given as such, of each share; the rest is exhaustive.
ALWAYS = [
    ("more on one", False, False),
    ("more on one", True, True),
    ("all on one", True, True),
    ("nothing on the first", False, False),
    ("nothing on the first", True, True),
    ("empty batches", True, True),
]


@pytest.mark.parametrize(
    ("share", "gathers", "last"),
    [
        pytest.param(*each, marks=() if each in ALWAYS else pytest.mark.exhaustive)
        for each in itertools.product(SHARES, (False, True), (False, True))
    ],
)
def test_replicas_with_different_amounts_of_data(megatron_ranks, share, last, gathers):
    options = {"overlap_param_gather": gathers}
    assert all(megatron_ranks(2, shared, options, SHARES[share], last))


def test_pipelines_with_different_amounts_of_data(megatron_ranks):
    options = {"pp": 2, "overlap_param_gather": True}
    assert all(megatron_ranks(4, shared, options, SHARES["all on one"], True))


def with_experts(turns: list[list[int]], last: bool) -> None:
    """Runs on a rank: replicas that share experts; those with less data send ghosts through
    them."""
    import torch
    from scenario import ROWS, T, TokenLoss, build, cut, data, forward, parameters

    from megatron_idempotent import TrainStep

    bias = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
    }
    loss, sizes = TokenLoss(), {"global_batch_size": 8, "micro_batch_size": ROWS}
    most = [max(each) for each in zip(*turns, strict=True)]

    def run(padded: bool, overrides: dict[str, Any]):
        model, scheduler, replica = build(experts=4, ep=2, config_overrides=overrides)
        step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)
        for number in range(2):
            batch = data(number, ROWS * sum(turns[replica]), replica)
            pieces: list[Any] = list(cut(batch, turns[replica]))
            if padded:
                pieces = [_padded(p, n * ROWS) for p, n in zip(pieces, most, strict=True)]
            step_id = step.begin(loss, **sizes)
            for index, piece in enumerate(pieces):
                given = piece if len(piece["input_ids"]) else None
                step.microbatch(step_id, given, last=last and index == len(pieces) - 1)
            counted = [
                module.local_tokens_per_expert.clone()
                for module in model.chunks[0].modules()
                if getattr(module, "expert_bias", None) is not None
            ]
            result = step.finish(step_id)
        return result, parameters(model), model.gradients(), counted

    # Masked rows would have auxiliary losses; ghosts have none.
    balancing = {"moe_router_load_balancing_type": "none"}
    result, weights, gradients, _ = run(False, balancing)
    want, want_weights, want_gradients, _ = run(True, balancing)
    assert result.global_valid_tokens == want.global_valid_tokens
    # The experts multiply matrices of other sizes, whose sums round in another order: 32 products
    # of a hidden layer of 256 and 1024 tokens, relative to the largest element.
    bound = 2.0**-23 * (256 + 1024) ** 0.5
    assert result.metrics["nll"] == pytest.approx(want.metrics["nll"], rel=bound)
    for got, wanted in ((gradients, want_gradients), (weights, want_weights)):
        assert float((got - wanted).abs().max()) <= bound * float(wanted.abs().max())

    *_, counted = run(False, bias)
    assert len(counted) == 2
    for tokens in counted:
        torch.distributed.all_reduce(tokens)
        assert float(tokens.sum()) == 2 * T * ROWS * sum(map(sum, turns))  # two experts a token


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
def test_replicas_that_share_experts(megatron_ranks, turns, last):
    megatron_ranks(2, with_experts, turns, last)


def changing_counts(options: dict[str, Any]) -> bool:
    """Runs on a rank: steps of 1, 3, 2 and 1 microbatches, with and without overlap of the last."""
    import torch
    from scenario import ROWS, TokenLoss, build, data, forward, one_shot, parameters, split_step

    from megatron_idempotent import TrainStep

    pieces = [[1], [1, 2], [2], [1]]

    def run(split: bool):
        model, scheduler, replica = build(**options)
        step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)
        for number, sizes in enumerate(pieces):
            batch = data(number, ROWS * sum(sizes), replica)
            if split:
                whole = {"rank_batch_size": ROWS * sum(sizes)} if number % 2 else {}
                split_step(step, TokenLoss(), batch, sizes, last=number > 1, **whole)
            else:
                one_shot(model, scheduler, TokenLoss(), batch)
        return parameters(model)

    return torch.equal(run(True), run(False))


@pytest.mark.parametrize("gathers", [False, True])
def test_the_number_of_microbatches_may_change_between_steps(megatron_ranks, gathers):
    assert all(megatron_ranks(2, changing_counts, {"overlap_param_gather": gathers}))


ALIGNED = {"pp": 2, "vpp": 2, "layers_per_stage": 1, "align": True, "overlap_param_gather": True}


def test_replicas_with_different_numbers_of_calls_where_the_schedule_gathers(megatron_ranks):
    assert all(megatron_ranks(4, shared, ALIGNED, [[2, 2], [2]], False, timeout_s=120))
