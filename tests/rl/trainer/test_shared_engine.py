"""The trainer with one engine for all ranks, which rank 0 speaks with."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from test_run import TIMEOUT_S, compare_sampling_with_training, job_for, pytestmark  # noqa: F401

from megatron_idempotent.rl.trainer.task.prompts import Prompt
from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

#: The version of an earlier run, whose weights the engine serves.
SERVED = 7


def one_for_all(config, policy, checkpoint, out):
    """Runs on a rank: an engine on rank 0, with the weights of another seed."""
    import torch.distributed as dist

    from megatron_idempotent.rl.engines.transformers import TransformersEngine
    from megatron_idempotent.rl.sync import SyncSettings
    from megatron_idempotent.rl.trainer.engines import Engines
    from megatron_idempotent.rl.trainer.policy import write_checkpoint

    engines = []
    if dist.get_rank() == 0:
        words = Prompt(row=0, text="a b c d", answer="a", split="train")
        tokenizer = TextTokenizer.of_words([words])
        write_checkpoint(out / "other", config.model, tokenizer, seed=2, positions=10)
        engines = [TransformersEngine(out / "other", name="served", version=SERVED)]
    return Engines(
        engines,
        policy.source(shared=True),
        shared=True,
        settings=SyncSettings(),
        changed_only=config.sync.changed_only,
        request_timeout_s=60.0,
    )


@pytest.mark.parametrize(
    "changed_only", [pytest.param("false", marks=pytest.mark.exhaustive), "true"]
)
def test_an_engine_samples_for_all_ranks_with_the_weights_that_were_trained(
    megatron_ranks, tmp_path, changed_only
):
    job = job_for(
        tmp_path / "run",
        "rollout.temperature=0.7",
        "rollout.group_size=4",
        "rollout.prompts=16",
        "model.init_std=0.4",
        f"sync.changed_only={changed_only}",
    )
    for seen in megatron_ranks(
        2, compare_sampling_with_training, job, one_for_all, timeout_s=TIMEOUT_S
    ):
        assert seen["versions"] == [1]
        assert seen["order"] == list(range(8))
        # The same derivation as for the engine in the trainer's own process.
        bound = 2 * 200 * 2.0**-24 * max(seen["largest logit"], 1.0) / 0.7
        assert seen["largest gap"] < bound
        assert seen["spread"] > 0.1
