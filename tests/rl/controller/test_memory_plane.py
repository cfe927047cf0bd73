"""The data plane in memory does what every data plane does."""

import json
from types import SimpleNamespace

import pytest
from contract_plane import PlaneContract, check_same, group

from megatron_idempotent.rl.controller.buffer import GroupBuffer
from megatron_idempotent.rl.controller.checkpoint import capture, put_back
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


async def test_a_checkpoint_brings_groups_back_as_they_were():
    written = group(0, samples=3)
    buffer, plane, again = GroupBuffer(1), MemoryPlane(), MemoryPlane()
    buffer.reserve(0)
    buffer.commit(0, version=0)
    shared = SimpleNamespace(
        buffer=buffer,
        sampler=SimpleNamespace(name="strict", max_staleness=0),
        settings=SimpleNamespace(groups_per_step=1),
        trainer_version=0,
        next_prompt=1,
        prompts=SimpleNamespace(prompt=lambda _: written.prompt),
    )
    await plane.put(written)
    state = json.loads(json.dumps(await capture(shared, plane)))
    await put_back(shared, again, state)
    check_same(await again.get(0), written)
