"""Runs a prepared job: starts the ranks, draws the curves, prints the table, explains a failure."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_idempotent import cpu
from megatron_idempotent.cpu import RankError
from megatron_idempotent.metrics.loggers import METRICS_FILE, read_metrics
from megatron_idempotent.trainer.task.prompts import PromptSet, check_answers_fit
from megatron_idempotent.trainer.task.tokenizer import make_tokenizer

from . import checkpoint_dir
from .config import CheckpointError, Config, ConfigError
from .layout import Named, ParallelConfig, misfit
from .output import Job
from .report import CURVES_FILE, draw_curves, print_summary, summarize

#: Imported once, and not again by each rank; models of other families than Llama are.
PRELOAD = (
    *cpu.PROGRAM_PRELOAD,
    "megatron_idempotent.trainer.loop",
    "megatron_idempotent.engines.transformers",
    "transformers.models.llama.modeling_llama",
)


def run_rank(job: Job) -> None:
    """One rank: the worker, imported where torch may be imported."""
    from .loop import work

    work(job)


def start_ranks(job: Job) -> None:
    """Run `run_rank` on all ranks. Errors: those of `cpu.RankPool.run`."""
    run = job.config.run
    with cpu.RankPool(run.ranks, preload=PRELOAD, device=run.device) as pool:
        pool.run(run.ranks, run_rank, job, timeout_s=run.timeout_s)


def check(config: Config, prompts: PromptSet) -> None:
    """Checks model, tokenizer and data before anything is written.

    Errors: `DataError` for words that the tokenizer reserves, `CheckpointError` for a checkpoint
    without a tokenizer or with a damaged file, `ConfigError` where answers do not fit into a
    response or sequences into a pack, where ranks cannot cut the model as `[parallel]` asks, or for
    a sampler or logger that there is none of, in both modes.
    """
    from .async_run import make_sampler, make_settings
    from .policy import check_budget
    from .report import named_loggers

    make_sampler(config)
    named_loggers(config, Path(config.run.out))
    if config.run.mode == "async":
        make_settings(config)
    tokenizer = make_tokenizer(config, prompts)
    if config.model.path:
        _check_checkpoint(Path(config.model.path), config.parallel)
    longest = config.rollout.max_response_tokens
    check_answers_fit(prompts, tokenizer.encode_answer, max_response_tokens=longest)
    check_budget(config, prompts, tokenizer)


def _check_checkpoint(folder: Path, parallel: ParallelConfig) -> None:
    """Errors: `CheckpointError` for what ranks could not load, or would load damaged."""
    from megatron_idempotent.hf import Architecture
    from megatron_idempotent.weights.safetensors_io import Checkpoint

    remedy = f"fetch it again, or write {checkpoint_dir.SUMS} again if you have changed it"
    checkpoint_dir.check_sums(folder, remedy)
    try:
        arch = Architecture.read(folder)
        Checkpoint(folder).close()
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    ffn = Named("intermediate_size", arch.ffn)
    wrong = misfit(
        parallel,
        layers=Named("num_hidden_layers", arch.layers),
        heads=Named("num_attention_heads", arch.heads),
        query_groups=Named("num_key_value_heads", arch.query_groups),
        ffn=Named("moe_intermediate_size", arch.expert_ffn) if arch.experts else ffn,
        experts=Named("num_experts", arch.experts),
    )
    if wrong:
        raise ConfigError(f"{folder / 'config.json'}: {wrong}")


def launch(job: Job, prompts: PromptSet) -> bool:
    """Run the job on its ranks, then leave curves in its directory and a table on the terminal.

    False where it was told to stop, and can be continued. Errors: what `start_ranks` raises, and
    `run_controller` for an asynchronous run.
    """
    # One thread per rank: the ranks are what fills the cores, and one thread adds up in one order.
    os.environ["OMP_NUM_THREADS"] = "1"
    ended = True
    if job.config.run.mode == "async":
        from .async_run import run_controller

        ended = run_controller(job, prompts)
    else:
        start_ranks(job)
    rows = read_metrics(job.out / METRICS_FILE)
    step = "optimizer step" if job.config.run.mode == "async" else "rollout"
    draw_curves(rows, job.out / CURVES_FILE, step=step)
    if not job.quiet:
        print_summary(summarize(rows), job.out)
    return ended


def explain_failure(error: RankError, job: Job) -> str:
    """The error with its traceback, and where to find what the rank printed before."""
    return (
        f"{error}\n\nrank {error.rank} failed; what it printed is in "
        f"{job.out / 'logs' / f'rank-{error.rank}.log'}"
    )
