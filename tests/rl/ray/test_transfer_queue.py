"""Groups in TransferQueue come back as they were put."""

import asyncio
import sys

import pytest
import torch
from contract_plane import PlaneContract, group

from megatron_idempotent.rl.controller.data_plane import TransferQueuePlane


class TestTransferQueuePlane(PlaneContract):
    @pytest.fixture
    def make_plane(self, queue):
        """Planes in the one queue that runs."""
        return TransferQueuePlane

    def test_a_put_that_was_not_completed_is_no_group_and_can_be_repaired(self, queue, make_plane):
        async def scenario(plane):
            await plane.put(group(1))  # the partition is there
            await queue.get_client().async_kv_retrieve_meta(
                keys=["2"], partition_id=plane.partition, create=True
            )
            with pytest.raises(KeyError, match="group 2"):
                await plane.get(2)
            await queue.async_kv_put("3", plane.partition, fields={"tokens": torch.arange(3)})
            with pytest.raises(KeyError, match="group 3"):
                await plane.get(3)
            for number in (2, 3):
                await plane.put(group(number))
                assert await plane.get(number) == group(number)

        self.run(make_plane, scenario)

    def test_torch_computes_with_as_many_threads_as_before(self, queue, make_plane):
        """Read in batches of another number: sums come out in another order."""

        async def scenario(plane):
            before = torch.get_num_threads()
            puts = [asyncio.ensure_future(plane.put(group(number))) for number in range(8)]
            seen = set()
            while not all(put.done() for put in puts):
                seen.add(torch.get_num_threads())
                await asyncio.sleep(0)
            assert seen == {before}
            await asyncio.gather(*puts)
            assert torch.get_num_threads() == before

        self.run(make_plane, scenario)

    def test_a_closed_plane_leaves_nothing_in_the_queue(self, queue, make_plane):
        async def scenario(plane):
            for number in range(3):
                await plane.put(group(number))
            listed = await queue.async_kv_list(partition_id=plane.partition)
            tags = listed[plane.partition]["1"]
            assert (tags["version"], tags["tokens"]) == (group(1).oldest_version, group(1).tokens)
            await plane.close()
            listed = await queue.async_kv_list(partition_id=plane.partition)
            assert not listed.get(plane.partition)

        self.run(make_plane, scenario)

    def test_a_run_that_comes_back_finds_what_its_partition_holds(self, queue):
        async def scenario(plane):
            await plane.put(group(1))
            again = TransferQueuePlane(partition=plane.partition)
            assert await again.get(1) == group(1)

        self.run(lambda: TransferQueuePlane(partition="a run"), scenario)


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transfer_queue", None)
    with pytest.raises(ModuleNotFoundError, match=r"megatron-idempotent\[transferqueue\]"):
        asyncio.run(TransferQueuePlane().get(1))


def test_without_a_cluster_it_says_how_to_join_one(monkeypatch):
    import ray

    pytest.importorskip("transfer_queue")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"ray.init\(\)"):
        asyncio.run(TransferQueuePlane().get(1))
