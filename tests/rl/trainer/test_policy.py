"""Optimizer steps of the policy, on two ranks: chunks, failures and recomputed log-probs."""

from __future__ import annotations

import dataclasses
import re

import pytest

pytest.importorskip("tokenizers")  # comes with the extra `trainer`

from trainer_cases import SYNC, TIMEOUT_S, digest, job_for, needs_megatron_training, rows, start

from megatron_idempotent import StepResult
from megatron_idempotent.rl.metrics.names import GRAD_NORM, LOSS, POSITIONS, RESPONSE_TOKENS
from megatron_idempotent.rl.trainer.policy import training_metrics

pytestmark = pytest.mark.full

LENGTH, ROWS = 9, 32
NO_SUCH_TOKEN = (
    r"the microbatch has \d+ in 'input_ids' at row \d+, position 3, and the model's table"
)


def run_and_note_chunks(job):
    """Runs on a rank: a whole run; the rows of each chunk, in order."""
    from megatron_idempotent import TrainStep
    from megatron_idempotent.rl.trainer.loop import work

    rows, microbatch = [], TrainStep.microbatch

    def noting(self, *args, **kwargs):
        receipt = microbatch(self, *args, **kwargs)
        rows.append(receipt.rows)
        return receipt

    TrainStep.microbatch = noting
    work(job)
    return rows


@needs_megatron_training
def test_a_run_does_not_depend_on_the_number_of_chunks(megatron_ranks, tmp_path):
    found = {}
    for number in (1, 4):
        cut = (f"optimizer.chunks_per_step={number}", "optimizer.microbatches_per_step=4")
        job = job_for(tmp_path / str(number), *SYNC, "run.rollouts=1", *cut)
        # A rollout of 4 steps; 32 sequences per rank, so 8 in a step.
        for sizes in megatron_ranks(2, run_and_note_chunks, job, timeout_s=TIMEOUT_S):
            assert sizes == [8 // number] * (4 * number)
        found[number] = digest(job, 1), rows(job)
    assert found[1] == found[4]
    assert found[1][1][1]["train/grad_norm"] > 0


def trained(job, behaviour, failing=()):
    """Runs on a rank: metrics and weights after one batch, and what was raised before.

    Its old log-probs are `behaviour` or, without one, those of the weights that training starts
    from; that of one token is exp(5) times less. In the `failing` chunks of batches before it,
    rank 1 meets an impossible token.
    """
    import torch
    import torch.distributed as dist

    import megatron_idempotent
    from megatron_idempotent.rl.trainer.batch import Batch, chunks
    from megatron_idempotent.rl.trainer.checkpoint import weights_digest
    from megatron_idempotent.rl.trainer.output import data_path
    from megatron_idempotent.rl.trainer.task.prompts import read_prompts
    from megatron_idempotent.step import gpt_forward

    config, rank = job.config, dist.get_rank()
    policy, tokenizer, _ = start(job, read_prompts(data_path(config)).all, LENGTH)
    vocabulary = tokenizer.vocabulary_size
    generator = torch.Generator().manual_seed(rank)
    tokens_BT = torch.randint(0, vocabulary, (ROWS, LENGTH + 1), generator=generator)
    inputs_BT, targets_BT = tokens_BT[:, :-1].clone(), tokens_BT[:, 1:]
    with policy.weights() as modules:
        own_BT = megatron_idempotent.token_logprobs(
            logits=gpt_forward(modules[0], {"input_ids": inputs_BT}),
            targets=targets_BT,
            temperature=1.0,
        ).logprob
    old_BT = own_BT if behaviour is None else torch.full((ROWS, LENGTH), behaviour)
    old_BT[0, 0] = own_BT[0, 0] - (5.0 if behaviour is not None else 0.0)
    batch = Batch(
        tokens_BT=inputs_BT,
        targets_BT=targets_BT,
        old_logprobs_BT=old_BT,
        advantages_B=torch.linspace(-1, 1, ROWS),
        loss_mask_BT=torch.ones(ROWS, LENGTH),
    )
    raised = []
    for place in failing:
        bad_BT = inputs_BT.clone()
        if rank == 1:
            numbered = dataclasses.replace(batch, advantages_B=torch.arange(float(ROWS)))
            order = list(chunks(numbered, size=config.chunk_size, seed=config.run.seed, index=0))
            bad_BT[int(order[place].advantages_B[0]), 3] = vocabulary
        try:
            policy.train(dataclasses.replace(batch, tokens_BT=bad_BT), index=0)
        except (ValueError, megatron_idempotent.WindowAborted) as error:
            raised.append(f"{type(error).__name__}: {error}")
    metrics = policy.train(batch, index=0)
    with policy.weights() as modules:
        assert not modules[0].training
        assert not torch.is_grad_enabled()
        return metrics, weights_digest(modules), raised


@pytest.fixture
def train(megatron_ranks, tmp_path):
    """`train(name, behaviour, *overrides)` trains on one batch; what both ranks return."""
    one = ("loss.kl_coefficient=0", "optimizer.warmup_steps=0")

    def run(name, behaviour, *overrides, failing=()):
        job = job_for(tmp_path / name, *SYNC, *one, *overrides)
        return megatron_ranks(2, trained, job, behaviour, failing, timeout_s=TIMEOUT_S)

    return run


@needs_megatron_training
def test_a_chunk_that_fails_stops_both_ranks_and_leaves_no_trace(train):
    four = [f"optimizer.{key}=4" for key in ("microbatches_per_step", "chunks_per_step")]
    cut = ("optimizer.steps_per_rollout=1", *four)
    undisturbed, failed = train("good", -2.5, *cut), train("bad", -2.5, *cut, failing=(1, 3))
    assert undisturbed[0][0]["train/optimizer_steps"] == 1
    for (*rest, raised), (*want, nothing) in zip(failed, undisturbed, strict=True):
        assert (rest, nothing) == (want, [])
        assert len(raised) == 2
        assert all(re.search(NO_SUCH_TOKEN, text) for text in raised), raised
    assert all("WindowAborted: rank 1: ValueError" in text for text in failed[0][2])
    assert not any("the step is as it was" in text for text in failed[0][2])
    assert failed[1][2][0].startswith("ValueError")
    # No forward came between the update and the digests, and still neither rank's is stale.
    assert failed[0][1] == failed[1][1]


@needs_megatron_training
def test_recomputed_logprobs_take_the_place_of_the_engines(train):
    recomputed = ("optimizer.steps_per_rollout=2", "loss.old_logprobs=recomputed")
    exact = train("exact", None, "optimizer.steps_per_rollout=2")
    # Whatever the engine says: without a correction its log-probs play no part any more.
    assert train("recomputed", -2.5, *recomputed) == exact
    bounds = ("loss.correction_low=0", "loss.correction_high=100")
    masked = train("mask", -2.5, *recomputed, "loss.correction=mask", *bounds)
    assert masked[0][0][LOSS] != exact[0][0][LOSS]
    # The ratio of one token on each rank is exp(5).
    assert exact[0][0][RESPONSE_TOKENS] == 2 * ROWS * LENGTH
    assert masked[0][0][RESPONSE_TOKENS] == 2 * (ROWS * LENGTH - 1)


def result(tokens, loss, kl, clipped, positions, *, norm=1.0, lr=0.1):
    metrics = {"loss": loss, "kl": kl, "clip_fraction": clipped, "positions": positions}
    return StepResult(
        step_id="",
        updated=norm is not None,
        skipped="no valid token on any rank" if norm is None else None,
        grad_norm=norm,
        global_valid_sequences=1.0,
        global_valid_tokens=tokens,
        microbatches=1,
        auxiliary_loss_scale=1.0,
        lr=lr,
        weight_decay=0.0,
        metrics=metrics,
        rows=(),
    )


def test_a_rollouts_metrics_are_means_over_its_tokens_and_its_updates():
    skipped = result(0.0, 0.0, 0.0, 0.0, 20.0, norm=None, lr=0.3)
    steps = [
        result(10.0, 1.0, 0.5, 0.25, 20.0),
        result(30.0, 5.0, 1.5, 0.75, 60.0, norm=4.0, lr=0.2),
    ]
    assert training_metrics([*steps, skipped]) == {
        RESPONSE_TOKENS: 40.0,
        POSITIONS: 100.0,
        LOSS: 4.0,
        "train/kl": 1.25,
        "train/clip_fraction": 0.625,
        GRAD_NORM: 2.5,
        "train/learning_rate": 0.3,
        "train/optimizer_steps": 2.0,
    }
    empty = training_metrics([skipped])
    assert (empty[LOSS], empty[GRAD_NORM], empty["train/optimizer_steps"]) == (0.0, 0.0, 0.0)
