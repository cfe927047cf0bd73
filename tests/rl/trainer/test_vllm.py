"""The trainer with a real vLLM server. `make test-vllm` runs it, and says where vLLM is."""

from __future__ import annotations

import os

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
