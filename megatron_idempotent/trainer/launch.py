"""From a prepared job to its results: run the ranks, draw the curves, print the table."""

from __future__ import annotations

import os

from megatron_idempotent import cpu
from megatron_idempotent.trainer.job import Job
from megatron_idempotent.trainer.task.prompts import PromptSet
from megatron_idempotent.trainer.task.tokenizer import WordTokenizer
from megatron_idempotent.trainer.watch.report import (
    CURVES_FILE,
    draw_curves,
    print_summary,
    summarize,
)
from megatron_idempotent.trainer.watch.rows import METRICS_FILE, read_metrics

TOKENIZER_FILE = "tokenizer.json"


def run_rank(job: Job) -> None:
    """One rank: the worker, imported where torch may be imported."""
    from megatron_idempotent.trainer.worker import work

    work(job)


def start_ranks(job: Job) -> None:
    """Run `run_rank` on all ranks. Errors: those of `cpu.RankPool.run`."""
    run = job.config.run
    with cpu.RankPool(run.ranks, preload=cpu.PROGRAM_PRELOAD) as pool:
        pool.run(run.ranks, run_rank, job, timeout_s=run.timeout_s)


def launch(job: Job, prompts: PromptSet) -> None:
    """Run the job on its ranks, then leave curves in its directory and a table on the terminal.

    Errors: `DataError` for words that the tokenizer reserves; what `start_ranks` raises.
    """
    tokenizer = WordTokenizer.build(prompts.all)
    tokenizer.save(job.out / TOKENIZER_FILE)
    # One thread per rank: the ranks are what fills the cores, and one thread adds up in one order.
    os.environ["OMP_NUM_THREADS"] = "1"
    start_ranks(job)
    rows = read_metrics(job.out / METRICS_FILE)
    draw_curves(rows, job.out / CURVES_FILE)
    if not job.quiet:
        print_summary(summarize(rows), job.out)
