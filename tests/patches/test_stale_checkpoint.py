"""`dist_checkpointing.save` gathers what it is about to write, and nothing else."""

from __future__ import annotations

import pytest


class Looked(Exception):
    """Ends the save where the writer would begin."""


def save_one_of_two(which: str) -> tuple[list[int], list[int]]:
    """Runs on a rank: two models with an update pending each; groups pending after saving one of
    them.

    Returns the number of bucket groups whose update waits, before and after the save, per model.
    """
    import tempfile

    from megatron.core import dist_checkpointing

    import megatron_idempotent
    from megatron_idempotent.megatron import gather
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply(only=["checkpoint-before-gather"])
    models = [tiny.build(overlap_param_gather=True, dtype=dtype) for dtype in ("fp32", "bf16")]
    for model in models:
        model.forward_backward(2, data_seed=0)
        model.step()

    def pending() -> list[int]:
        return [
            sum(bool(gather.marked(g)) for chunk in model.chunks for g in chunk.bucket_groups)
            for model in models
        ]

    def look(_):
        raise Looked

    saved = {"first": models[:1], "second": models[1:], "both": models, "neither": []}[which]
    state = {
        str(index): chunk.module.sharded_state_dict()
        for index, model in enumerate(saved)
        for chunk in model.chunks
    }
    before = pending()
    with tempfile.TemporaryDirectory() as folder, pytest.raises(Looked):
        dist_checkpointing.save(
            state,
            folder,
            preprocess_common_before_consistancy_check=look,
        )
    return before, pending()


@pytest.mark.parametrize(
    ("which", "left"),
    [
        ("first", (False, True)),
        ("second", (True, False)),
        ("both", (False, False)),
        ("neither", (True, True)),
    ],
)
def test_only_the_models_that_are_saved_are_gathered(which, left, megatron_ranks):
    for before, after in megatron_ranks(2, save_one_of_two, which):
        assert all(count > 1 for count in before)
        assert tuple(count > 0 for count in after) == left
