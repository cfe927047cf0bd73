"""One rank of a run: from the configuration to the loop. `launch.run_rank` calls it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch.distributed as dist

import megatron_idempotent
from megatron_idempotent.trainer import loop
from megatron_idempotent.trainer.job import Job, data_path
from megatron_idempotent.trainer.policy.checkpoint import Checkpoints
from megatron_idempotent.trainer.policy.megatron import MegatronPolicy
from megatron_idempotent.trainer.rollout.sampling import CachedSampler
from megatron_idempotent.trainer.task.prompts import PromptSet, read_prompts
from megatron_idempotent.trainer.task.reward import load_reward
from megatron_idempotent.trainer.task.tokenizer import WordTokenizer
from megatron_idempotent.trainer.watch.loggers import Loggers, make_loggers


def work(job: Job) -> None:
    """Train as one of the ranks of the default process group; all of them run this."""
    rank = dist.get_rank()
    with _output_to(job.out / "logs" / f"rank-{rank}.log") as terminal:
        megatron_idempotent.apply()
        prompts = read_prompts(data_path(job.config))
        tokenizer = WordTokenizer.build(prompts.all)
        positions = sequence_positions(prompts, tokenizer, job)
        policy = MegatronPolicy(
            job.config, positions=positions, vocabulary_size=tokenizer.vocabulary_size
        )
        checkpoints = Checkpoints(job.out / "checkpoints", job.config, policy)
        first_rollout = checkpoints.load(job.resume_from) if job.resume_from else 0
        with contextlib.closing(_loggers(job, rank, first_rollout, terminal)) as logger:
            parts = loop.Parts(
                sampler=CachedSampler(
                    policy.weights,
                    tokenizer,
                    temperature=job.config.rollout.temperature,
                    max_response_tokens=job.config.rollout.max_response_tokens,
                    seed=job.config.run.seed,
                ),
                reward=load_reward(job.config.task.reward),
                policy=policy,
                logger=logger,
                save=checkpoints.save,
                positions=positions,
                pad_id=tokenizer.pad_id,
            )
            loop.train(job.config, prompts, parts, first_rollout=first_rollout)
        # Rank 0 may not leave first: it hosts the store that the others still talk to.
        dist.barrier()


def sequence_positions(prompts: PromptSet, tokenizer: WordTokenizer, job: Job) -> int:
    """Length T of the training sequences: the longest prompt and response, less the shift by one.

    Held-out prompts count too, so that evaluation and training see one rotary table.
    """
    longest = max(len(tokenizer.encode_prompt(prompt.text)) for prompt in prompts.all)
    return longest + job.config.rollout.max_response_tokens - 1


def _loggers(job: Job, rank: int, first_rollout: int, terminal: IO[str]) -> Loggers:
    # Built where they run: they hold locks and threads. The other ranks log nothing.
    if rank != 0:
        return Loggers([])
    return make_loggers(job, first_rollout=first_rollout, terminal=terminal)


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[IO[str]]:
    """Send what this process prints to a file; yields the terminal it would have printed to.

    By descriptor, because Megatron's libraries print from C++ too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with path.open("ab", buffering=0) as log, os.fdopen(os.dup(2), "w") as terminal:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
