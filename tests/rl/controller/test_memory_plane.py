"""The data plane in memory does what every data plane does."""

from __future__ import annotations

import pytest
from contract_plane import PlaneContract, group

from megatron_idempotent.rl.controller.data_plane import MemoryPlane


class TestMemoryPlane(PlaneContract):
    @pytest.fixture
    def make_plane(self):
        return MemoryPlane


async def test_groups_that_are_cleared_or_of_a_closed_plane_leave_nothing_behind():
    plane = MemoryPlane()
    for number in range(100):
        await plane.put(group(number, samples=1))
        await plane.clear([number - 3, number - 3])
        assert len(plane) <= 3
    await plane.close()
    assert len(plane) == 0
    assert (plane or None) is plane, "an empty one is not no plane"
