"""Turns the error of a rank into what the user should know about it."""

from __future__ import annotations

from megatron_idempotent.cpu import RankError
from megatron_idempotent.trainer.job import Job


def explain_failure(error: RankError, job: Job) -> str:
    """The error with its traceback, and where to find what the rank printed before."""
    return (
        f"{error}\n\nrank {error.rank} failed; what it printed is in "
        f"{job.out / 'logs' / f'rank-{error.rank}.log'}"
    )
