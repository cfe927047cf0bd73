"""Strategies that fill buffers in property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_idempotent.rl.controller.buffer import GroupBuffer

# A few ids and versions, so that they meet often.
group_ids = st.integers(0, 11)
versions = st.integers(0, 5)

contents = st.lists(
    st.tuples(group_ids, st.one_of(st.none(), versions)),
    unique_by=lambda pair: pair[0],
    max_size=12,
)
"""Groups in the order of their arrival: id and version, None for one that is being generated."""


def filled(groups) -> GroupBuffer:
    """A buffer of `contents`."""
    buffer = GroupBuffer(len(groups) + 1)
    for group_id, version in groups:
        buffer.reserve(group_id, version=group_id % 6)
        if version is not None:
            buffer.commit(group_id, version=version)
    return buffer
