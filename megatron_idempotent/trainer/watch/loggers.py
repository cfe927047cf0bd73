"""The places that a run's metrics go to: the JSONL file, TensorBoard, loggers, the terminal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from megatron_idempotent.controller.errors import SettingsError
from megatron_idempotent.controller.protocol import Logger
from megatron_idempotent.controller.watch.backends import (
    TENSORBOARD_DIRECTORY,
    TensorBoardLogger,
    logger_factories,
)
from megatron_idempotent.controller.watch.loggers import Loggers
from megatron_idempotent.controller.watch.rows import METRICS_FILE, JsonlLogger
from megatron_idempotent.trainer import saved
from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.errors import ConfigError
from megatron_idempotent.trainer.job import Job


def make_loggers(job: Job, *shown: Logger, threaded: bool) -> Loggers:
    """The files of the run, the loggers that the configuration names, and what is `shown`.

    TensorBoard is left out where it is not installed, with a warning.
    """
    first = saved.rollouts_of(job.resume_from) if job.resume_from is not None else 0
    events = job.out / TENSORBOARD_DIRECTORY
    made: list[Logger | Callable[[], Logger]] = [
        functools.partial(JsonlLogger, job.out / METRICS_FILE, first_step=first),
        functools.partial(TensorBoardLogger, events, first_step=first),
        *named_loggers(job.config, job.out, first_step=first),
        *shown,
    ]
    return Loggers(made, threaded=threaded)


def named_loggers(config: Config, out: Path, *, first_step: int = 0) -> list[Callable[[], Logger]]:
    """Makes controller.loggers. Errors: `ConfigError` for one that cannot be built."""
    names = [name.strip() for name in config.controller.loggers.split(",") if name.strip()]
    try:
        return logger_factories(names, out, first_step=first_step)
    except SettingsError as error:
        raise ConfigError(f"controller.loggers: {error}") from error
