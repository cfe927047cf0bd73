"""The trainer on a Ray cluster: ranks and groups in its actors."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from trainer_cases import job_for

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
        # Both engines are in this process, and their batches the same; so are all bits.
        for name in one.keys() & other.keys():
            if name.startswith(("train/", "evaluation/")) and "idle" not in name:
                assert one[name] == other[name], name
