"""A run that loads the distributed optimizer goes on as the run that saved it."""

from __future__ import annotations

import pytest
from ranks import built, on_ranks, same

from megatron_idempotent.patching.decide import installed

pytest.importorskip("psutil", reason="megatron.core.dist_checkpointing needs psutil, undeclared")

MEGATRON = installed("megatron-core")


# 0.12's writer calls a private function of torch that takes one more argument today; 0.15
# asserts that the step counter of torch's Adam has a parameter's shape.
@pytest.fixture(autouse=True)
def _saves_what_torch_has():
    if MEGATRON is not None and MEGATRON.release < (0, 16):
        pytest.skip(f"megatron-core {MEGATRON.text} cannot save torch's Adam of today")


@on_ranks(2)
def test_a_loaded_run_goes_on_to_the_bit(tmp_path):
    """Three steps, saved after two; loaded into a model that never stepped, or did."""
    import torch
    from megatron.core import dist_checkpointing

    def sharded(bench, is_loading):
        model = bench.chunks[0].module.sharded_state_dict()
        how = {"metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
        optimizer = bench.optimizer.sharded_state_dict(model, is_loading=is_loading, **how)
        return {"model": model, "optimizer": optimizer}

    def advance(bench, data_seed):
        bench.forward_backward(2, data_seed=data_seed)
        bench.step()

    saved = built(seed=1)
    advance(saved, 0)
    advance(saved, 1)
    dist_checkpointing.save(sharded(saved, False), str(tmp_path))
    advance(saved, 2)
    for steps_before in (0, 1):
        loaded = built(seed=2)
        for data_seed in range(steps_before):
            advance(loaded, data_seed)
        state = dist_checkpointing.load(sharded(loaded, True), str(tmp_path))
        loaded.chunks[0].module.load_state_dict(state["model"])
        with torch.no_grad():  # upstream copies into fp32 parameters in place
            loaded.optimizer.load_state_dict(state["optimizer"])
        advance(loaded, 2)
        assert same(saved.parameters(), loaded.parameters())
