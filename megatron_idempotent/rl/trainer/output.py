"""Chooses, checks and makes the output directory of a run before anything else starts."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics
from megatron_idempotent.rl.trainer.task.prompts import SHIPPED_FILE

from . import checkpoint_dir
from .config import SECTIONS, CheckpointError, Config, OutputError, as_toml

#: Folders of Hugging Face checkpoints in the output directory: the random one that a run without
#: `model.path` began from, and the trained one.
INITIAL, TRAINED = "model-initial", "model"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Describes one start of a run. Example: `Job(config=Config(), out=Path("runs/a"))`."""

    config: Config
    """The configuration of the run."""
    out: Path
    """The output directory, which exists."""
    resume_from: Path | None = None
    """The complete checkpoint from which the run goes on; None for a new run."""
    quiet: bool = False
    """True to print errors only."""


def data_path(config: Config) -> Path:
    """Return the prompt file: the configured one, or the one that ships with the project."""
    return Path(config.task.data) if config.task.data else SHIPPED_FILE


RUNS = Path("runs")
CONFIG_FILE = "config.toml"

# Keys that may differ between a run and its continuation, since they change none of its numbers.
_FREE = frozenset(
    {
        "run.rollouts",
        "run.out",
        "run.checkpoint_every",
        "run.keep_checkpoints",
        "run.timeout_s",
        "optimizer.chunks_per_step",
        "evaluation.every",
        "task.data",  # its content counts, not its path
        "rollout.engine_url",
        "rollout.request_timeout_s",
        "sync.transport",
        "sync.directory",
        "sync.address",
        "sync.workers",
        "sync.bucket_mb",
        "sync.changed_only",
        "controller.cluster",
        "controller.engines",
        "controller.ray_address",
        "controller.plane",
        "controller.step_attempts",
        "controller.group_attempts",
        "controller.restarts",
        "controller.group_timeout_s",
        "controller.call_timeout_s",
        "controller.stall_s",
        "controller.drain_s",
        "controller.loggers",
        "controller.timeline",
    }
)


def prepare(config: Config, *, resume: bool, quiet: bool, started_anew: bool = False) -> Job:
    """Make the output directory or, to resume, check the newest checkpoint in it; return the job.

    With `started_anew`, which is for a run that something else starts again when it dies, it
    resumes if there is a checkpoint and begins from the start if there is none.

    Errors: `OutputError` if the directory cannot be written or holds another run; `CheckpointError`
    if there is no checkpoint to resume from, or it is damaged or was written with other settings.
    """
    if started_anew:
        out = Path(config.run.out)
        resume = bool(checkpoint_dir.complete(out / "checkpoints"))
    else:
        out = run_to_resume(config.run.out) if resume else _fresh(config)
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OutputError(
            f"{error.filename or out}: {error.strerror}; choose a directory that can be written "
            "with --out"
        ) from error
    checkpoint = None
    if resume:
        checkpoint = newest_checkpoint(out)
        _same_settings(
            checkpoint_dir.verify(checkpoint)["config"], resume_state(config), checkpoint
        )
        initial = out / INITIAL
        checkpoint_dir.check_sums(initial, f"remove {initial}, and an equal one is made")
        try:
            read_metrics(out / METRICS_FILE)
        except ValueError as error:
            raise OutputError(f"{error}; remove that line to go on without it") from error
    (out / CONFIG_FILE).write_text(as_toml(config), encoding="utf-8")
    return Job(config=config, out=out, resume_from=checkpoint, quiet=quiet)


def newest_checkpoint(out: Path) -> Path:
    """Return the newest complete checkpoint of a run. Errors: `CheckpointError` without one."""
    found = checkpoint_dir.complete(out / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{out / 'checkpoints'}: no complete checkpoint to resume from; start without --resume"
        )
    return found[-1]


def resume_state(config: Config) -> dict[str, Any]:
    """Return the settings that a continuation must share, and a hash of the prompts."""
    state = {
        f"{section}.{key}": value
        for section in SECTIONS
        for key, value in dataclasses.asdict(getattr(config, section)).items()
        if f"{section}.{key}" not in _FREE
    }
    if config.packs:
        # Other chunks are other packs, whose sums are rounded otherwise.
        state["sequences packed at once"] = config.chunk_size
    digest = hashlib.sha256(data_path(config).read_bytes()).hexdigest()
    return state | {"prompts sha256": digest}


def seal_checkpoint(directory: Path, done: int, config: Config, *, digest: str) -> None:
    """Complete the checkpoint after `done` rollouts, and remove the oldest ones.

    `digest` is that of the weights. `run.keep_checkpoints` of them stay.
    """
    state = {"rollouts": done, "config": resume_state(config), "weights sha256": digest}
    unfinished = checkpoint_dir.unfinished_path(directory, done)
    checkpoint_dir.seal(unfinished, checkpoint_dir.path_for(directory, done), state)
    checkpoint_dir.keep_newest(directory, config.run.keep_checkpoints)


def _same_settings(written: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path) -> None:
    default = Config()
    for key in sorted({*written, *now}):
        section, _, name = key.partition(".")
        # What the release that wrote it did not know was as it is by default.
        before = written.get(key, getattr(getattr(default, section, None), name, None))
        if before != now.get(key):
            raise CheckpointError(
                f"{checkpoint}: written with {key} = {before!r}, now it is "
                f"{now.get(key)!r}; resume with the same settings, or start a new run with --out"
            )


def _fresh(config: Config) -> Path:
    if not config.run.out:
        number = 1
        while (RUNS / f"train-{number:03d}").exists():
            number += 1
        return RUNS / f"train-{number:03d}"
    out = Path(config.run.out)
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(
            f"{out}: not empty; continue that run with --resume, or choose another directory with "
            "--out"
        )
    return out


def run_to_resume(out: str) -> Path:
    """Return the directory `out` or, if `out` is empty, that of the last numbered run.

    Errors: `OutputError` if there is no such directory.
    """
    if out:
        path = Path(out)
    else:
        runs = sorted(path for path in RUNS.glob("train-*") if path.is_dir())
        if not runs:
            raise OutputError(f"{RUNS}: no run to resume; name its directory with --out")
        path = runs[-1]
    if not path.is_dir():
        raise OutputError(f"{path}: no such directory; name the run to resume with --out")
    return path


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[IO[str]]:
    """Append all that this process prints to a file; yields the terminal's standard error.

    It redirects descriptors 1 and 2, because Megatron's libraries print from C++ too.
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
