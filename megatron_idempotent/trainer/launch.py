"""From a prepared job to its results: run the ranks, draw the curves, print the table."""

from __future__ import annotations

import os

from megatron_idempotent import cpu
from megatron_idempotent.controller.watch.rows import METRICS_FILE, read_metrics
from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.job import Job
from megatron_idempotent.trainer.task.prompts import PromptSet, check_answers_fit
from megatron_idempotent.trainer.task.tokenizer import make_tokenizer
from megatron_idempotent.trainer.watch.report import (
    CURVES_FILE,
    draw_curves,
    print_summary,
    summarize,
)


def run_rank(job: Job) -> None:
    """One rank: the worker, imported where torch may be imported."""
    from megatron_idempotent.trainer.worker import work

    work(job)


def start_ranks(job: Job) -> None:
    """Run `run_rank` on all ranks. Errors: those of `cpu.RankPool.run`."""
    run = job.config.run
    with cpu.RankPool(run.ranks, preload=cpu.PROGRAM_PRELOAD) as pool:
        pool.run(run.ranks, run_rank, job, timeout_s=run.timeout_s)


def check(config: Config, prompts: PromptSet) -> None:
    """What can be known of model, tokenizer and data before anything is written.

    Errors: `DataError` for words that the tokenizer reserves, `CheckpointError` for a checkpoint
    without a tokenizer, `ConfigError` where answers do not fit into a response.
    """
    if config.run.mode == "async":
        from megatron_idempotent.trainer.stream.settings import check_loggers, make_settings

        make_settings(config)
        check_loggers(config)
    tokenizer = make_tokenizer(config, prompts)
    longest = config.rollout.max_response_tokens
    check_answers_fit(prompts, tokenizer.encode_answer, max_response_tokens=longest)


def launch(job: Job, prompts: PromptSet) -> bool:
    """Run the job on its ranks, then leave curves in its directory and a table on the terminal.

    False where it was told to stop, and can be continued. Errors: what `start_ranks` raises, and
    `run_controller` for an asynchronous run.
    """
    # One thread per rank: the ranks are what fills the cores, and one thread adds up in one order.
    os.environ["OMP_NUM_THREADS"] = "1"
    ended = True
    if job.config.run.mode == "async":
        from megatron_idempotent.trainer.stream.run import run_controller

        ended = run_controller(job, prompts)
    else:
        start_ranks(job)
    rows = read_metrics(job.out / METRICS_FILE)
    draw_curves(rows, job.out / CURVES_FILE)
    if not job.quiet:
        print_summary(summarize(rows), job.out)
    return ended
