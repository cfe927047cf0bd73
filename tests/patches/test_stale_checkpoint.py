"""`dist_checkpointing.save` gathers what it is about to write, and nothing else."""

from __future__ import annotations

import pytest
from ranks import built, groups, on_ranks


class Looked(Exception):
    """Ends the save where the writer would begin."""


@pytest.mark.parametrize(
    ("saved", "left"),
    [
        ((0,), [False, True]),
        ((1,), [True, False]),
        ((0, 1), [False, False]),
        ((), [True, True]),
    ],
)
@on_ranks(2)
def test_only_the_models_that_are_saved_are_gathered(saved, left):
    """Two models with an update pending each."""
    import tempfile

    from megatron.core import dist_checkpointing

    from megatron_idempotent.megatron import gather

    only = ["checkpoint-before-gather"]
    models = [built(only, overlap_param_gather=True, dtype=dtype) for dtype in ("fp32", "bf16")]
    for model in models:
        model.train_step(2, data_seed=0)

    def pending() -> list[int]:
        return [sum(bool(gather.marked(g)) for g in groups(model)) for model in models]

    def look(_):
        raise Looked

    state = {
        str(index): chunk.module.sharded_state_dict()
        for index in saved
        for chunk in models[index].chunks
    }
    assert all(count > 1 for count in pending())
    with tempfile.TemporaryDirectory() as folder, pytest.raises(Looked):
        dist_checkpointing.save(state, folder, preprocess_common_before_consistancy_check=look)
    assert [count > 0 for count in pending()] == left
