"""Old log-probs that the trainer recomputes, on two ranks of real Megatron."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers")  # comes with the extra `trainer`

from megatron_idempotent.patching.source import locate
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.output import prepare

SMALL = (
    "model.hidden=32",
    "model.ffn=32",
    "rollout.prompts=8",
    "rollout.group_size=8",
    "loss.kl_coefficient=0",
    "optimizer.steps_per_rollout=2",
    "optimizer.warmup_steps=0",
)
POSITIONS, ROWS = 9, 32

needs_megatron_training = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)


def train_once(job, behaviour):
    """Runs on a rank: metrics and weights after one batch, whose old log-probs are `behaviour`,
    or,     without one, those of the weights that training starts from."""
    import torch
    import torch.distributed as dist

    import megatron_idempotent
    from megatron_idempotent.rl.trainer.batch import Batch
    from megatron_idempotent.rl.trainer.checkpoint import weights_digest
    from megatron_idempotent.rl.trainer.loss import decoder_logits
    from megatron_idempotent.rl.trainer.output import data_path
    from megatron_idempotent.rl.trainer.policy import MegatronPolicy, ensure_checkpoint
    from megatron_idempotent.rl.trainer.task.prompts import read_prompts
    from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

    megatron_idempotent.apply()
    config = job.config
    tokenizer = TextTokenizer.of_words(read_prompts(data_path(config)).all)
    checkpoint = ensure_checkpoint(
        job.out / "initial", config.model, tokenizer, seed=1, positions=POSITIONS
    )
    policy = MegatronPolicy(config, checkpoint, positions=POSITIONS)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (ROWS, POSITIONS + 1)
    tokens_BT = torch.randint(0, tokenizer.vocabulary_size, shape, generator=generator)
    inputs_BT, targets_BT = tokens_BT[:, :-1].clone(), tokens_BT[:, 1:]
    with policy.weights() as modules:
        own_BT = megatron_idempotent.token_logprobs(
            logits=decoder_logits(modules[0], inputs_BT), targets=targets_BT, temperature=1.0
        ).logprob
    old_BT = own_BT if behaviour is None else torch.full((ROWS, POSITIONS), behaviour)
    old_BT[0, 0] = own_BT[0, 0] - (5.0 if behaviour is not None else 0.0)
    batch = Batch(
        tokens_BT=inputs_BT,
        targets_BT=targets_BT,
        old_logprobs_BT=old_BT,
        advantages_B=torch.linspace(-1, 1, ROWS),
        loss_mask_BT=torch.ones(ROWS, POSITIONS),
    )
    metrics = policy.train(batch, index=0)
    with policy.weights() as modules:
        return metrics, weights_digest(modules)


@needs_megatron_training
def test_recomputed_logprobs_take_the_place_of_the_engines(megatron_ranks, tmp_path):
    def run(name, behaviour, *overrides):
        config = load_config(overrides=[*SMALL, f"run.out={tmp_path / name}", *overrides])
        job = prepare(config, resume=False, quiet=True)
        return megatron_ranks(2, train_once, job, behaviour, timeout_s=120.0)

    recomputed = "loss.old_logprobs=recomputed"
    exact = run("exact", None)
    # Whatever the engine says: without a correction its log-probs play no part any more.
    assert run("recomputed", -2.5, recomputed) == exact
    assert run("behaviour", -2.5) != exact
    weighted = run("truncate", -2.5, recomputed, "loss.correction=truncate")
    assert weighted[0][0].loss != exact[0][0].loss
    assert weighted[0][0].response_tokens == 2 * ROWS * POSITIONS
    bounds = ("loss.correction_low=0", "loss.correction_high=100")
    masked = run("mask", -2.5, recomputed, "loss.correction=mask", *bounds)
    # The ratio of one token on each rank is exp(5).
    assert masked[0][0].response_tokens == 2 * (ROWS * POSITIONS - 1)
