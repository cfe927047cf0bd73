"""One rank of a run: from the configuration to the loop. `launch.run_rank` calls it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from torch.distributed import barrier, get_rank

from megatron_idempotent.controller.watch.loggers import Loggers
from megatron_idempotent.trainer import loop
from megatron_idempotent.trainer.job import TRAINED, Job
from megatron_idempotent.trainer.policy.checkpoint import Checkpoints
from megatron_idempotent.trainer.policy.start import start_policy
from megatron_idempotent.trainer.rollout.make import make_engines
from megatron_idempotent.trainer.rollout.sampling import EngineSampler
from megatron_idempotent.trainer.task.reward import load_reward
from megatron_idempotent.trainer.watch.loggers import make_loggers
from megatron_idempotent.trainer.watch.progress import make_progress


def work(job: Job) -> None:
    """Train as one of the ranks of the default process group; all of them run this."""
    rank = get_rank()
    config = job.config
    with _output_to(job.out / "logs" / f"rank-{rank}.log") as terminal, ExitStack() as stack:
        started = start_policy(job)
        policy, tokenizer = started.policy, started.tokenizer
        checkpoints = Checkpoints(job.out / "checkpoints", config, policy)
        first_rollout = checkpoints.load(job.resume_from) if job.resume_from else 0
        logger = stack.enter_context(
            contextlib.closing(_loggers(job, rank, first_rollout, terminal))
        )
        engines = stack.enter_context(
            contextlib.closing(make_engines(config, policy, started.checkpoint, job.out))
        )

        def publish(done: int) -> None:
            with policy.weights():
                engines.publish(done)

        parts = loop.Parts(
            sampler=EngineSampler(
                engines.generate,
                tokenizer,
                temperature=config.rollout.temperature,
                max_response_tokens=config.rollout.max_response_tokens,
                seed=config.run.seed,
            ),
            publish=publish,
            reward=load_reward(config.task.reward),
            policy=policy,
            logger=logger,
            save=checkpoints.save,
            positions=started.positions,
            pad_id=tokenizer.pad_id,
        )
        loop.train(config, started.prompts, parts, first_rollout=first_rollout)
        policy.save_hf(job.out / TRAINED)
        # Rank 0 may not leave first: it hosts the store that the others still talk to.
        barrier()


def _loggers(job: Job, rank: int, first_rollout: int, terminal: IO[str]) -> Loggers:
    # Built where they run: they hold locks and threads. The other ranks log nothing.
    if rank != 0:
        return Loggers([])
    shown = []
    if not job.quiet:
        shown = [make_progress(job.config, first_rollout=first_rollout, terminal=terminal)]
    # No event loop waits here, and a thread that draws the bar would take a core from the ranks.
    return make_loggers(job, *shown, threaded=False)


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
