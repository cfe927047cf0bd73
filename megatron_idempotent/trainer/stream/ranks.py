"""The ranks of an asynchronous run, wherever the configuration puts them."""

from __future__ import annotations

import dataclasses
import os

from megatron_idempotent.cpu import PROGRAM_PRELOAD, RankPool
from megatron_idempotent.trainer.job import Job
from megatron_idempotent.workers import EmbeddedRanks, RankGroup, WorkerSpec

FACTORY = "megatron_idempotent.trainer.stream.worker:make_worker"
#: Imported once, and not again by each rank and after each loss of ranks.
PRELOAD = (*PROGRAM_PRELOAD, "megatron_idempotent.trainer.stream.worker")


def worker_spec(job: Job) -> WorkerSpec:
    """Returns the worker of every rank. Ranks may run in other folders, so paths are absolute."""
    return WorkerSpec(factory=FACTORY, argument=dataclasses.replace(job, out=job.out.absolute()))


def make_ranks(job: Job, *, pool: RankPool | None = None) -> RankGroup:
    """Makes the ranks that the configuration asks for; they are not started yet."""
    size, cluster = job.config.run.ranks, job.config.controller.cluster
    if cluster == "ray":
        from megatron_idempotent.workers.ray_ranks import RayRanks

        return RayRanks(worker_spec(job), size)
    if cluster == "torchrun":
        from megatron_idempotent.workers import TorchrunRanks

        return TorchrunRanks(size, job.out)
    # One thread per rank: the ranks are what fills the cores, and one thread adds up in one order.
    os.environ["OMP_NUM_THREADS"] = "1"
    return EmbeddedRanks(
        worker_spec(job),
        size,
        log_dir=job.out / "logs",
        pool=pool,
        preload=PRELOAD,
        device=job.config.run.device,
    )
