"""Where metrics go: the JSONL file, TensorBoard events, the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megatron_idempotent.trainer.job import Job
from megatron_idempotent.trainer.parts import Logger
from megatron_idempotent.trainer.watch.progress import make_progress
from megatron_idempotent.trainer.watch.rows import METRICS_FILE, JsonlLogger


class Loggers:
    """Several loggers as one. A logger that raises is dropped, with a warning, and never called
    again: a full disk must not cost the training. Example: `Loggers([JsonlLogger(path)])`.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = list(loggers)

    def log(self, metrics: Mapping[str, float], *, rollout: int) -> None:
        """Hand the metrics to every logger that still works."""
        for logger in tuple(self._loggers):
            with _DroppedIfItRaises(logger, self._loggers):
                logger.log(metrics, rollout=rollout)

    def close(self) -> None:
        """Close every logger that still works."""
        for logger in tuple(self._loggers):
            with _DroppedIfItRaises(logger, self._loggers):
                logger.close()


class _DroppedIfItRaises:
    """Takes a logger off the list when it raises, whatever it raises short of an interrupt."""

    def __init__(self, logger: Logger, loggers: list[Logger]) -> None:
        self._logger = logger
        self._loggers = loggers

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if exc_type is None or not issubclass(exc_type, Exception):
            return False
        name = type(self._logger).__name__
        # Printed and not raised: stderr is the rank's log file, where it can be found later.
        print(f"{name} failed and is dropped: {exc_type.__name__}: {exc}", file=sys.stderr)
        self._loggers.remove(self._logger)
        return True


class TensorBoardLogger:
    """TensorBoard scalars, one step per rollout. Example: `tensorboard --logdir runs`."""

    def __init__(self, directory: Path, *, first_rollout: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides events at and behind the purge step that an interrupted run left.
        purge = first_rollout + 1 if first_rollout else None
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge)

    def log(self, metrics: Mapping[str, float], *, rollout: int) -> None:
        """Write every metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, rollout)

    def close(self) -> None:
        """Flush and end the writer's thread."""
        self._writer.close()


def make_loggers(job: Job, *, first_rollout: int, terminal: IO[str]) -> Loggers:
    """The loggers of rank 0. One that cannot even be built is left out, with a warning."""
    loggers: list[Logger] = [JsonlLogger(job.out / METRICS_FILE, first_rollout=first_rollout)]
    try:
        loggers.append(TensorBoardLogger(job.out / "tensorboard", first_rollout=first_rollout))
    except ModuleNotFoundError as error:
        print(f"no TensorBoard events: {error}", file=sys.stderr)
    if not job.quiet:
        loggers.append(make_progress(job.config, first_rollout=first_rollout, terminal=terminal))
    return Loggers(loggers)
