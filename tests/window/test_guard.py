"""Finds which ranks wait for each other inside of a model, by its config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

MET = [
    {"expert_model_parallel_size": 2, "num_moe_experts": 4},
    {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]},
    {"expert_tensor_parallel_size": 2, "num_moe_experts": 4},
    {"expert_tensor_parallel_size": 4, "tensor_model_parallel_size": 2, "num_moe_experts": 4},
]
NOT_MET = [
    {},
    {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    {"moe_router_load_balancing_type": "aux_loss", "num_moe_experts": 4},
    {"expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 2, "num_moe_experts": 4},
    {"expert_tensor_parallel_size": 2, "num_moe_experts": None},
]


@pytest.mark.parametrize(
    ("config", "met"), [(c, True) for c in MET] + [(c, False) for c in NOT_MET]
)
def test_whether_replicas_meet_inside_of_a_layer(config, met):
    from megatron_idempotent.window.guard import across_replicas

    why = across_replicas(SimpleNamespace(**config))
    assert (why is not None) is met
    if met:
        assert why.split("=")[0] in config
