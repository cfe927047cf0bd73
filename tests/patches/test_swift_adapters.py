"""`swift-adapter-unsummed` marks the factor that ranks have whole, where tokens are in parts."""

from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks


@pytest.mark.parametrize(
    ("change", "marked"),
    [
        ({}, "lora_A"),
        ({"is_parallel_a": True}, "lora_B"),
        ({"config": SimpleNamespace(sequence_parallel=False)}, "lora_A"),
        ({"config": SimpleNamespace(sequence_parallel=False), "sequence_parallel": False}, None),
        ({"tp_size": 1}, None),
        ({"base_layer": "router"}, None),
    ],
    ids=["column", "row", "layer", "whole-sequence", "one-rank", "router"],
)
@on_ranks(1)
def test_the_factor_that_ranks_share_is_marked_where_each_has_a_part_of_the_tokens(change, marked):
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron_idempotent.patches.frameworks import swift_adapter_unsummed

    if change.get("base_layer") == "router":
        change = {"base_layer": TopKRouter.__new__(TopKRouter)}
    layer = {
        "config": SimpleNamespace(sequence_parallel=True),
        "sequence_parallel": True,
        "base_layer": None,
        "is_parallel_a": False,
        "tp_size": 2,
        "lora_A": {},
        "lora_B": {},
    }
    adapter = SimpleNamespace(**layer | change)

    def make(self, name, rank, *, lora_alpha):
        assert (rank, lora_alpha) == (4, 8)
        self.lora_A[name], self.lora_B[name] = torch.nn.Linear(2, rank), torch.nn.Linear(rank, 2)

    adapter.lora_A["before"] = torch.nn.Linear(2, 4)
    swift_adapter_unsummed.update_layer(make, adapter, "new", 4, lora_alpha=8)
    for name in ("lora_A", "lora_B"):
        for parameter in getattr(adapter, name)["new"].parameters():
            assert getattr(parameter, "sequence_parallel", False) == (name == marked)
    assert not hasattr(adapter.lora_A["before"].weight, "sequence_parallel")
