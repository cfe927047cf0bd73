"""The trainer on a Ray cluster: ranks and groups in its actors."""

import pytest

pytest.importorskip("transformers")

from trainer_cases import ASYNC, job_for, rows

from megatron_idempotent.rl.trainer.async_run import connect, run_controller
from megatron_idempotent.rl.trainer.output import data_path
from megatron_idempotent.rl.trainer.task.prompts import read_prompts


@pytest.mark.filterwarnings("ignore")  # of what Ray and TransferQueue import, in this process
def test_a_run_on_ray_trains_what_one_on_this_machine_does(cluster, queue, tmp_path):
    on_ray = ("controller.cluster=ray", "controller.plane=transfer_queue")
    found = []
    for name, settings in (("here", ()), ("there", (*on_ray, "controller.call_timeout_s=60"))):
        job = job_for(tmp_path / name, *ASYNC, "run.rollouts=4", *settings)
        assert run_controller(job, read_prompts(data_path(job.config)))
        found.append(rows(job))
    here, there = found
    assert sorted(here) == sorted(there) == list(range(5))
    for step in here:
        # Both engines are in this process, and their batches the same; so are all bits.
        for name in here[step].keys() & there[step].keys():
            if name.startswith(("train/", "evaluation/")) and "idle" not in name:
                assert here[step][name] == there[step][name], name


def test_a_cluster_that_is_started_for_a_run_has_the_cpus_that_ranks_ask_for(
    cluster, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster, "init", lambda *where, **how: asked.append(how["num_cpus"]))
    on_ray = ("controller.cluster=ray", "controller.cpus_per_rank=100")
    connect(job_for(tmp_path / "run", *ASYNC, *on_ray).config)
    assert asked == [204]
