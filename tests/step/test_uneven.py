"""Ranks that get different amounts of data, at different turns, make one step together."""

from __future__ import annotations

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
    """On a rank: two steps with this share against the sum of its microbatches' gradients."""
    import torch
    from split_bench import ROWS, TokenLoss, build, cut, data, forward, parameters

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


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("share", list(SHARES))
@pytest.mark.parametrize("gathers", [False, True])
def test_replicas_with_different_amounts_of_data(megatron_ranks, share, last, gathers):
    options = {"overlap_param_gather": gathers}
    assert all(megatron_ranks(2, shared, options, SHARES[share], last))


def test_pipelines_with_different_amounts_of_data(megatron_ranks):
    options = {"pp": 2, "overlap_param_gather": True}
    assert all(megatron_ranks(4, shared, options, SHARES["all on one"], True))


def with_experts(turns: list[list[int]], last: bool) -> bool:
    """On a rank: replicas that share experts; those with less data send ghosts through them."""
    import torch
    from split_bench import ROWS, TokenLoss, build, cut, data, forward, parameters

    from megatron_idempotent import TrainStep

    bias = {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": "none",
    }
    loss, sizes = TokenLoss(), {"global_batch_size": 8, "micro_batch_size": ROWS}

    def run(ep: int):
        # One rank's experts are another's data: where ep is 1, nobody waits inside of the model.
        model, scheduler, replica = build(experts=4, ep=ep, config_overrides=bias)
        step = TrainStep(model.chunks, model.optimizer, scheduler, forward=forward, deadline_s=20)
        for number in range(2):
            batch = data(number, ROWS * sum(turns[replica]), replica)
            step_id = step.begin(loss, **sizes)
            pieces = list(cut(batch, turns[replica]))
            for index, piece in enumerate(pieces):
                given = piece if turns[replica][index] else None
                step.microbatch(step_id, given, last=last and index == len(pieces) - 1)
            result = step.finish(step_id)
        router = next(m for m in model.chunks[0].modules() if hasattr(m, "expert_bias"))
        assert not router.local_tokens_per_expert.any()
        whole = model.chunks[0].module.embedding.word_embeddings.weight.detach().clone()
        assert parameters(model).isfinite().all()
        return result.metrics, whole, router.expert_bias.clone()

    alone, together = run(1), run(2)
    assert alone[2].any()
    assert torch.equal(alone[2], together[2])  # the ghosts' routing is not counted
    assert together[0]["nll"] == pytest.approx(alone[0]["nll"], rel=1e-6)
    # Expert gradients are added up in another order: each addition rounds once.
    return bool(torch.allclose(alone[1], together[1], rtol=0, atol=1e-6))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("turns", [[[1, 2], [2, 1]], [[2, 1], [0, 1]], [[0, 0], [1, 2]]])
def test_replicas_that_share_experts(megatron_ranks, turns, last):
    assert all(megatron_ranks(2, with_experts, turns, last))


def changing_counts(options: dict[str, Any]) -> bool:
    """On a rank: steps of 1, 3, 2 and 1 microbatches, with and without overlap of the last."""
    import torch
    from split_bench import ROWS, TokenLoss, build, data, forward, one_shot, parameters, split_step

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
