"""The trainer on a Ray cluster: ranks and groups in its actors."""

import contextlib
import os
import signal

import pytest

pytest.importorskip("transformers")

from trainer_cases import ASYNC, digest, job_for, rows

from megatron_idempotent.rl.controller import Fleet
from megatron_idempotent.rl.engines.ray import RayEngine
from megatron_idempotent.rl.sync.exports import RemoteBuckets
from megatron_idempotent.rl.trainer.async_run import connect, run_controller
from megatron_idempotent.rl.trainer.output import data_path
from megatron_idempotent.rl.trainer.task.prompts import read_prompts


@pytest.mark.filterwarnings("ignore")  # of what Ray and TransferQueue import, in this process
def test_a_run_on_ray_whose_engine_is_killed_has_the_bits_of_one_on_this_machine(
    cluster, queue, tmp_path, monkeypatch
):
    on_ray = (
        "controller.cluster=ray",
        "controller.plane=transfer_queue",
        "controller.call_timeout_s=60",
    )
    publish, killed = Fleet.publish, []

    async def publish_and_kill(self, version):
        published = await publish(self, version)
        if version == 2 and isinstance(engine := self._engines["engine-1"], RayEngine):
            pid = await engine._actor.__ray_call__.remote(lambda actor: os.getpid())
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
        return published

    monkeypatch.setattr(Fleet, "publish", publish_and_kill)
    # Which engine draws a sample, and beside which others, decides the rounding of its log-probs;
    # its tokens are the same, and the loss takes log-probs that the trainer computes.
    two = ("run.rollouts=4", "controller.engines=2", "loss.correction=none")
    digests, metrics = [], []
    for name, settings in (("here", ()), ("there", on_ray)):
        job = job_for(tmp_path / name, *ASYNC, *two, *settings)
        with counting_weights() as received:
            assert run_controller(job, read_prompts(data_path(job.config)))
        digests.append(digest(job, 4))
        metrics.append(rows(job))
    assert len(killed) == 1
    assert digests[0] == digests[1]
    here, there = metrics
    assert sorted(here) == sorted(there) == list(range(5))
    # On Ray no tensor of an export came into this process: its buckets describe them.
    assert received
    assert set(received) == {"meta"}
    assert not (tmp_path / "there" / "sync").exists()


@contextlib.contextmanager
def counting_weights():
    """Yield a list of where the tensors of buckets are that come to this process."""
    next_bucket, devices = RemoteBuckets.__next__, []

    def noted(self):
        bucket = next_bucket(self)
        devices.extend(tensor.device.type for tensor in bucket.tensors.values())
        return bucket

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemoteBuckets, "__next__", noted)
        yield devices


def test_a_cluster_that_is_started_for_a_run_has_the_cpus_that_ranks_and_engines_ask_for(
    cluster, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "init", lambda *where, **how: asked.append(how["num_cpus"]))
    on_ray = ("controller.cluster=ray", "controller.cpus_per_rank=100")
    connect(job_for(tmp_path / "run", *ASYNC, *on_ray).config)
    assert asked == [205]
