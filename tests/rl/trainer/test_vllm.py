"""The trainer with a real vLLM server. `make test-vllm` runs it, and says where vLLM is."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
from pathlib import Path

import pytest

PYTHON = os.environ.get("MEGATRON_IDEMPOTENT_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="vLLM has an environment of its own: make test-vllm"
)


def test_a_vllm_server_samples_with_the_weights_that_were_trained(megatron_ranks, tmp_path):
    from sampling_case import SETTINGS, check, compare_sampling_with_training, write_other
    from trainer_cases import TIMEOUT_S, job_for

    from megatron_idempotent.rl.engines.vllm import CPU_ENVIRONMENT, VllmServer

    settings = [
        *SETTINGS,
        "rollout.engine=vllm",
        "model.heads=1",  # vLLM on a CPU wants heads that are 32 wide
        "model.query_groups=1",
    ]
    # The server's weights are another seed's: it is to get the trainer's before it samples.
    shape = job_for(tmp_path / "shape", *settings, "rollout.engine_url=http://unused").config.model
    write_other(tmp_path / "other", shape)
    arguments = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "10")
    with VllmServer(
        tmp_path / "other", python=PYTHON, arguments=arguments, environment=CPU_ENVIRONMENT
    ) as server:
        for transport in ("shared_memory", "disk", "gloo"):
            overrides = (f"rollout.engine_url={server.url}", f"sync.transport={transport}")
            job = job_for(tmp_path / transport, *settings, *overrides)
            ranks = megatron_ranks(2, compare_sampling_with_training, job, timeout_s=TIMEOUT_S)
            check(ranks, batched_alike=False)


#: In the order in which phases come: where the controller is when the server dies.
ENGINE_DIES = {
    "generation": ("vllm:VllmEngine._draw", "call"),
    "publish: stage": ("vllm_updates:VllmUpdates.stage", "call"),
    "publish: pause": ("vllm:VllmEngine.pause", "return"),
    "publish: commit": ("vllm_updates:VllmUpdates._load", "call"),
    "publish: verify": ("vllm_updates:VllmUpdates.commit", "return"),
    "publish: resume": ("vllm:VllmEngine.resume", "call"),
    "between steps: the row": ("loggers:JsonlLogger.log", "return"),
    "checkpoint: all files, no list": ("output:seal_checkpoint", "call"),
}


@pytest.mark.exhaustive  # vLLM takes a minute and a half for each start, a run ten at most
@pytest.mark.parametrize("phases", [[*ENGINE_DIES][:4], [*ENGINE_DIES][4:]])
def test_a_server_that_dies_alone_comes_back_to_the_bits_of_one_that_lived(
    phases, megatron_rank_pool, tmp_path
):
    from kill_points import Kill
    from recovery_cases import launch
    from trainer_cases import ASYNC, job_for

    from megatron_idempotent.rl.engines.vllm import CPU_ENVIRONMENT, VllmServer
    from megatron_idempotent.rl.trainer.megatron_setup import write_checkpoint
    from megatron_idempotent.rl.trainer.output import data_path
    from megatron_idempotent.rl.trainer.policy import training_positions
    from megatron_idempotent.rl.trainer.task.prompts import read_prompts
    from megatron_idempotent.rl.trainer.task.tokenizer import make_tokenizer

    settings = ("model.heads=1", "model.query_groups=1", "rollout.engine=vllm")
    unused = "rollout.engine_url=http://unused"
    config = job_for(tmp_path / "shape", *ASYNC, *settings, unused).config
    prompts = read_prompts(data_path(config))
    tokenizer = make_tokenizer(config, prompts)
    positions = training_positions(config, prompts, tokenizer) + 1
    write_checkpoint(tmp_path / "other", config.model, tokenizer, seed=2, positions=positions)
    # One request at a time, and no cache of prompts: what is drawn beside a request, or was drawn
    # before it, then does not show in its last bits.
    arguments = ["--dtype", "float32", "--enforce-eager"]
    arguments += ["--max-num-seqs", "1", "--no-enable-prefix-caching"]
    # A run's temporary folder is too long for the sockets of a server that starts beside it.
    environment = {**CPU_ENVIRONMENT, "TMPDIR": tempfile.gettempdir()}
    server = VllmServer(
        tmp_path / "other", python=PYTHON, arguments=arguments, environment=environment
    )
    found = []
    with kept_alive(server, tmp_path / "engine") as starts:
        # The ranks have the weights that a group needs, as long as it is of the next step.
        more = (*settings, f"rollout.engine_url={server.url}", "controller.max_staleness=0")
        more += ("controller.call_timeout_s=60",)
        for dying in [], phases:
            (folder := tmp_path / f"dies-{len(dying)}").mkdir()
            (folder / "plan.engine").symlink_to(tmp_path / "engine")
            kills = [
                Kill(phase=phase, place=place, when=when, at="command", who="engine")
                for phase, (place, when) in ENGINE_DIES.items()
                if phase in dying
            ]
            if kills:  # in the second step
                nth = 40 if kills[0].phase == "generation" else 2
                kills[0] = dataclasses.replace(kills[0], nth=nth)
            run = launch(megatron_rank_pool, folder, "embedded", "async", *kills, more=more)
            assert run.codes == [0]
            found.append(run.found())
        assert len(starts) == 1 + len(phases)
    whole, killed = found
    assert killed == whole


class kept_alive:
    """Starts a server, and again whenever it has died, as what looks after it does."""

    def __init__(self, server, file: Path) -> None:
        self._server, self._file, self._over = server, file, threading.Event()
        self.starts: list[int] = []

    def __enter__(self) -> list[int]:
        self._start()
        self._keeper = threading.Thread(target=self._keep)
        self._keeper.start()
        return self.starts

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._keeper.join()
        self._server.stop()

    def _start(self) -> None:
        self._server.__enter__()
        self.starts.append(self._server.pid)
        self._file.write_text(str(self._server.pid))

    def _keep(self) -> None:
        from kill_points import alive

        while not self._over.wait(0.1):
            if not alive(self._server.pid):
                self._server.stop()
                self._start()
