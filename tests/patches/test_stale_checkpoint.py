"""`dist_checkpointing.save` gathers what it is about to write, and nothing else."""

from __future__ import annotations

import pytest
from ranks import built, groups, on_ranks


@pytest.mark.parametrize(
    ("saved", "left"),
    [((0,), [False, True]), ((1,), [True, False]), ((0, 1), [False, False]), ((), [True, True])],
)
@on_ranks(2)
def test_only_the_models_that_are_saved_are_gathered(saved, left):
    """Two models with an update pending each."""
    from megatron_idempotent.patches import _case

    from megatron_idempotent.megatron import gather

    only = ["checkpoint-before-gather"]
    models = [built(only, overlap_param_gather=True, dtype=dtype) for dtype in ("fp32", "bf16")]
    for model in models:
        model.train_step(2, data_seed=0)

    def pending() -> list[int]:
        return [sum(bool(gather.marked(g)) for g in groups(model)) for model in models]

    state = {
        str(index): chunk.module.sharded_state_dict()
        for index in saved
        for chunk in models[index].chunks
    }
    assert all(count > 1 for count in pending())
    _case.begin_save(state)
    assert [count > 0 for count in pending()] == left
