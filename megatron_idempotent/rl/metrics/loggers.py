"""Defines loggers: JSON lines, TensorBoard, W&B, and a group of loggers that never raises."""

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
    """A setting is invalid; the message has its name, its value and the allowed values."""


class Logger(Protocol):
    """Records metrics of each optimizer step."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record metrics by name, at version `step`. Training continues if this raises."""

    def close(self) -> None:
        """Flush, and release all resources."""


_Record = tuple[dict[str, float], int]


class Loggers:
    """Passes metrics to several loggers, and drops a logger that raises.

    A dropped logger prints a warning to standard error and is never called again, because a full
    disk must not end the training. Example: `Loggers([lambda: JsonlLogger(path)], threaded=True)`.
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
        """Build the loggers; one that fails to build is dropped with a warning.

        Args:
            loggers: loggers, or functions that make them. Pass functions for loggers that have
                locks or threads, or that are slow to build.
            threaded: True to build and call loggers in a background thread, so that they cannot
                block an event loop.
            queued: the most records that wait for the thread; further ones are discarded and
                counted in `left_out`.
            close_timeout_s: the most seconds that `close` waits for the thread.
            lent: True if `close` must leave the loggers open.
        """
        self._loggers: list[Logger] = []
        self._given = list(loggers)
        self._queued = queued
        self._close_timeout_s = close_timeout_s
        self._lent = lent
        self._left_out = 0
        self._closed = False
        # Unbounded, with a check in `log`: the final record must fit even when it is full.
        self._records: queue.SimpleQueue[_Record | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            # A daemon: a logger that hangs must not keep the process alive.
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
        """The number of discarded records: the queue was full, or it was closed."""
        return self._left_out

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Pass metrics to every working logger; with a thread, without waiting.

        After `close` they are discarded.
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
        """Wait up to `timeout_s` seconds until loggers have all records; return True if they do."""
        if self._thread is None or not self._thread.is_alive():
            return True
        reached = threading.Event()
        self._records.put(reached)
        return reached.wait(timeout_s)

    def close(self) -> None:
        """Pass on the queued records, and close every working logger. A second call is a no-op.

        With a thread it blocks for up to `close_timeout_s` seconds: do not call it in the thread of
        an event loop.
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
        for factory in self._given:
            with self._dropping(factory):
                # A logger class also has an attribute `log`, but is a factory.
                logger: Any = factory
                if isinstance(factory, type) or not hasattr(factory, "log"):
                    logger = logger()
                self._loggers.append(logger)

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
        """Drop a logger with a warning if the block raises any `Exception`."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 (a logger must not end the training)
            # stderr is the run's log file.
            text = f"{type(error).__name__}: {error}"
            print(f"{_name(logger)} failed and is dropped: {text}", file=sys.stderr)
            self._loggers[:] = [
                kept_logger for kept_logger in self._loggers if kept_logger is not logger
            ]


def _name(logger: Any) -> str:
    if isinstance(logger, functools.partial):
        return _name(logger.func)
    return str(getattr(logger, "__qualname__", type(logger).__name__))


METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, oldest first; none if there is no file.

    A truncated last line is ignored, and so are rows of steps that were repeated later because
    ranks were lost.

    Raises:
        ValueError: a line is damaged; the message has its number.
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
    """Write a file atomically: under a temporary name, then renamed.

    A temporary file of an earlier process that died is overwritten. An error, such as a full disk,
    removes the temporary file.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


class JsonlLogger:
    """Appends one JSON object per step to a file, and flushes it.

    Example: `JsonlLogger(path).log({"train/loss": 0.5}, step=7)`, and `read_metrics(path)`.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        # A resumed run logs the steps after its checkpoint again, so their old rows are removed.
        rows = [row for row in read_metrics(path) if first_step and row["step"] <= first_step]
        write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
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

        # TensorBoard hides earlier events at and after the purge step.
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
    """Logs to a run of Weights & Biases with the directory's name.

    Project, entity and mode come from the environment (`WANDB_PROJECT`, `WANDB_ENTITY`,
    `WANDB_MODE=offline`), and credentials from `wandb login`. The x-axis of charts is `step`, which
    may go back in a resumed run, because that repeats some steps.

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
        """Start a run; with a `first_step` above 0, continue the directory's run.

        Raises:
            ModuleNotFoundError: wandb is not installed.
            Exception: wandb's error, such as for a server that rejects the run.
        """
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}; pip install wandb, or take wandb out of the loggers"
            ) from error
        id_file = directory / "wandb-run-id"
        run_id = (
            id_file.read_text(encoding="utf-8").strip() if first_step and id_file.exists() else None
        )
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
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Pass metrics to the run, which uploads them in the background."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Finish the upload, and end the run."""
        self._run.finish()


def logger_factories(
    names: Sequence[str], directory: Path, *, first_step: int = 0
) -> list[Callable[[], Logger]]:
    """Return factories of the named loggers, for `Loggers`.

    A name is `"jsonl"`, `"tensorboard"`, `"wandb"` or `"package.module:callable"`; the callable
    gets the directory and `first_step`, the step from which a resumed run continues.

    Raises:
        SettingsError: a name is unknown, or its package is not installed.

    Example: `Loggers(logger_factories(["jsonl", "wandb"], out), threaded=True)`.
    """
    built_in: Mapping[str, tuple[Callable[..., Logger], Path]] = {
        "jsonl": (JsonlLogger, directory / METRICS_FILE),
        "tensorboard": (TensorBoardLogger, directory / TENSORBOARD_DIRECTORY),
        "wandb": (WandbLogger, directory),
    }
    factories: list[Callable[[], Logger]] = []
    for name in names:
        if name in ("tensorboard", "wandb") and importlib.util.find_spec(name) is None:
            raise SettingsError(
                f"loggers has {name!r}, and {name} is not installed; pip install {name}, or take "
                "it out"
            )
        make, location = built_in[name] if name in built_in else (_imported(name), directory)
        factories.append(functools.partial(make, location, first_step=first_step))
    return factories


def _imported(path: str) -> Callable[..., Logger]:
    module_name, colon, name = path.partition(":")
    if not colon:
        raise SettingsError(
            f"loggers has {path!r}; allowed: jsonl, tensorboard, wandb, and package.module:callable"
        )
    if str(Path.cwd()) not in sys.path:  # a console script does not have it
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SettingsError(f"loggers has {path!r}; {error}") from error
    make: Callable[..., Logger] | None = getattr(module, name, None)
    if make is None or not callable(make):
        raise SettingsError(f"loggers has {path!r}; {module_name} has no callable {name!r}")
    return make
