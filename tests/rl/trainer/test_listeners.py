"""SECURITY.md's table of what listens is what /proc shows of real runs, and all of it."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")  # comes with the extra `trainer`

import torch
from listeners import REPORT, STORE, Row, listening, report, rows_of_ranks, table, watched
from trainer_cases import ASYNC, SYNC, TIMEOUT_S, job_for, needs_megatron_training

from megatron_idempotent.rl.engines.vllm_server import VllmServer
from megatron_idempotent.rl.trainer import async_ranks, loop
from megatron_idempotent.rl.trainer.async_run import run_controller
from megatron_idempotent.rl.trainer.output import data_path
from megatron_idempotent.rl.trainer.task.prompts import read_prompts
from megatron_idempotent.rl.weights import Bucket, WeightUpdate, transports

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not Path("/proc/net/unix").exists(), reason="what listens is read from Linux' /proc"
    ),
]


def run_and_report(job):
    """Runs on a rank: a whole run."""
    loop.work(job)
    return report()


@pytest.fixture(scope="module")
def synchronous(megatron_rank_pool, tmp_path_factory):
    """The reports of a run's ranks, and what was seen meanwhile."""
    job = job_for(tmp_path_factory.mktemp("listeners") / "run", *SYNC, "run.rollouts=1")
    with watched() as seen:
        return megatron_rank_pool.run(2, run_and_report, job, timeout_s=TIMEOUT_S), seen


@pytest.fixture
def asynchronous(megatron_rank_pool, tmp_path, monkeypatch):
    """The same of an asynchronous run."""
    monkeypatch.setattr(async_ranks, "FACTORY", "listeners:ReportingWorker")
    job = job_for(tmp_path / "run", *ASYNC, "run.rollouts=1")
    with watched() as seen:
        assert run_controller(job, read_prompts(data_path(job.config)), pool=megatron_rank_pool)
    return [pickle.loads((job.out / REPORT.format(rank)).read_bytes()) for rank in (0, 1)], seen


@needs_megatron_training
@pytest.mark.parametrize("way", ["synchronous", "asynchronous"])
def test_ranks_that_are_forked_listen_for_each_other_on_loopback(way, request):
    reports, seen = request.getfixturevalue(way)
    assert rows_of_ranks(reports) == table(way)
    assert all(each["groups"] > 1 for each in reports)
    # The others, and ranks before their end, listen at nothing else; the launcher makes the store.
    of_ranks = set().union(*(each["listeners"] for each in reports))
    assert set().union(*seen.values()) <= of_ranks
    assert {each["pid"] for each in reports} <= seen.keys()


def test_listeners_of_each_kind_are_seen_and_others_are_not(tmp_path):
    before = listening(os.getpid())
    family = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    with (
        socket.create_server(("127.0.0.1", 0)) as local,
        socket.create_server(("::", 0), **family) as everywhere,
        socket.socket(socket.AF_UNIX) as unix,
        socket.create_connection(local.getsockname()),
    ):
        path = str(tmp_path / "socket")
        unix.bind(path)
        unix.listen()
        assert {each[1:] for each in listening(os.getpid()) - before} == {
            ("TCP", "127.0.0.1", local.getsockname()[1]),
            ("TCP", "every interface", everywhere.getsockname()[1]),
            ("Unix", path, 0),
        }


async def test_the_process_group_of_a_weight_update_listens_on_loopback():
    before = listening(os.getpid())
    sender = transports.ProcessGroupSender()
    opened = await sender.open(WeightUpdate(id="run/1", version=1))
    stores = listening(os.getpid()) - before
    receiver = transports.receiver(opened)
    bucket = Bucket.of(0, {"w": torch.arange(10.0)})
    announced = await sender.announce(bucket)
    await asyncio.gather(asyncio.to_thread(receiver.receive, announced), sender.transmit(bucket))
    groups = listening(os.getpid()) - before - stores
    receiver.close()
    await sender.close()
    found = {("sender", STORE, "1", each.address) for each in stores}
    number = str(len(groups) // 2)  # this process is the sender and the one worker
    found |= {("sender, each worker", "gloo", number, each.address) for each in groups}
    assert found == table("weights by a process group")
    assert [each.port for each in stores] == [opened["port"]]


def test_a_vllm_server_is_told_the_address_and_the_mode_of_the_table(tmp_path):
    (tmp_path / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    (tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.environ['VLLM_SERVER_DEV_MODE']]))\nraise SystemExit(3)"
    )
    log = tmp_path / "log"
    server = VllmServer(
        tmp_path, python=sys.executable, environment={"PYTHONPATH": str(tmp_path)}, log=log
    )
    with pytest.raises(RuntimeError, match="ended with 3"):
        server.__enter__()
    arguments, mode = json.loads(log.read_text().splitlines()[0])
    (row,) = table("vLLM")
    assert row == Row("server", "HTTP", "1", arguments[arguments.index("--host") + 1])
    assert mode == "1"
    assert "VLLM_SERVER_DEV_MODE=1" in (Path(__file__).parents[3] / "SECURITY.md").read_text()
