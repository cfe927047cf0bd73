"""Optimizer steps in chunks, on two ranks: the same weights from any number, or after a failure."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("tokenizers")  # comes with the extra `trainer`

from megatron_idempotent import StepResult
from megatron_idempotent.patching.source import locate
from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics
from megatron_idempotent.rl.trainer import checkpoint_dir
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.output import prepare
from megatron_idempotent.rl.trainer.policy import training_metrics

SMALL = (
    "model.hidden=32",
    "model.ffn=32",
    "rollout.prompts=8",
    "rollout.group_size=8",
    "evaluation.prompts=9",
    "run.rollouts=1",
)
TIMEOUT_S = 120.0
POSITIONS, ROWS = 9, 32
NO_SUCH_TOKEN = (
    r"the microbatch has \d+ in 'input_ids' at row \d+, position 3, and the model's table"
)

needs_megatron_training = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)


def job_for(out, *overrides):
    config = load_config(overrides=[*SMALL, f"run.out={out}", *overrides])
    return prepare(config, resume=False, quiet=True)


def run_and_note_chunks(job):
    """Runs on a rank: a whole run; the rows of each chunk, in order."""
    from megatron_idempotent import TrainStep
    from megatron_idempotent.rl.trainer.launch import run_rank

    rows, microbatch = [], TrainStep.microbatch

    def noting(self, *args, **kwargs):
        receipt = microbatch(self, *args, **kwargs)
        rows.append(receipt.rows)
        return receipt

    TrainStep.microbatch = noting
    run_rank(job)
    return rows


@needs_megatron_training
def test_a_run_does_not_depend_on_the_number_of_chunks(megatron_ranks, tmp_path):
    found = {}
    for number in (1, 4):
        cut = (f"optimizer.chunks_per_step={number}", "optimizer.microbatches_per_step=4")
        job = job_for(tmp_path / str(number), *cut)
        # A rollout of 4 steps; 32 sequences per rank, so 8 in a step.
        for rows in megatron_ranks(2, run_and_note_chunks, job, timeout_s=TIMEOUT_S):
            assert rows == [8 // number] * (4 * number)
        checkpoint = checkpoint_dir.path_for(job.out / "checkpoints", 1)
        found[number] = (
            checkpoint_dir.verify(checkpoint)["weights sha256"],
            [
                {name: value for name, value in row.items() if not name.startswith("timing/")}
                for row in read_metrics(job.out / METRICS_FILE)
            ],
        )
    assert found[1] == found[4]
    assert found[1][1][-1]["train/grad_norm"] > 0


def train_with_failures(job, failing):
    """Runs on a rank: batches in which rank 1 meets an impossible token in `failing` chunks, then
    one     without; what was raised, and metrics and weights of the good one."""
    import torch
    import torch.distributed as dist

    import megatron_idempotent
    from megatron_idempotent.rl.trainer.batch import Batch, chunks
    from megatron_idempotent.rl.trainer.checkpoint import weights_digest
    from megatron_idempotent.rl.trainer.output import data_path
    from megatron_idempotent.rl.trainer.policy import MegatronPolicy, ensure_checkpoint
    from megatron_idempotent.rl.trainer.task.prompts import read_prompts
    from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer

    megatron_idempotent.apply()
    config = job.config
    tokenizer = TextTokenizer.of_words(read_prompts(data_path(config)).all)
    vocabulary = tokenizer.vocabulary_size
    checkpoint = ensure_checkpoint(
        job.out / "initial", config.model, tokenizer, seed=1, positions=POSITIONS
    )
    policy = MegatronPolicy(config, checkpoint, positions=POSITIONS)
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tokens_BT = torch.randint(0, vocabulary, (ROWS, POSITIONS + 1), generator=generator)

    def batch():
        return Batch(
            tokens_BT=tokens_BT[:, :-1].clone(),
            targets_BT=tokens_BT[:, 1:],
            old_logprobs_BT=torch.full((ROWS, POSITIONS), -2.5),
            advantages_B=torch.linspace(-1, 1, ROWS),
            loss_mask_BT=torch.ones(ROWS, POSITIONS),
        )

    raised = []
    for place in failing:
        bad = batch()
        if rank == 1:
            numbered = Batch(**{**vars_of(bad), "advantages_B": torch.arange(float(ROWS))})
            order = list(chunks(numbered, size=config.chunk_size, seed=config.run.seed, index=0))
            bad.tokens_BT[int(order[place].advantages_B[0]), 3] = vocabulary
        try:
            policy.train(bad, index=0)
        except (ValueError, megatron_idempotent.WindowAborted) as error:
            raised.append(f"{type(error).__name__}: {error}")
    metrics = policy.train(batch(), index=0)
    with policy.weights() as modules:
        assert not modules[0].training
        assert not torch.is_grad_enabled()
        return raised, metrics, weights_digest(modules)


def vars_of(batch):
    return {name: getattr(batch, name) for name in batch.__slots__}


@needs_megatron_training
def test_a_chunk_that_fails_stops_both_ranks_and_leaves_no_trace(megatron_ranks, tmp_path):
    def run(name, failing):
        job = job_for(
            tmp_path / name,
            "loss.kl_coefficient=0",
            "optimizer.steps_per_rollout=1",
            "optimizer.microbatches_per_step=4",
            "optimizer.chunks_per_step=4",
            "optimizer.warmup_steps=0",
        )
        return megatron_ranks(2, train_with_failures, job, failing, timeout_s=TIMEOUT_S)

    undisturbed, failed = run("good", ()), run("bad", (1, 3))
    assert undisturbed[0][1].optimizer_steps == 1
    for (raised, *rest), (_, *want) in zip(failed, undisturbed, strict=True):
        assert rest == want
        assert len(raised) == 2
        assert all(re.search(NO_SUCH_TOKEN, text) for text in raised), raised
    assert all("WindowAborted: rank 1: ValueError" in text for text in failed[0][0])
    assert not any("the step is as it was" in text for text in failed[0][0])
    assert failed[1][0][0].startswith("ValueError")
    # No forward came between the update and the digests, and still neither rank's is stale.
    assert failed[0][2] == failed[1][2]


def result(**values):
    given = {
        "step_id": "",
        "updated": True,
        "skipped": None,
        "grad_norm": 1.0,
        "global_valid_sequences": 1.0,
        "global_valid_tokens": 10.0,
        "microbatches": 1,
        "auxiliary_loss_scale": 1.0,
        "lr": 0.1,
        "weight_decay": 0.0,
        "metrics": {"loss": 1.0, "kl": 0.5, "clip_fraction": 0.25, "positions": 20.0},
        "rows": (),
    }
    return StepResult(**{**given, **values})


def test_a_rollouts_metrics_are_means_over_its_tokens_and_its_updates():
    more = {"loss": 5.0, "kl": 1.5, "clip_fraction": 0.75, "positions": 60.0}
    skipped = {"updated": False, "skipped": "no valid token on any rank", "grad_norm": None}
    nothing = {"loss": 0.0, "kl": 0.0, "clip_fraction": 0.0, "positions": 20.0}
    metrics = training_metrics(
        [
            result(),
            result(global_valid_tokens=30.0, metrics=more, grad_norm=4.0, lr=0.2),
            result(global_valid_tokens=0.0, metrics=nothing, lr=0.3, **skipped),
        ]
    )
    assert (metrics.loss, metrics.kl, metrics.clip_fraction) == (4.0, 1.25, 0.625)
    assert (metrics.grad_norm, metrics.optimizer_steps) == (2.5, 2)
    assert (metrics.response_tokens, metrics.positions) == (40, 100)
    assert metrics.learning_rate == 0.3
    empty = training_metrics([result(global_valid_tokens=0.0, metrics=nothing, **skipped)])
    assert (empty.loss, empty.grad_norm, empty.optimizer_steps) == (0.0, 0.0, 0)
