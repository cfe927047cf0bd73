"""The trainer on a Ray cluster: ranks, an engine and groups in its actors."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from async_cases import job_for

from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics
from megatron_idempotent.rl.trainer.async_run import run_controller
from megatron_idempotent.rl.trainer.output import data_path
from megatron_idempotent.rl.trainer.task.prompts import read_prompts


@pytest.mark.filterwarnings("ignore")  # of what Ray and TransferQueue import, in this process
def test_a_run_on_ray_trains_what_one_on_this_machine_does(cluster, queue, tmp_path):
    here = job_for(tmp_path / "here", "run.rollouts=4")
    there = job_for(
        tmp_path / "there",
        "run.rollouts=4",
        "controller.cluster=ray",
        "controller.plane=transfer_queue",
        "controller.call_timeout_s=60",
    )
    rows = []
    for job in (here, there):
        assert run_controller(job, read_prompts(data_path(job.config)))
        rows.append(read_metrics(job.out / METRICS_FILE))
    assert len(rows[0]) == len(rows[1]) == 5
    for one, other in zip(*rows, strict=True):
        # The same tokens. Requests reach an actor one by one, so that its batches, and with them
        # the last bits of log-probs, are not those of an engine in this process.
        for name in ("train/reward", "train/response_tokens", "evaluation/reward"):
            assert one.get(name) == other.get(name)
        for name in {"train/loss", "train/grad_norm"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5)
