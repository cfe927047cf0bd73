"""The trainer with one server for all ranks: here the small one that keeps SGLang's rules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("aiohttp")
pytest.importorskip("transformers")

from test_run import TIMEOUT_S, compare_sampling_with_training, job_for, pytestmark  # noqa: F401

from megatron_idempotent.rl.trainer.policy import write_checkpoint
from megatron_idempotent.rl.trainer.task.prompts import Prompt
from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

sys.path.append(str(Path(__file__).parents[1] / "engines"))


@pytest.mark.parametrize(
    "changed_only", [pytest.param("false", marks=pytest.mark.exhaustive), "true"]
)
def test_a_server_samples_for_all_ranks_with_the_weights_that_were_trained(
    megatron_ranks, tmp_path, changed_only
):
    from sglang_server import FakeSglang

    settings = [
        "rollout.engine=sglang",
        "rollout.temperature=0.7",
        "rollout.group_size=4",
        "rollout.prompts=16",
        "model.init_std=0.4",
        f"sync.changed_only={changed_only}",
        f"sync.directory={tmp_path / 'sync'}",
    ]
    # The server's weights are another seed's: it is to get the trainer's before it samples.
    words = Prompt(row=0, text="a b c d", answer="a", split="train")
    shape = job_for(tmp_path / "shape", *settings, "rollout.engine_url=http://unused").config.model
    tokenizer = TextTokenizer.of_words([words])
    write_checkpoint(tmp_path / "other", shape, tokenizer, seed=2, positions=10)
    with FakeSglang(tmp_path / "other") as server:
        job = job_for(tmp_path / "run", *settings, f"rollout.engine_url={server.url}")
        for seen in megatron_ranks(2, compare_sampling_with_training, job, timeout_s=TIMEOUT_S):
            assert seen["versions"] == [1]
            assert seen["order"] == list(range(8))
            # The same derivation as for the engine in the trainer's own process.
            bound = 2 * 200 * 2.0**-24 * max(seen["largest logit"], 1.0) / 0.7
            assert seen["largest gap"] < bound
            assert seen["spread"] > 0.1
