"""The trainer with a real vLLM server. `make test-vllm` runs it, and says where vLLM is."""

from __future__ import annotations

import os

import pytest

PYTHON = os.environ.get("MEGATRON_IDEMPOTENT_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(
    PYTHON is None, reason="vLLM has an environment of its own: make test-vllm"
)


def test_a_vllm_server_samples_with_the_weights_that_were_trained(megatron_ranks, tmp_path):
    from test_run import compare_sampling_with_training, job_for

    from megatron_idempotent.rl.engines.vllm import CPU_ENVIRONMENT, VllmServer
    from megatron_idempotent.rl.trainer.policy import write_checkpoint
    from megatron_idempotent.rl.trainer.task.prompts import Prompt
    from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

    settings = [
        "rollout.engine=vllm",
        "rollout.temperature=0.7",
        "rollout.group_size=4",
        "rollout.prompts=16",
        "model.heads=1",  # vLLM on a CPU wants heads that are 32 wide
        "model.query_groups=1",
        "model.init_std=0.4",
    ]
    # The server's weights are another seed's: it is to get the trainer's before it samples.
    words = Prompt(row=0, text="a b c d", answer="a", split="train")
    shape = job_for(tmp_path / "shape", *settings, "rollout.engine_url=http://unused").config.model
    tokenizer = TextTokenizer.of_words([words])
    write_checkpoint(tmp_path / "other", shape, tokenizer, seed=2, positions=10)
    arguments = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "10")
    with VllmServer(
        tmp_path / "other", python=PYTHON, arguments=arguments, environment=CPU_ENVIRONMENT
    ) as server:
        for transport in ("shared_memory", "disk", "gloo"):
            job = job_for(
                tmp_path / transport,
                *settings,
                f"rollout.engine_url={server.url}",
                f"sync.transport={transport}",
            )
            for seen in megatron_ranks(2, compare_sampling_with_training, job, timeout_s=240.0):
                assert seen["versions"] == [1]
                assert seen["order"] == list(range(8))
                # The same derivation as for the engine in the trainer's own process.
                bound = 2 * 200 * 2.0**-24 * max(seen["largest logit"], 1.0) / 0.7
                assert seen["largest gap"] < bound
                assert seen["spread"] > 0.1
