"""The layer-wise optimizer is built over one instance of optimizer ranks, or refused."""

from __future__ import annotations

import pytest
from ranks import RELEASE, built, on_ranks


@pytest.mark.skipif(RELEASE < (0, 18), reason="DDP refuses several instances there")
@pytest.mark.parametrize("instances", [1, 2])
@on_ranks(4)
def test_several_instances_are_refused_before_a_step(instances: int) -> None:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    options = {
        "layer_wise": True,
        "overlap_grad_reduce": False,
        "dtype": "bf16",
        "ddp_overrides": {"num_distributed_optimizer_instances": instances},
    }
    if instances == 1:
        model = built(**options)
        model.forward_backward(1, data_seed=0)
        assert model.step()[0]
        return
    # Ours before 0.19, and upstream's own from then on.
    with pytest.raises((ValueError, AssertionError), match="num_distributed_optimizer_instances"):
        built(**options)
