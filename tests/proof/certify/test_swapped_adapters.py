"""Two adapters over one base do not disturb each other, and certify sees where they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_idempotent.proof.certify import CHECKS, certify, layout, run

SWAPPED = "swapped-adapters"
OWN = "megatron_idempotent.proof.certify.adapters:SplitStep"


@pytest.fixture(autouse=True)
def importable(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.path.parent))


def fault_of(pool, adapter, where="dp2", **options):
    fault, _ = run.outcome_of(pool, adapter, CHECKS[SWAPPED], layout(where), **options)
    return fault


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("NudgesTheBase", "a step of alice has moved decoder.layers.0.mlp.linear_fc1.weight of "),
        pytest.param("SharesMoments", "the gradient is off by ", marks=pytest.mark.exhaustive),
        pytest.param("AbortsAll", "RuntimeError in ", marks=pytest.mark.exhaustive),
    ],
)
def test_tenants_that_disturb_each_other_are_found(megatron_rank_pool, bug, said):
    assert said in fault_of(megatron_rank_pool, f"planted_tenants:{bug}")


def test_windows_of_two_adapters_mix_where_tensor_parallel_ranks_add_up(megatron_rank_pool):
    # Finalizing adds up the gradients of norms over these ranks, those of the other one's too.
    adapter = "megatron_idempotent.proof.certify.adapters:Window"
    assert fault_of(megatron_rank_pool, adapter, "tp2").startswith("the gradient is off by ")
    assert not fault_of(megatron_rank_pool, adapter)


@pytest.mark.exhaustive
def test_stock_megatron_trains_two_adapters_in_one_call_each(megatron_rank_pool):
    adapter = "megatron_idempotent.proof.certify.adapters:Megatron"
    assert not fault_of(megatron_rank_pool, adapter, "tp2", stock=True)


@pytest.mark.parametrize(
    ("adapter", "where", "said"),
    [
        ("planted_tenants:NoTenants", "dp2", "no tenant()"),
        (OWN, "dp2-bf16", "no adapters in 16 bits and on FSDP2"),
    ],
)
def test_adapters_are_judged_where_there_can_be_two(megatron_rank_pool, adapter, where, said):
    *_, found = certify(adapter, checks=[SWAPPED], layouts=[where], pool=megatron_rank_pool)
    assert (found.verdict, found.fault) == ("not offered", said)


def bias_beside_a_frozen_weight(patched: bool) -> list[Any]:
    """Runs on a rank: gradients of biases, beside trained weights and frozen ones."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if patched:
        megatron_idempotent.apply(["frozen-weight-bias-untrained"])
    found = []
    for trained in (("linear_qkv.bias", "linear_qkv.weight"), ("linear_qkv.bias",)):

        def prepare(module, trained=trained):
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name.endswith(trained))

        model = tiny.build(before_ddp=prepare, overlap_grad_reduce=False)
        model.forward_backward(1, data_seed=0)
        named = model.chunks[0].module.named_parameters()
        found.append([each.main_grad for name, each in named if name.endswith("linear_qkv.bias")])
    return found


def test_a_bias_beside_a_frozen_weight_has_the_bits_of_one_beside_a_trained_weight(
    megatron_rank_pool,
):
    # Stock Megatron computes none of it: so no adapter here has such a bias.
    ((trained, stock),) = megatron_rank_pool.run(1, bias_beside_a_frozen_weight, False)
    assert not any(each.any() for each in stock)
    ((_, patched),) = megatron_rank_pool.run(1, bias_beside_a_frozen_weight, True)
    assert all(each.any() for each in trained)
    assert all(map(torch.equal, trained, patched))
