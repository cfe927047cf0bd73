"""vLLM servers that actors of a Ray cluster start, and what becomes of them when either dies."""

import contextlib
import os
import shlex
import signal
import time

import pytest

pytest.importorskip("transformers")

from trainer_cases import ASYNC, digest, job_for

from megatron_idempotent.rl.controller import Fleet
from megatron_idempotent.rl.engines.ray import RayEngine
from megatron_idempotent.rl.trainer.async_run import run_controller
from megatron_idempotent.rl.trainer.output import data_path
from megatron_idempotent.rl.trainer.task.prompts import read_prompts

PYTHON = os.environ.get("MEGATRON_IDEMPOTENT_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="vLLM has an environment of its own, which `make test-vllm` makes"
)
# One request at a time, and no cache of prompts: what is drawn beside a request, or was drawn
# before it, then does not show in its last bits.
ARGUMENTS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "1")
SETTINGS = (
    "model.heads=1",  # vLLM on a CPU wants heads that are 32 wide
    "model.query_groups=1",
    "rollout.engine=vllm",
    f"rollout.vllm_python={PYTHON}",
    f"rollout.vllm_arguments={shlex.join((*ARGUMENTS, '--no-enable-prefix-caching'))}",
    "controller.cluster=ray",
    "controller.max_staleness=0",
    "controller.call_timeout_s=60",
    "run.rollouts=4",
)


@pytest.mark.filterwarnings("ignore")  # of what Ray imports, in this process
def test_a_server_that_dies_and_one_whose_actor_dies_come_back_to_the_bits_of_one_that_lived(
    cluster, tmp_path, monkeypatch
):
    publish, pids, killed = Fleet.publish, [], []

    async def publish_and_kill(self, version):
        published = await publish(self, version)
        (engine,) = self._engines.values()
        assert isinstance(engine, RayEngine)
        actor, server = await engine._actor.__ray_call__.remote(
            lambda actor: (os.getpid(), actor._engine._server.pid)
        )
        pids.append(server)
        # Once each: the publish that brings an engine back has the same version.
        if killing and version in (1, 2) and version not in killed:
            killed.append(version)
            if version == 1:
                os.killpg(server, signal.SIGKILL)
            else:
                os.kill(actor, signal.SIGKILL)
        return published

    monkeypatch.setattr(Fleet, "publish", publish_and_kill)
    digests = []
    for killing in (False, True):
        job = job_for(tmp_path / f"killing-{killing}", *ASYNC, *SETTINGS)
        assert run_controller(job, read_prompts(data_path(job.config)))
        digests.append(digest(job, 4))
    assert killed == [1, 2]
    assert len(set(pids)) == 1 + 3
    assert digests[0] == digests[1]
    deadline = time.monotonic() + 20
    while alive := [pid for pid in set(pids) if is_running(pid)]:
        assert time.monotonic() < deadline, f"servers {alive} live on"
        time.sleep(0.1)


def is_running(pid):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, 0)
        return True
    return False
