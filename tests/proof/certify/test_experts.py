"""Experts as the oracle writes them out: how tokens are sent, and what their loss weighs."""

from __future__ import annotations

import pytest
import torch

from megatron_idempotent.proof.certify import CHECKS, experts, layout, run

HIDDEN, ROWS, POSITIONS = 8, 4, 6


def layer(**changed):
    """Weights of one layer: the router reads the first values, and experts multiply by 1 to 4."""
    torch.manual_seed(3)
    weights = {"mlp.router.weight": torch.eye(experts.EXPERTS, HIDDEN).double()}
    for expert in range(experts.EXPERTS):
        at = f"mlp.experts.local_experts.{expert}"
        weights[f"{at}.linear_fc1.weight"] = torch.eye(HIDDEN).double()
        weights[f"{at}.linear_fc2.weight"] = (1.0 + expert) * torch.eye(HIDDEN).double()
    return {**weights, **changed}


def inputs():
    x_BTH = torch.zeros(ROWS, POSITIONS, HIDDEN, dtype=torch.float64)
    x_BTH[..., : experts.EXPERTS] = torch.tensor([0.0, 2.0, 1.0, -1.0])
    return x_BTH


def test_a_token_gets_the_two_experts_with_the_largest_logits_by_the_softmax_of_these():
    routed = []
    found_BTH = experts.mixture(layer(), "mlp", inputs(), routed)
    share = torch.tensor([2.0, 1.0], dtype=torch.float64).softmax(0)
    factor = 2 * share[0] + 3 * share[1]
    torch.testing.assert_close(found_BTH, factor * torch.nn.functional.gelu(inputs()))
    assert [each.shape for each in routed] == [(ROWS, POSITIONS, experts.EXPERTS)]


def test_a_router_that_roundings_could_decide_is_refused():
    near = inputs()
    near[1, 2, 0] = 0.95  # the third one, which is 1 from the second elsewhere
    with pytest.raises(RuntimeError, match=r"mlp is undecided: two logits differ by 0\.05, less"):
        experts.mixture(layer(), "mlp", near, [])


def test_the_loss_of_a_microbatch_is_a_mean_times_its_positions():
    logits_BTE = torch.randn(
        ROWS, POSITIONS, experts.EXPERTS, dtype=torch.float64, generator=torch.manual_seed(5)
    )

    def mean(logits_NE):
        chosen_NE = logits_NE >= logits_NE.topk(experts.TOPK).values[:, -1:]
        f_E = chosen_NE.double().mean(0) / experts.TOPK
        return experts.COEFFICIENT * experts.EXPERTS * (f_E * logits_NE.softmax(-1).mean(0)).sum()

    for rows in (1, 2, 4):
        for each_BTE in logits_BTE.split(rows):
            right = rows * POSITIONS * mean(each_BTE.flatten(0, 1))
            torch.testing.assert_close(experts.balance(each_BTE), right)
    # Which rows share a microbatch makes a difference.
    halves, others = logits_BTE.split(2), logits_BTE[[0, 2, 1, 3]].split(2)
    assert sum(map(experts.balance, halves)) != sum(map(experts.balance, others))


def test_an_adapter_is_held_to_the_mean_that_it_says_it_takes(
    megatron_rank_pool, monkeypatch, request
):
    monkeypatch.syspath_prepend(str(request.path.parent))
    for where, said in (("moe", "the gradient is "), ("tied", "")):
        fault, _ = run.outcome_of(
            megatron_rank_pool,
            "planted_batches:SaysThatItAverages",
            CHECKS["whole-step"],
            layout(where),
        )
        assert fault.startswith(said)
        assert bool(fault) == bool(said)
