"""Defines loggers: files, TensorBoard, W&B, and several as one that never raises."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_idempotent.json_text import parse_json


class SettingsError(ValueError):
    """Settings cannot work; the message names the setting, its value and what is allowed."""


class Logger(Protocol):
    """Records metrics of each optimizer step."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record metrics by name, at the version `step`. Training goes on if it raises."""

    def close(self) -> None:
        """Flush and release what is open."""


_Record = tuple[dict[str, float], int]


class Loggers:
    """Hands metrics to several loggers, and drops a logger that raises.

    A dropped logger costs a warning on standard error, and is never called again: a full disk must
    not cost the training. Example: `Loggers([lambda: JsonlLogger(path)], threaded=True)`.
    """

    def __init__(
        self,
        loggers: Sequence[Logger | Callable[[], Logger]],
        *,
        threaded: bool = False,
        queued: int = 1_000,
        close_timeout_s: float = 30.0,
        lent: bool = False,
    ) -> None:
        """Build the loggers; one that cannot be built is left out, with a warning.

        Args:
            loggers: loggers, or functions that make them. Give functions for loggers that hold
                locks or threads, or are slow to build.
            threaded: True to build and call loggers in one background thread, as an event loop
                needs.
            queued: the most records that wait for the thread; further ones are left out, and
                counted in `left_out`.
            close_timeout_s: the most seconds that `close` waits for the thread.
            lent: True to have `close` leave the loggers open.
        """
        self._loggers: list[Logger] = []
        self._given = list(loggers)
        self._queued = queued
        self._close_timeout_s = close_timeout_s
        self._lent = lent
        self._left_out = 0
        self._closed = False
        # Bounded by hand: a full queue must take the record that ends it.
        self._records: queue.SimpleQueue[_Record | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            # A daemon: a logger that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="loggers", daemon=True)
            self._thread.start()
        else:
            self._build()

    @property
    def working(self) -> tuple[Logger, ...]:
        """The loggers that were built and have not raised."""
        return tuple(self._loggers)

    @property
    def left_out(self) -> int:
        """The number of records that no logger got: the queue was full, or it was closed."""
        return self._left_out

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hand the metrics to every logger that still works; with a thread it does not wait.

        After `close` it leaves them out.
        """
        if self._closed:
            self._left_out += 1
        elif self._thread is None:
            self._log(metrics, step)
        elif self._records.qsize() < self._queued:
            self._records.put((dict(metrics), step))
        else:
            if not self._left_out:
                print(
                    f"loggers have {self._queued} records waiting; further ones are left out",
                    file=sys.stderr,
                )
            self._left_out += 1

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait up to `timeout_s` seconds until loggers have all records; return whether they do."""
        if self._thread is None or not self._thread.is_alive():
            return True
        reached = threading.Event()
        self._records.put(reached)
        return reached.wait(timeout_s)

    def close(self) -> None:
        """Hand over what is queued, and close every logger that still works, once.

        With a thread it waits up to `close_timeout_s` seconds: call it from another thread while an
        event loop has work to do.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            self._close()
            return
        self._records.put(None)
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            print(
                f"loggers did not end in {self._close_timeout_s:g} s, with "
                f"{max(self._records.qsize() - 1, 0)} records still queued; they are dropped",
                file=sys.stderr,
            )
        if self._left_out:
            print(f"{self._left_out} records of metrics were left out", file=sys.stderr)

    def _run(self) -> None:
        self._build()
        while (record := self._records.get()) is not None:
            if isinstance(record, threading.Event):
                record.set()
            else:
                self._log(*record)
        self._close()

    def _build(self) -> None:
        for given in self._given:
            with self._dropping(given):
                # A class has the attribute as well, and is what makes the logger.
                made: Any = given
                if isinstance(given, type) or not hasattr(given, "log"):
                    made = made()
                self._loggers.append(made)

    def _log(self, metrics: Mapping[str, float], step: int) -> None:
        for logger in self.working:
            with self._dropping(logger):
                logger.log(metrics, step=step)

    def _close(self) -> None:
        for logger in () if self._lent else self.working:
            with self._dropping(logger):
                logger.close()

    @contextlib.contextmanager
    def _dropping(self, logger: Logger | Callable[[], Logger]) -> Iterator[None]:
        """Take a logger off the list, with a warning, if the block raises any `Exception`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (whatever it is, it must not cost the training)
            # Printed and not raised: stderr is the run's log file, where it can be found later.
            told = f"{type(error).__name__}: {error}"
            print(f"{_name(logger)} failed and is dropped: {told}", file=sys.stderr)
            self._loggers[:] = [each for each in self._loggers if each is not logger]


def _name(logger: Any) -> str:
    if isinstance(logger, functools.partial):
        return _name(logger.func)
    return str(getattr(logger, "__qualname__", type(logger).__name__))


METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, oldest first; none if there is no file.

    It leaves out a last line that is cut off, and rows of steps that were taken again later because
    ranks were lost. Errors: `ValueError`, which names the damaged line.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            step = row["step"]
            if not isinstance(step, int):
                raise TypeError(f"step is {step!r}, no whole number")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: damaged ({error}): {line[:60]!r}") from error
        while rows and rows[-1]["step"] >= step:
            rows.pop()
        rows.append(row)
    return rows


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and rename it: a kill in between costs nothing that was there.

    A draft that a writer who died has left is written over; an error, as of a full disk, leaves
    none.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class JsonlLogger:
    """Writes one JSON object per step to a file, which has it when `log` returns.

    Example: `JsonlLogger(path).log({"train/loss": 0.5}, step=7)`, and `read_metrics(path)`.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        # A run that is resumed writes again what the interrupted one had written past its
        # checkpoint: those lines go, or the file would tell of the same step twice.
        kept = [row for row in read_metrics(path) if first_step and row["step"] <= first_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append a line."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


TENSORBOARD_DIRECTORY = "tensorboard"


class TensorBoardLogger:
    """Writes TensorBoard scalars. Example: `tensorboard --logdir runs`."""

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides events at and after the purge step that an interrupted run left.
        purge = first_step + 1 if first_step else None
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write every metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and end the writer's thread."""
        self._writer.close()


class WandbLogger:
    """Writes to a run of Weights & Biases that has the directory's name.

    Project, entity and mode are those of the environment (`WANDB_PROJECT`, `WANDB_ENTITY`,
    `WANDB_MODE=offline`); credentials are those of `wandb login`. Charts are over `step`, which may
    go back in a resumed run, since that writes some steps again.
    Example: `WandbLogger(Path("runs/a"), project="grpo")`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        first_step: int = 0,
        project: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a run; with a `first_step` above 0, continue the run of that directory.

        Errors: `ModuleNotFoundError` without wandb; those of wandb if the server refuses.
        """
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}; pip install wandb, or take wandb out of the loggers"
            ) from error
        kept = directory / "wandb-run-id"
        run_id = kept.read_text(encoding="utf-8").strip() if first_step and kept.exists() else None
        self._run: Any = wandb.init(
            project=project,
            dir=str(directory),
            name=directory.resolve().name,
            config=dict(config or {}),
            id=run_id,
            resume="allow" if run_id else None,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        kept.write_text(f"{self._run.id}\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Hand the metrics to the run, which uploads them by itself."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Upload the rest and end the run."""
        self._run.finish()


def logger_factories(
    names: Sequence[str], directory: Path, *, first_step: int = 0
) -> list[Callable[[], Logger]]:
    """Return functions that make the named loggers, to give to `Loggers`.

    A name is `"jsonl"`, `"tensorboard"`, `"wandb"` or `"package.module:name"`, whose callable gets
    the directory and `first_step`, the step from which a resumed run goes on. No logger is built
    yet. Errors: `SettingsError` for a name that is unknown, or whose package is missing.
    Example: `Loggers(logger_factories(["jsonl", "wandb"], out), threaded=True)`.
    """
    known: Mapping[str, tuple[Callable[..., Logger], Path]] = {
        "jsonl": (JsonlLogger, directory / METRICS_FILE),
        "tensorboard": (TensorBoardLogger, directory / TENSORBOARD_DIRECTORY),
        "wandb": (WandbLogger, directory),
    }
    found: list[Callable[[], Logger]] = []
    for name in names:
        if name in ("tensorboard", "wandb") and importlib.util.find_spec(name) is None:
            raise SettingsError(
                f"loggers has {name!r}, and {name} is not installed; pip install {name}, or take "
                "it out"
            )
        make, place = known[name] if name in known else (_imported(name), directory)
        found.append(functools.partial(make, place, first_step=first_step))
    return found


def _imported(path: str) -> Callable[..., Logger]:
    module_name, colon, name = path.partition(":")
    if not colon:
        raise SettingsError(
            f"loggers has {path!r}; allowed: jsonl, tensorboard, wandb, and package.module:callable"
        )
    if str(Path.cwd()) not in sys.path:  # a console script does not look there
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SettingsError(f"loggers has {path!r}; {error}") from error
    make: Callable[..., Logger] | None = getattr(module, name, None)
    if make is None or not callable(make):
        raise SettingsError(f"loggers has {path!r}; {module_name} has no callable {name!r}")
    return make
