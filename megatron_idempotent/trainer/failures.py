"""From the error of a rank to what the user should know about it."""

from __future__ import annotations

from megatron_idempotent.cpu import RankError
from megatron_idempotent.trainer.job import Job

# A part of upstream's message, or of its traceback where the message says nothing, and the hazard.
_KNOWN = (
    ("config.no_sync_func must be None", "no-sync-func-reentry"),
    ("timer has already been started", "train-interval-timer"),
    ("in disable_forward_pre_hook", "forward-pre-hook-reentry"),
)


def hazard_of(error: RankError) -> str | None:
    """The id of the hazard that a rank ran into, where it is one that the trainer runs into."""
    for words, hazard in _KNOWN:
        if words in error.message or words in error.traceback:
            return hazard
    return None


def explain_failure(error: RankError, job: Job) -> str:
    """Upstream's error, and where to go from there.

    A known hazard without `apply()` is what `--no-apply` is for: it is told in a few lines. Any
    other failure comes with its traceback.
    """
    hazard = hazard_of(error)
    if hazard is None or job.apply:
        return (
            f"{error}\n\nrank {error.rank} failed; what it printed is in "
            f"{job.out / 'logs' / f'rank-{error.rank}.log'}"
        )
    return "\n".join(
        (
            "Megatron as it is, without megatron_idempotent.apply(), failed when its train() was "
            "called again:",
            "",
            *_upstream_frames(error.traceback),
            f"{error.exception_type}: {error.message}",
            "",
            f"This is hazard {hazard}: megatron-idempotent explain {hazard}",
            "Without --no-apply the trainer calls apply() first, and this run goes on.",
        )
    )


def _upstream_frames(traceback: str) -> list[str]:
    """The traceback from the first frame inside Megatron; all of it where there is none."""
    lines = traceback.rstrip().splitlines()[1:]
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    upstream = [number for number in frames if "/megatron/" in lines[number]]
    first = upstream[0] if upstream else 0
    last = next(
        (number for number in range(first, len(lines)) if not lines[number].startswith(" ")),
        len(lines),
    )
    return lines[first:last]
