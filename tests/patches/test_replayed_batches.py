"""Each run of a step gets the microbatches that the data iterator gave, whatever runs change."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import needs_release, on_ranks

import megatron_idempotent

needs_release((0, 12), "the tests need a Megatron")


def replaying(microbatches: list[Any], mode: str = "VALIDATE_RESULTS") -> Any:
    """Return a patched iterator of the rerun state machine over microbatches."""
    from megatron.core.rerun_state_machine import (
        RerunDataIterator,
        RerunMode,
        get_rerun_state_machine,
    )

    megatron_idempotent.apply(["replayed-batch-changed"], strict=True)
    get_rerun_state_machine().set_mode(RerunMode[mode])
    return RerunDataIterator(iter(microbatches))


@on_ranks(1, distributed=False)
def test_the_first_run_gets_the_very_microbatch_and_others_get_equal_ones() -> None:
    microbatches = [{"tokens": [1, 2], "mask": 3}, {"tokens": [4], "mask": 5}]
    expected = [dict(each) for each in microbatches]
    data = replaying(microbatches)
    for run in range(4):
        given = [next(data) for _ in microbatches]
        assert given == expected
        if run == 0:
            assert all(one is other for one, other in zip(given, microbatches, strict=True))
        for microbatch in given:
            del microbatch["mask"]
            microbatch["tokens"] = []
        data.rewind()
    assert data.state_dict()["saved_microbatches"] == expected


@pytest.mark.parametrize("microbatch", [None, (1, 2), 7], ids=str)
@on_ranks(1, distributed=False)
def test_a_microbatch_of_any_kind_is_given_again(microbatch: Any) -> None:
    data = replaying([microbatch])
    for _ in range(3):
        assert next(data) == microbatch
        data.rewind()


@on_ranks(1, distributed=False)
def test_tensors_are_not_copied() -> None:
    import torch

    tokens = torch.arange(4)
    data = replaying([{"tokens": tokens}])
    for _ in range(3):
        assert next(data)["tokens"] is tokens
        data.rewind()


@on_ranks(1, distributed=False)
def test_nothing_is_kept_where_no_step_is_run_again() -> None:
    data = replaying([{"tokens": 1}, {"tokens": 2}], mode="DISABLED")
    assert [next(data), next(data)] == [{"tokens": 1}, {"tokens": 2}]
    assert data.saved_microbatches == []
