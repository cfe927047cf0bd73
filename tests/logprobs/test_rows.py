"""Rows that are read together: all that are kept, in order, copied only where they lie apart."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None)
@given(
    masks=st.lists(st.lists(st.booleans(), max_size=30), min_size=1, max_size=3),
    rows=st.integers(1, 12),
)
def test_blocks_are_all_kept_rows_in_order(masks, rows):
    import torch

    from megatron_idempotent.logprobs.sources import blocks, flat_indices

    sizes = [len(mask) for mask in masks]
    kept_N = torch.tensor([each for mask in masks for each in mask], dtype=torch.bool)
    found, done = [], 0
    for block in blocks(sizes, kept_N, rows):
        numbers = torch.arange(sizes[block.panel])[block.rows]
        assert 0 < len(numbers) <= rows
        assert block.kept == slice(done, done + len(numbers))
        done += len(numbers)
        found += [(block.panel, row) for row in numbers.tolist()]
    wanted = [
        (panel, row) for panel, mask in enumerate(masks) for row, kept in enumerate(mask) if kept
    ]
    assert found == wanted
    at = {}
    for panel, chosen, row in flat_indices(sizes, kept_N, torch.arange(len(wanted))):
        numbers = torch.arange(len(wanted))[chosen]
        at |= dict(zip(numbers.tolist(), ((panel, each) for each in row.tolist()), strict=True))
    assert [at[number] for number in range(len(wanted))] == wanted


def test_rows_that_follow_each_other_are_not_copied():
    import torch

    from megatron_idempotent.logprobs.sources import blocks

    responses = torch.arange(64) % 16 >= 6
    assert all(isinstance(each.rows, slice) for each in blocks([64], responses, 8))
    every_other = torch.arange(64) % 2 == 0
    assert not any(isinstance(each.rows, slice) for each in blocks([64], every_other, 16))
    assert [each.rows for each in blocks([64], None, 48)] == [slice(0, 48), slice(48, 64)]
