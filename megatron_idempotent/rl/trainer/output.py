"""Chooses, checks and creates the output directory of a run, and completes checkpoints in it.

The module imports neither torch nor Megatron. A checkpoint is written under another name, its files
are listed in `COMPLETE.json`, and it is renamed. A directory without that list, or whose files
differ from it, is not a checkpoint. Folders of Hugging Face checkpoints have hashes of their files
in `SHA256SUMS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megatron_idempotent.json_text import parse_json
from megatron_idempotent.rl.metrics.loggers import METRICS_FILE, read_metrics, write_whole
from megatron_idempotent.rl.trainer.task.prompts import SHIPPED_FILE

from . import CheckpointError, OutputError
from .config import SECTIONS, Config, as_toml, declared

#: Folders of Hugging Face checkpoints in the output directory: the random initial one of a run
#: without `model.path`, and the trained one.
INITIAL, TRAINED = "model-initial", "model"
#: The folder for file transports in the output directory.
SYNC = "sync"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Describes one start of a run: configuration, output directory, checkpoint to resume from.
    Example: `Job(config=Config(), out=Path("runs/a"))`.
    """

    config: Config
    """The configuration of the run."""
    out: Path
    """The output directory, which exists."""
    resume_from: Path | None = None
    """The complete checkpoint to resume from; None for a new run."""
    quiet: bool = False
    """True to print errors only."""
    began_s: float = dataclasses.field(default_factory=time.time)
    """Seconds since 1970 at the start of the command."""

    @property
    def checkpoint(self) -> Path:
        """The Hugging Face checkpoint that the run starts from: `model.path` or, without one, that
        of random weights in the output directory.
        """
        return Path(self.config.model.path or self.out / INITIAL)

    def say(self, phase: str, to: IO[str] | None = None) -> None:
        """Print the name of a phase at its start, unless the run is quiet; see `output.say`."""
        if not self.quiet:
            say(phase, self.began_s, to)


def say(phase: str, began_s: float, to: IO[str] | None = None) -> None:
    """Print the name of a start-up phase, with the seconds since the start of the command.

    The output goes to `to`, or to standard error.
    """
    print(f"{time.time() - began_s:6.1f} s  {phase}", file=to or sys.stderr, flush=True)


def data_path(config: Config) -> Path:
    """Return the path of the prompt file: the configured file, or the file shipped with the
    package.
    """
    return Path(config.task.data) if config.task.data else SHIPPED_FILE


RUNS = Path("runs")
CONFIG_FILE, MARKER, SUMS = "config.toml", "COMPLETE.json", "SHA256SUMS"


def prepare(config: Config, *, resume: bool, quiet: bool, began_s: float | None = None) -> Job:
    """Create the output directory or, to resume, check its newest checkpoint; return the job.

    A run that died before its first checkpoint is resumed from its start.

    Args:
        config: the configuration, which is written into the directory.
        resume: True to continue the run in the directory.
        quiet: True to print errors only.
        began_s: when the command started, in seconds since 1970; None for now.

    Raises:
        OutputError: the directory cannot be written, or has another run.
        CheckpointError: there is no run to resume, or its checkpoint is damaged or has other
            settings.
    """
    out = run_to_resume(config.run.out) if resume else _fresh(config)
    checkpoint = _checkpoint_to_resume(out, config) if resume else None
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        # Atomically: a run that is killed here is resumed with this file.
        write_whole(out / CONFIG_FILE, as_toml(config))
        if checkpoint is not None:
            # A run that died while completing its last checkpoint left old ones.
            remove_old(out / "checkpoints", config.run.keep_checkpoints)
    except OSError as error:
        raise OutputError(
            f"{error.filename or out}: {error.strerror}; choose a directory that can be written "
            "with --out"
        ) from error
    began_s = time.time() if began_s is None else began_s
    return Job(config=config, out=out, resume_from=checkpoint, quiet=quiet, began_s=began_s)


def _checkpoint_to_resume(out: Path, config: Config) -> Path | None:
    """Check the run in a directory, and return the run's newest checkpoint; None if there is none
    yet.

    Raises:
        OutputError: the metrics file is damaged.
        CheckpointError: there is no run, or its newest or initial checkpoint is damaged, or has
            other settings.
    """
    checkpoints = complete_checkpoints(out / "checkpoints")
    checkpoint = checkpoints[-1] if checkpoints else None
    if checkpoint is not None:
        _same_settings(verify_checkpoint(checkpoint)["config"], resume_state(config), checkpoint)
    elif not (out / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{out}: neither a complete checkpoint nor the {CONFIG_FILE} of a run that had "
            "none yet; start without --resume, in an empty directory"
        )
    initial = out / INITIAL
    check_sums(initial, f"remove {initial}, and an equal one is made")
    try:
        read_metrics(out / METRICS_FILE)
    except ValueError as error:
        raise OutputError(f"{error}; remove that line to go on without it") from error
    return checkpoint


def resume_state(config: Config) -> dict[str, Any]:
    """Return the settings that a resumed run may not change, by "section.key", and a hash of the
    prompts.
    """
    state = {
        f"{section}.{key}": value
        for section in SECTIONS
        for key, value in dataclasses.asdict(getattr(config, section)).items()
        if key not in declared("may_change")[section]
    }
    if config.packs:
        # Another chunk size makes other packs, whose sums round differently.
        state["sequences packed at once"] = config.chunk_size
    digest = hashlib.sha256(data_path(config).read_bytes()).hexdigest()
    return state | {"prompts sha256": digest}


def seal_checkpoint(directory: Path, rollouts: int, config: Config, *, digest: str) -> None:
    """Complete a checkpoint whose files are written: list their hashes, rename its folder, and
    remove the oldest checkpoints.

    The list of its files has sizes, hashes and `digest`, the digest of the weights; then the folder
    is renamed. Files are flushed to disk before the list, and the list before the rename, so that a
    power failure leaves a complete checkpoint or none under the final name.
    `run.keep_checkpoints` checkpoints are kept.
    """
    unfinished, final = unfinished_path(directory, rollouts), checkpoint_path(directory, rollouts)
    files = {}
    for path in sorted(path for path in unfinished.rglob("*") if path.is_file()):
        _flush_to_disk(path)
        files[path.relative_to(unfinished).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": _sha256(path),
        }
    state = {"rollouts": rollouts, "config": resume_state(config), "weights sha256": digest}
    listed = {"sha256": _of_list(state, files), "state": state, "files": files}
    (unfinished / MARKER).write_text(json.dumps(listed, indent=1), encoding="utf-8")
    _flush_to_disk(unfinished / MARKER)
    if final.exists():  # left by an interrupted run
        _remove(final)
    unfinished.rename(final)
    _flush_to_disk(directory)
    remove_old(directory, config.run.keep_checkpoints)


def remove_old(directory: Path, keep: int) -> None:
    """Remove all checkpoints in a directory except the `keep` newest, and incomplete checkpoints of
    runs that died.
    """
    newest = complete_checkpoints(directory)[-keep:]
    for old in (*_numbered(directory, "rollout"), *directory.glob("rollout-[0-9]*.unfinished")):
        if old not in newest:
            _remove(old)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, beginning with its COMPLETE.json, so that a partly removed checkpoint
    does not count as complete.
    """
    (checkpoint / MARKER).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def checkpoint_path(directory: Path, rollouts: int) -> Path:
    """Return the directory of the checkpoint after `rollouts` rollouts, which may not exist.

    In an asynchronous run the number is that of optimizer steps, here and below.
    """
    return directory / f"rollout-{rollouts:06d}"


def rollouts_of(checkpoint: Path) -> int:
    """Return a checkpoint's number of rollouts, from its name."""
    return int(checkpoint.name.rpartition("-")[2])


def unfinished_path(directory: Path, rollouts: int) -> Path:
    """Return the folder in which a checkpoint is written before it is complete; a run that died may
    have left files there.
    """
    path = checkpoint_path(directory, rollouts)
    return path.with_name(f"{path.name}.unfinished")


def make_empty(unfinished: Path) -> None:
    """Create an empty directory; if it exists, remove what a run that died has left in it."""
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints in a directory, the oldest first."""
    return [path for path in _numbered(directory, "rollout") if (path / MARKER).exists()]


def _numbered(directory: Path, name: str) -> list[Path]:
    """Return the folders called `name-NUMBER` in a directory, in order of number."""
    return sorted(
        (
            path
            for path in directory.glob(f"{name}-*")
            if path.is_dir() and path.name.removeprefix(f"{name}-").isdecimal()
        ),
        key=rollouts_of,
    )


def verify_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Raise `CheckpointError` if a file of a checkpoint is missing, or differs from the hash in
    COMPLETE.json. Return the run's state in that file, such as the settings and the number of
    rollouts.

    Raises:
        CheckpointError: a file is missing, truncated or changed; the message names it.
    """
    marker = checkpoint / MARKER
    remedy = _remedy(checkpoint)
    try:
        listed = parse_json(marker.read_text(encoding="utf-8"))
        files, state = dict(listed["files"]), dict(listed["state"])
        if listed["sha256"] != _of_list(state, files):
            raise ValueError("its content has changed")
    except OSError as error:
        raise CheckpointError(f"{marker}: {error.strerror}; {remedy}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{marker}: damaged ({error}); {remedy}") from error
    for name, expected in files.items():
        listed_in = f"{MARKER}, which lists {expected['bytes']} bytes"
        _check_file(checkpoint / name, expected["sha256"], listed_in, remedy)
    return state


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS with the hashes of a folder's files, like `sha256sum * > SHA256SUMS`."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    text = "".join(f"{_sha256(path)}  {path.name}\n" for path in files)
    (folder / SUMS).write_text(text, encoding="utf-8")


def check_sums(folder: Path, remedy: str) -> None:
    """Raise `CheckpointError` if a file is missing, or differs from the hash in the folder's
    SHA256SUMS. Do nothing if the folder has no SHA256SUMS.

    Raises:
        CheckpointError: a file is missing or changed; the message names it, and ends with `remedy`.
    """
    sums = folder / SUMS
    if not sums.is_file():
        return
    for line in sums.read_text(encoding="utf-8", errors="replace").splitlines():
        expected, _, name = line.partition(" ")
        _check_file(folder / name.lstrip(" *"), expected, SUMS, remedy)


def _check_file(path: Path, expected_sha256: str, listed_in: str, remedy: str) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; it is one of {listed_in}; {remedy}")
    if _sha256(path) != expected_sha256:
        size = path.stat().st_size
        raise CheckpointError(f"{path}: its {size} bytes are not those of {listed_in}; {remedy}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _of_list(state: Mapping[str, Any], files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([state, files], sort_keys=True).encode()).hexdigest()


def _remedy(checkpoint: Path) -> str:
    number = rollouts_of(checkpoint)
    older = [path for path in complete_checkpoints(checkpoint.parent) if rollouts_of(path) < number]
    remove = f"remove the directory {checkpoint}"
    if older:
        return f"{remove} to resume from {older[-1].name}"
    return f"{remove} and start again without --resume: there is no older checkpoint"


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _same_settings(
    written: Mapping[str, Any], current: Mapping[str, Any], checkpoint: Path
) -> None:
    default = Config()
    for key in sorted({*written, *current}):
        section, _, name = key.partition(".")
        # A setting that the writing release did not have counts as the default.
        old_value = written.get(key, getattr(getattr(default, section, None), name, None))
        if old_value != current.get(key):
            raise CheckpointError(
                f"{checkpoint}: written with {key} = {old_value!r}, now it is "
                f"{current.get(key)!r}; resume with the same settings, or start a new run with "
                "--out"
            )


def _fresh(config: Config) -> Path:
    if not config.run.out:
        numbered = (RUNS / f"train-{number:03d}" for number in itertools.count(1))
        return next(path for path in numbered if not path.exists())
    out = Path(config.run.out)
    if not is_unused(out):
        raise OutputError(
            f"{out}: not empty; continue that run with --resume, or choose another directory with "
            "--out"
        )
    return out


def is_unused(out: Path) -> bool:
    """Return whether a new run may use a directory: it does not exist, or is empty."""
    return not out.is_dir() or not any(out.iterdir())


def run_to_resume(out: str) -> Path:
    """Return the directory `out` or, if `out` is empty, the directory `runs/train-NUMBER` with the
    highest number.

    Raises:
        OutputError: there is no such directory.
    """
    if out:
        path = Path(out)
    else:
        runs = _numbered(RUNS, "train")
        if not runs:
            raise OutputError(f"{RUNS}: no run to resume; name its directory with --out")
        path = runs[-1]
    if not path.is_dir():
        raise OutputError(f"{path}: no such directory; name the run to resume with --out")
    return path


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[IO[str]]:
    """Redirect this process's output to a file during the `with` block; yield the original standard
    error.

    It redirects descriptors 1 and 2, because Megatron's libraries also print from C++.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved_descriptors = [os.dup(1), os.dup(2)]
    with path.open("ab", buffering=0) as log, os.fdopen(os.dup(2), "w") as terminal:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            yield terminal
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(saved_descriptors, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
