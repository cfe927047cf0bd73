"""Where the metrics of a run go: the JSONL file, TensorBoard events, the terminal."""

from __future__ import annotations

import functools
from typing import IO

from megatron_idempotent.controller.watch.backends import TENSORBOARD_DIRECTORY, TensorBoardLogger
from megatron_idempotent.controller.watch.loggers import Loggers
from megatron_idempotent.controller.watch.rows import METRICS_FILE, JsonlLogger
from megatron_idempotent.trainer.job import Job
from megatron_idempotent.trainer.watch.progress import make_progress


def make_loggers(job: Job, *, first_rollout: int, terminal: IO[str]) -> Loggers:
    """The loggers of rank 0. TensorBoard is left out where it is not installed, with a warning."""
    events = functools.partial(
        TensorBoardLogger, job.out / TENSORBOARD_DIRECTORY, first_step=first_rollout
    )
    rows = JsonlLogger(job.out / METRICS_FILE, first_step=first_rollout)
    if job.quiet:
        return Loggers([rows, events])
    bar = make_progress(job.config, first_rollout=first_rollout, terminal=terminal)
    return Loggers([rows, events, bar])
