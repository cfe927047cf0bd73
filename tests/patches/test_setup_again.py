"""ensure_initialized() sets up once, and never hides that something is up otherwise."""

from __future__ import annotations

import pytest
from ranks import on_ranks

BATCHES = {"rampup_batch_size": None, "global_batch_size": 8, "micro_batch_size": 2}


@on_ranks(2)
def test_a_second_set_up_is_compared_with_the_first():
    from megatron.core import parallel_state

    from megatron_idempotent.window import ensure_initialized

    def refused(match: str, **parts) -> None:
        with pytest.raises((ValueError, TypeError), match=match):
            ensure_initialized(**parts)

    two = {"tensor_model_parallel_size": 2}
    five = {**two, "distributed_timeout_minutes": 5}
    first = {"rank": 0, "data_parallel_size": 1, **BATCHES}
    assert ensure_initialized(model_parallel=two) == ["model_parallel"]
    assert ensure_initialized(model_parallel={**two, "expert_tensor_parallel_size": 2}) == []
    size = "tensor_model_parallel_size=1, and model_parallel is up with 2: call"
    refused(size, model_parallel={})
    refused("_timeout_minutes=5, and model_parallel is up with 30", model_parallel=five)
    assert ensure_initialized(microbatches=first, model_parallel=two) == ["microbatches"]
    assert ensure_initialized(microbatches={**first, "rank": 1}) == []
    said = "data_parallel_size=2, and microbatches is up with 1: call reconfigure"
    refused(said, microbatches={**first, "data_parallel_size": 2})
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**two)  # by somebody else
    assert ensure_initialized(model_parallel=two) == []
    refused("_timeout_minutes=5, and model_parallel was set up elsewhere", model_parallel=five)
    refused("'tensor'", model_parallel={"tensor": 2})
