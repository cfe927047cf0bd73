"""Checks and runs a prepared job: starts the ranks, draws curves, prints the final table."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_idempotent.proof import cpu
from megatron_idempotent.proof.cpu import RankError
from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics
from megatron_idempotent.rl.trainer.task.prompts import PromptSet, check_answers_fit
from megatron_idempotent.rl.trainer.task.tokenizer import make_tokenizer

from . import checkpoint_dir
from .config import CheckpointError, Config, ConfigError
from .layout import Named, ParallelConfig, misfit
from .output import Job
from .report import CURVES_FILE, draw_curves, print_summary, summarize

#: Modules that the launcher imports once for all ranks; other models than Llama are not among them.
PRELOAD = (
    *cpu.PROGRAM_PRELOAD,
    "megatron_idempotent.rl.trainer.loop",
    "megatron_idempotent.rl.engines.transformers",
    "transformers.models.llama.modeling_llama",
)


def run_rank(job: Job) -> None:
    """Train as one rank; import the worker only here, in a process that may import torch."""
    from .loop import work

    work(job)


def start_ranks(job: Job) -> None:
    """Run `run_rank` on all ranks. Errors: those of `cpu.RankPool.run`."""
    run = job.config.run
    with cpu.RankPool(run.ranks, preload=PRELOAD, device=run.device) as pool:
        pool.run(run.ranks, run_rank, job, timeout_s=run.timeout_s)


def check(config: Config, prompts: PromptSet) -> None:
    """Check settings, model, tokenizer and data against each other, before anything is written.

    Errors: `DataError` for words that the tokenizer reserves; `CheckpointError` for a checkpoint
    without a tokenizer or with a damaged file; `ConfigError` if answers do not fit into a response
    or sequences into a pack, if ranks cannot cut the model as `[parallel]` asks, or for an unknown
    sampler or logger.
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
    """Check that a checkpoint is whole, and that ranks can cut its model.

    Errors: `CheckpointError` for files that are damaged or cannot be read; `ConfigError`.
    """
    from megatron_idempotent.rl.hf import Architecture
    from megatron_idempotent.rl.weights.safetensors_io import Checkpoint

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
    """Run the job, draw its curves and print its table; return whether the run came to its end.

    It returns False if SIGTERM stopped an asynchronous run, which can be continued.
    Errors: those of `start_ranks` or, for an asynchronous run, of `run_controller`.
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
    """Return the error with its traceback, and the file that has what the rank printed before."""
    return (
        f"{error}\n\nrank {error.rank} failed; what it printed is in "
        f"{job.out / 'logs' / f'rank-{error.rank}.log'}"
    )
