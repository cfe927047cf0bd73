"""Finds which ranks wait for each other inside of a model, by its config."""

from types import SimpleNamespace

from ranks import on_ranks

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


@on_ranks(1)
def test_whether_replicas_meet_inside_of_a_layer():
    """The settings for which replicas meet, or None."""
    from megatron_idempotent.window.guard import across_replicas

    found = [across_replicas(SimpleNamespace(**config)) for config in (*MET, *NOT_MET)]
    assert found[len(MET) :] == [None] * len(NOT_MET)
    for config, why in zip(MET, found, strict=False):
        assert why is not None
        assert why.split("=")[0] in config
