"""Listeners of ranks on Ray and of their driver: Ray's own, and those of SECURITY.md's table."""

import contextlib
import os
from pathlib import Path

import kill_points
from listeners import Row, listening, report, rows_of_ranks, table

from megatron_idempotent.rl.engines.ray import RayEngine
from megatron_idempotent.rl.weights.transports import DiskSender
from megatron_idempotent.rl.workers.protocol import WorkerSpec
from megatron_idempotent.rl.workers.ray import RayRanks


class Told:
    """Tells what its process listens at: as a worker of ranks, or as an actor of nothing else."""

    def __init__(self, argument=None):
        pass

    def report(self):
        return report()

    def listeners(self):
        return listening(os.getpid())


async def test_ranks_and_driver_listen_at_what_the_table_says_and_rays_own_ports(cluster):
    every = "every interface"
    of_driver = listening(os.getpid())
    of_ray = await cluster.remote(Told).remote().listeners.remote()
    ranks = RayRanks(WorkerSpec(factory="test_ray_listeners:Told"), 2)
    try:
        await ranks.start()
        reports = await ranks.call("report")
        assert listening(os.getpid()) == of_driver
    finally:
        await ranks.close()
    engine = RayEngine("engine-0", Told, transport=DiskSender)
    of_engine = await engine._actor.__ray_call__.remote(lambda actor: listening(os.getpid()))
    cluster.kill(engine._actor)
    rows = {
        Row(process, "Ray's gRPC", str(sum(each.address == every for each in found)), every)
        for process, found in (("driver", of_driver), ("each engine", of_engine))
    }
    assert [(each.kind, each.address) for each in of_ray] == [("TCP", every)]
    for each in reports:
        own = {listener for listener in each["listeners"] if listener.address == every}
        each["listeners"] -= own
        rows.add(Row("each rank", "Ray's gRPC", str(len(own)), every))
    names = {cluster.util.get_node_ip_address(): "the node's"}
    for row in rows_of_ranks(reports):
        rows.add(row._replace(address=names[row.address]))
    assert rows == {row for row in table("Ray") if not row.process.startswith("GCS")}


def test_rays_own_processes_listen_at_what_the_table_says(cluster):
    (row,) = (row for row in table("Ray") if row.process.startswith("GCS"))
    programs, addresses = set(), set()
    for pid in kill_points.descendants(os.getpid()):  # agents change their names
        with contextlib.suppress(OSError):  # it has ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().partition("\0")[0]
            programs.add(Path(command).name)
            addresses |= {each.address for each in listening(pid) if each.kind == "TCP"}
    assert {"gcs_server", "raylet"} <= programs
    names = {cluster.util.get_node_ip_address(): "the node's"}
    found = {names.get(address, address) for address in addresses} - {"127.0.0.1"}
    assert found == set(row.address.split(", "))
