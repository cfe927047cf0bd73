"""Defines loggers: JSON lines, TensorBoard, W&B, and a group of loggers that never raises."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron_idempotent.json_text import parse_json


class SettingsError(ValueError):
    """A setting is invalid; the message has its name, its value and the allowed values."""


class Logger(Protocol):
    """The protocol of a logger, which records the metrics of each step of a run."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record metrics by name. `step` is the weight version that the step made or, in a
        synchronous run, the number of completed rollouts. Training continues if this method raises.
        """

    def close(self) -> None:
        """Write the records that are still buffered, and release all resources."""


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
            queued: the most calls that wait for the thread; further records are discarded and
                counted in `left_out`.
            close_timeout_s: the most seconds that `close` waits for the thread.
            lent: True if `close` must leave the loggers open.
        """
        self.working: list[Logger] = []
        """The loggers that were built and have not raised."""
        self.left_out = 0
        """The number of discarded records: the queue was full, or it was closed."""
        self._queued, self._close_timeout_s, self._lent = queued, close_timeout_s, lent
        self._closed = False
        # Unbounded, with a check in `log`: the last call must fit even when it is full.
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            # A daemon: a logger that hangs must not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="loggers", daemon=True)
            self._thread.start()
        self._do(self._with_each, list(loggers), self._build)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Pass metrics to every logger that has not failed. With `threaded`, the background thread
        does that later; if its queue is full, the metrics are discarded.

        After `close` they are discarded.
        """
        if not self._closed and self._calls.qsize() < self._queued:
            self._do(self._call_all, "log", dict(metrics), step=step)
            return
        if not (self._closed or self.left_out):
            _warn(f"loggers have {self._queued} records waiting; further ones are left out")
        self.left_out += 1

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait up to `timeout_s` seconds until the background thread has passed all queued metrics
        to the loggers. Return True if it has, or if there is no such thread.
        """
        if self._thread is None or not self._thread.is_alive():
            return True
        reached = threading.Event()
        self._calls.put(reached.set)
        return reached.wait(timeout_s)

    def close(self) -> None:
        """Pass the queued metrics to the loggers, then close every logger that has not failed; with
        `lent`, leave the loggers open. A second call is a no-op.

        With a thread it blocks for up to `close_timeout_s` seconds: do not call it in the thread of
        an event loop.
        """
        if self._closed:
            return
        self._closed = True
        if not self._lent:
            self._do(self._call_all, "close")
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(self._close_timeout_s)
            if self._thread.is_alive():
                _warn(
                    f"loggers did not end in {self._close_timeout_s:g} s, with up to "
                    f"{self._calls.qsize()} records still queued; they are dropped"
                )
        if self.left_out:
            _warn(f"{self.left_out} records of metrics were left out")

    def _do(self, function: Callable[..., None], *args: Any, **options: Any) -> None:
        if self._thread is None:
            function(*args, **options)
        else:
            self._calls.put(functools.partial(function, *args, **options))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _build(self, factory: Any) -> None:
        # A logger class also has an attribute `log`, but is a factory.
        ready = hasattr(factory, "log") and not isinstance(factory, type)
        self.working.append(factory if ready else factory())

    def _call_all(self, method: str, *args: Any, **options: Any) -> None:
        self._with_each(self.working, lambda logger: getattr(logger, method)(*args, **options))

    def _with_each(self, loggers: Sequence[Any], call: Callable[[Any], object]) -> None:
        """Call a function with each logger; if it raises for one, drop that logger with a
        warning.
        """
        for logger in tuple(loggers):
            try:
                call(logger)
            except Exception as error:  # noqa: BLE001 (a logger must not end the training)
                factory = logger.func if isinstance(logger, functools.partial) else logger
                name = getattr(factory, "__qualname__", type(factory).__name__)
                _warn(f"{name} failed and is dropped: {type(error).__name__}: {error}")
                self.working = [working for working in self.working if working is not logger]


def _warn(text: str) -> None:
    print(text, file=sys.stderr)  # stderr is the run's log file


METRICS_FILE = "metrics.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's `metrics.jsonl`, by ascending step; [] if there is no file. A row
    removes all earlier rows of the same or a later step: a resumed run, or one that lost ranks,
    repeats steps.

    A truncated last line is ignored. `null` is read as NaN.

    Raises:
        ValueError: a line is damaged; the message has its number.
    """
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            row = {name: math.nan if value is None else value for name, value in row.items()}
            step = row["step"]
            if not isinstance(step, int):
                raise TypeError(f"step is {step!r}, no whole number")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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
    """Appends the metrics of each step to a file, as one JSON object per line, and flushes the
    file.

    Numbers that JSON does not have, such as NaN, are written as `null`.
    Example: `JsonlLogger(path).log({"train/loss": 0.5}, step=7)`, and `read_metrics(path)`.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        # A resumed run logs the steps after its checkpoint again, so their old rows are removed.
        rows = [row for row in read_metrics(path) if first_step and row["step"] <= first_step]
        write_whole(path, "".join(map(self._line, rows)))
        self._file = path.open("a", encoding="utf-8")

    @staticmethod
    def _line(row: Mapping[str, Any]) -> str:
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        return json.dumps(finite) + "\n"

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append a line with the step and its metrics to the file."""
        self._file.write(self._line({"step": step, **metrics}))
        self._file.flush()

    def close(self) -> None:
        """Close the metrics file."""
        self._file.close()


TENSORBOARD_DIRECTORY = "tensorboard"


class TensorBoardLogger:
    """Writes the metrics of each step as TensorBoard scalars.
    Example: `tensorboard --logdir runs`.
    """

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides earlier events at and after the purge step.
        purge = first_step + 1 if first_step else None
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write every metric of a step as a TensorBoard scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write all pending events, and end the writer's thread."""
        self._writer.close()


class WandbLogger:
    """Logs the metrics of each step to a run in Weights & Biases, which gets the name of the output
    directory.

    Project, entity and mode come from the environment (`WANDB_PROJECT`, `WANDB_ENTITY`,
    `WANDB_MODE=offline`), and credentials from `wandb login`. The x-axis of charts is `step`, which
    may go back in a resumed run, because that repeats some steps.

    Example: `WandbLogger(Path("runs/a"))`.
    """

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        """Start a run in Weights & Biases, and write its id to the directory. With a `first_step`
        above 0, continue the run whose id is already there, if any.

        Raises:
            ModuleNotFoundError: wandb is not installed.
            Exception: wandb's error, such as for a server that rejects the run.
        """
        import wandb

        id_file = directory / "wandb-run-id"
        resumed = first_step and id_file.exists()
        self._run: Any = wandb.init(
            dir=str(directory),
            name=directory.resolve().name,
            id=id_file.read_text(encoding="utf-8").strip() if resumed else None,
            resume="allow" if resumed else None,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        id_file.write_text(f"{self._run.id}\n", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Pass a step's metrics to the run of Weights & Biases, which uploads them in the
        background.
        """
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Finish the upload, and end the run of Weights & Biases."""
        self._run.finish()


_BUILT_IN: Mapping[str, tuple[Callable[..., Logger], str]] = {
    "jsonl": (JsonlLogger, METRICS_FILE),
    "tensorboard": (TensorBoardLogger, TENSORBOARD_DIRECTORY),
    "wandb": (WandbLogger, ""),
}


def logger_factories(
    names: Sequence[str], directory: Path, *, first_step: int = 0
) -> list[Callable[[], Logger]]:
    """Return a list with a function for each logger in `names`, which makes the logger when it is
    called; pass the list to `Loggers`.

    A name is `"jsonl"`, `"tensorboard"`, `"wandb"` or `"package.module:callable"`; the callable
    gets the directory and `first_step`, the step from which a resumed run continues.

    Raises:
        SettingsError: a name is unknown, or its package is not installed.

    Example: `Loggers(logger_factories(["jsonl", "wandb"], out), threaded=True)`.
    """
    factories: list[Callable[[], Logger]] = []
    for name in names:
        if name in ("tensorboard", "wandb") and importlib.util.find_spec(name) is None:
            raise SettingsError(
                f"loggers has {name!r}, and {name} is not installed; pip install {name}, or take "
                "it out"
            )
        if name not in _BUILT_IN and ":" not in name:
            allowed = ", ".join(_BUILT_IN)
            raise SettingsError(
                f"loggers has {name!r}; allowed: {allowed}, and package.module:callable"
            )
        make, inside = _BUILT_IN.get(name) or (import_named(name, "loggers"), "")
        factories.append(functools.partial(make, directory / inside, first_step=first_step))
    return factories


def import_named(path: str, setting: str) -> Callable[..., Any]:
    """Import the callable at `package.module:name`, also from the current directory.

    Raises:
        SettingsError: there is no such module or callable; the message begins with `setting`.
    """
    module, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:  # a console script does not have it
        sys.path.insert(0, str(Path.cwd()))
    try:
        value = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"{setting} is {path!r}: {error}; write it as package.module:name, of a module that is "
            "installed or in the current directory"
        ) from error
    if not callable(value):
        raise SettingsError(f"{setting} is {path!r}, a {type(value).__name__}; give a callable")
    return value  # type: ignore[no-any-return]
