"""Starts a cluster of two nodes, and brings weights from ranks on both to engines on both.

It prints as JSON where they ran, and which engines took the update.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import tempfile
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engines"), str(HERE.parents[2])]

from tiny import make_checkpoint  # noqa: E402

from benchmarks.weight_fan_out import CheckpointSource, make_engine  # noqa: E402
from megatron_idempotent.rl.engines.ray import RayEngine  # noqa: E402
from megatron_idempotent.rl.sync import Exports, RemoteWeights, WeightSync  # noqa: E402
from megatron_idempotent.rl.weights.transports import DiskSender  # noqa: E402
from megatron_idempotent.rl.workers import WorkerSpec  # noqa: E402
from megatron_idempotent.rl.workers.ray import RayRanks  # noqa: E402


class Worker(Exports):
    """Exports a checkpoint's weights, and says where it runs."""

    def place(self):
        """Return the node and the local rank."""
        return ray.get_runtime_context().get_node_id(), os.environ["LOCAL_RANK"]


def make(folder):
    return Worker(CheckpointSource(folder))


async def main(folder: Path) -> None:
    checkpoint = folder / "checkpoint"
    make_checkpoint(checkpoint)
    ranks = RayRanks(
        WorkerSpec(factory="two_nodes:make", argument=str(checkpoint)), 2, strategy="STRICT_SPREAD"
    )
    await ranks.start()
    weights = RemoteWeights(ranks, asyncio.get_running_loop(), transport=None)
    engines = [
        RayEngine(
            name,
            functools.partial(make_engine, str(checkpoint), name),
            transport=functools.partial(
                weights.sender, functools.partial(DiskSender, folder / "sync")
            ),
        )
        for name in ("engine-0", "engine-1")
    ]
    await asyncio.gather(*(engine.ready() for engine in engines))
    places = await ranks.call("place")
    report = await WeightSync(engines).update(weights, 1)
    (bucket, *_) = await asyncio.to_thread(list, weights.buckets(bucket_bytes=1 << 20))
    node = lambda actor: ray.get_runtime_context().get_node_id()  # noqa: E731
    said = {
        "rank nodes": [place for place, _ in places],
        "local ranks": [local for _, local in places],
        "engine nodes": [await engine._actor.__ray_call__.remote(node) for engine in engines],
        "committed": sorted(report.named("committed")),
        "tensors here": sorted({tensor.device.type for tensor in bucket.tensors.values()}),
    }
    await asyncio.gather(ranks.close(), *(engine.close() for engine in engines))
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    paths = os.pathsep.join(filter(None, sys.path))
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name)))
    ray.shutdown()
    cluster.shutdown()
