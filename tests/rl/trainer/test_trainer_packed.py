"""Training on packs of sequences: the first step is that of rows, in both modes and any layout."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("tokenizers")  # comes with the extra `trainer`

import async_cases
import layout_cases
import torch
from layout_cases import run_and_note

from megatron_idempotent.patching.source import locate
from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics
from megatron_idempotent.rl.trainer.async_run import run_controller
from megatron_idempotent.rl.trainer.batch import Batch
from megatron_idempotent.rl.trainer.config import CheckpointError, load_config
from megatron_idempotent.rl.trainer.output import data_path, prepare
from megatron_idempotent.rl.trainer.task.prompts import read_prompts

needs_megatron_training = pytest.mark.skipif(
    locate("megatron.training.training") is None,
    reason="this release's wheel does not carry megatron.training",
)

TIMEOUT_S = 240.0
# From random weights, some responses end early and others do not: rows are padded.
LONGER = "rollout.max_response_tokens=24"
BUDGET = 64
PACKED = (f"optimizer.max_tokens_per_microbatch={BUDGET}",)
# As in test_layouts.py: the additions on the way of a gradient, each of which rounds by 2^-24, and
# which packs and their attention make in another order: 4 layers, forward and backward, of 8 sums
# each, of at most 64 terms.
ROUNDING = 2 * (2 * 4 * 8 * 64) * 2.0**-24


def first_rows(job):
    return {row["step"]: row for row in read_metrics(job.out / METRICS_FILE)}


@pytest.fixture(scope="module")
def run(megatron_rank_pool, tmp_path_factory):
    """`run(name, ranks, *overrides)` runs a job of that name; the job, and what its ranks noted."""
    out = tmp_path_factory.mktemp("packed")

    def run(name, ranks, *overrides, **options):
        job = layout_cases.job_for(out / name, f"run.ranks={ranks}", *overrides)
        noted = megatron_rank_pool.run(ranks, run_and_note, job, timeout_s=TIMEOUT_S, **options)
        return job, noted

    return run


@pytest.fixture(scope="module")
def in_rows(run):
    return run("rows", 1, LONGER, with_row_norms=True)


LAYOUTS = [
    pytest.param(2, [], id="dp2", marks=pytest.mark.exhaustive),
    pytest.param(
        4, ["parallel.pp=2", "parallel.vpp=2", "parallel.cp=2"], id="interleaved and cut positions"
    ),
    pytest.param(
        2,
        ["parallel.tp=2", "parallel.sequence_parallel=true"],
        id="tp2",
        marks=pytest.mark.exhaustive,
    ),
]


@needs_megatron_training
@pytest.mark.parametrize(("ranks", "overrides"), LAYOUTS)
def test_the_first_step_on_packs_is_that_on_rows(ranks, overrides, in_rows, run, request):
    rows_job, (alone,) = in_rows
    name = request.node.callspec.id
    job, noted = run(name, ranks, LONGER, *PACKED, *overrides)
    before, packed = first_rows(rows_job)[1], first_rows(job)[1]
    tokens = before["train/response_tokens"]
    assert packed["train/response_tokens"] == tokens
    # A norm differs by no more than the norm of what the gradient differs by: so much of each row.
    largest = ROUNDING * sum(alone.row_norms) / tokens
    assert largest < 0.05 * before["train/grad_norm"]  # or it would say nothing
    assert abs(packed["train/grad_norm"] - before["train/grad_norm"]) <= largest
    # |advantage| is below the square root of the group's size, and the ratio 1 but for rounding.
    assert abs(packed["train/loss"] - before["train/loss"]) <= ROUNDING * 4 * 6**0.5
    whole = int(alone.batch.lengths_B.sum())
    assert before["train/positions"] == alone.batch.tokens_BT.numel()
    if not overrides:  # others pad to what ranks cut
        assert packed["train/positions"] == whole
    assert packed["train/positions"] < before["train/positions"]
    assert all(each.saved == noted[0].saved for each in noted)


@needs_megatron_training
def test_the_first_step_of_an_asynchronous_run_on_packs_is_that_on_rows(
    megatron_rank_pool, tmp_path
):
    small = ("run.rollouts=2", LONGER, "optimizer.warmup_steps=0")
    small += ("controller.call_timeout_s=60", "loss.correction=none")
    found = []
    for name, settings in (("rows", ()), ("packs", PACKED)):
        job = async_cases.job_for(tmp_path / name, *small, *settings)
        prompts = read_prompts(data_path(job.config))
        assert run_controller(job, prompts, pool=megatron_rank_pool)
        found.append(first_rows(job))
    in_rows, packed = found
    for name in ("train/loss", "train/grad_norm"):
        # As above; a row's gradient is below the largest that is clipped at, and there are few.
        assert packed[1][name] == pytest.approx(in_rows[1][name], rel=100 * ROUNDING)
    assert packed[1]["train/positions"] < in_rows[1]["train/positions"]
    assert packed[2]["train/optimizer_steps"] == 1.0


def test_a_batch_without_lengths_is_not_packed():
    batch = Batch(
        tokens_BT=torch.zeros(2, 3, dtype=torch.int64),
        targets_BT=torch.zeros(2, 3, dtype=torch.int64),
        old_logprobs_BT=torch.zeros(2, 3),
        advantages_B=torch.zeros(2),
        loss_mask_BT=torch.ones(2, 3),
    )
    with pytest.raises(ValueError, match="2 sequences without lengths_B cannot be packed"):
        batch.sequences()
    whole = dataclasses.replace(batch, lengths_B=torch.tensor([4, 2])).sequences()
    assert {tuple(each.shape) for each in whole.values()} == {(2, 4), (2,)}
    assert whole["token_mask"].tolist() == [[0, 1, 1, 1]] * 2
    assert whole["response_mask"].tolist() == [[1, 1, 1, 0]] * 2


def test_a_run_on_packs_is_not_continued_in_other_chunks(tmp_path):
    from megatron_idempotent.rl.trainer import checkpoint_dir
    from megatron_idempotent.rl.trainer.output import seal_checkpoint

    def config(*overrides):
        settings = [f"run.out={tmp_path}", "optimizer.chunks_per_step=1", *overrides]
        return load_config(overrides=settings)

    job = prepare(config(*PACKED), resume=False, quiet=True)
    directory = tmp_path / "checkpoints"
    checkpoint_dir.unfinished_path(directory, 1).mkdir(parents=True)
    seal_checkpoint(directory, 1, job.config, digest="")
    assert prepare(config(*PACKED), resume=True, quiet=True).resume_from
    for settings, message in (
        ((*PACKED, "optimizer.chunks_per_step=2"), "packed at once = 128, now it is 64"),
        ((), "optimizer.max_tokens_per_microbatch = 64, now it is 0"),
    ):
        with pytest.raises(CheckpointError, match=message):
            prepare(config(*settings), resume=True, quiet=True)
