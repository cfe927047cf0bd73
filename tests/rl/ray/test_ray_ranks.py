"""Ranks in Ray actors: the contract of all kinds, where they run, and what they run in."""

import asyncio
import os
import signal
import sys

import numpy
import pytest
from contract_ranks import FactoryContract, RankContract
from contract_worker import Unreadable

from megatron_idempotent.rl.workers.protocol import RankFailed, RanksLost, WorkerSpec
from megatron_idempotent.rl.workers.ray import RayRanks, places

TOLD = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
SPEC = WorkerSpec(factory="ray_cases:Surroundings", argument=[*TOLD, "OF_THE_RUN"])


@pytest.fixture(scope="module")
def make_ranks(cluster):
    """Make ranks on this machine's cluster."""
    return lambda spec, size: RayRanks(spec, size)


class TestRayRanks(RankContract):
    pass


class TestRayFactory(FactoryContract):
    pass


async def test_a_rank_has_the_surroundings_that_torchrun_gives_and_memory_of_its_own(cluster):
    ranks = RayRanks(SPEC, 2, environment={"OF_THE_RUN": "yes"})
    try:
        await ranks.start()
        told = await ranks.call("tell")
        assert [each["RANK"] for each in told] == ["0", "1"]
        assert [each["LOCAL_RANK"] for each in told] == ["0", "1"]
        for each in told:
            assert (each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) == ("2", "2")
            assert (each["OF_THE_RUN"], each["cpu"], each["main"]) == ("yes", True, True)
        assert told[0]["MASTER_ADDR"] == told[1]["MASTER_ADDR"]
        assert int(told[0]["MASTER_PORT"]) == int(told[1]["MASTER_PORT"]) > 0
        # Large enough to travel beside the pickle.
        array = numpy.arange(1 << 18)
        for doubled in await ranks.call("double", array):
            assert (doubled == 2 * array).all()
            doubled += 1
    finally:
        await ranks.close()


async def test_a_cluster_without_room_is_an_error_that_names_both(cluster):
    ranks = RayRanks(SPEC, 3, num_cpus=4, resources={"lathe": 1}, start_timeout_s=0.2)
    for _ in range(2):
        with pytest.raises(RanksLost, match=r"3 x \(4 CPU, 1 lathe\).*PACK.*of 8 CPU free"):
            await ranks.start()
    with pytest.raises(RanksLost, match=r"start\(\)"):
        await ranks.call("tell")
    await ranks.close()
    assert not reserved(cluster)


async def test_a_start_that_is_cancelled_leaves_nothing_behind(cluster):
    ranks = RayRanks(SPEC, 2)
    starting = asyncio.ensure_future(ranks.start())
    while not reserved(cluster):
        await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    await ranks.close()
    assert not reserved(cluster)
    while any(
        each["ActorClassName"] == "RankActor" and each["State"] != "DEAD"
        for each in cluster.state.actors().values()
    ):
        await asyncio.sleep(0.05)


async def test_an_argument_that_ranks_cannot_read_is_an_error_and_leaves_no_actor(cluster):
    ranks = RayRanks(WorkerSpec(factory="ray_cases:Surroundings", argument=Unreadable()), 2)
    with pytest.raises(RankFailed, match="this cannot be read"):
        await ranks.start()
    await ranks.close()
    assert not reserved(cluster)


async def test_a_killed_rank_is_told_with_what_ray_knows_of_its_end(cluster):
    spec = WorkerSpec(factory="ray_cases:Surroundings", argument=[])
    ranks = RayRanks(spec, 1)
    try:
        await ranks.start()
        (pid,) = await ranks.call("process")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RanksLost, match=r"rank 0 was lost .*ActorDiedError"):
            await ranks.call("process")
    finally:
        await ranks.close()


def reserved(cluster):
    """Placement groups that there are, or will be."""
    groups = cluster.util.placement_group_table().values()
    return [each for each in groups if each["state"] != "REMOVED"]


def test_ranks_of_a_node_are_neighbours():
    found = places("2121", shows_own_gpus=False)
    assert [actor for actor, _ in found] == [0, 2, 1, 3]
    assert [own["RANK"] for _, own in found] == ["0", "1", "2", "3"]
    assert [own["LOCAL_RANK"] for _, own in found] == ["0", "1", "0", "1"]
    assert {(own["WORLD_SIZE"], own["LOCAL_WORLD_SIZE"]) for _, own in found} == {("4", "2")}
    assert {own["LOCAL_RANK"] for _, own in places("2121", shows_own_gpus=True)} == {"0"}


def test_without_ray_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"megatron-idempotent\[ray\]"):
        asyncio.run(RayRanks(SPEC, 2).start())


def test_without_a_cluster_it_says_how_to_join_one(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"ray.init\(\)"):
        asyncio.run(RayRanks(SPEC, 2).start())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"size": 0}, "size is 0"),
        ({"size": 1, "num_cpus": 0}, "num_cpus=0"),
        ({"size": 1, "spec": WorkerSpec(factory="no_colon")}, "no_colon"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        RayRanks(**{"spec": SPEC, **settings})
