"""What a person sees of an asynchronous run: logs, the live table, the timeline."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from megatron_idempotent.controller import Logger
from megatron_idempotent.controller.watch.backends import logger_factories
from megatron_idempotent.controller.watch.loggers import Loggers
from megatron_idempotent.controller.watch.table import LiveTable
from megatron_idempotent.controller.watch.timeline import Timeline
from megatron_idempotent.trainer import saved
from megatron_idempotent.trainer.job import Job
from megatron_idempotent.trainer.stream.settings import logger_names

TRACE_FILE = "timeline.json"


def make_loggers(job: Job, table: LiveTable | None) -> Loggers:
    """The files of the run, its table, and whatever else the configuration names.

    Errors: `SettingsError` for a logger that there is none of.
    """
    first = saved.rollouts_of(job.resume_from) if job.resume_from is not None else 0
    names = logger_names(job.config)
    made: list[Logger | Callable[[], Logger]] = [
        *logger_factories(names, job.out, first_step=first)
    ]
    if table is not None:
        made.append(table)
    return Loggers(made, threaded=True)


async def save_timeline(timeline: Timeline, out: Path) -> None:
    """Leave the trace and its picture in the output directory."""
    from megatron_idempotent.controller.watch.chart import TIMELINE_CHART, draw_timeline

    def save() -> None:
        timeline.write(out / TRACE_FILE)
        draw_timeline(timeline, out / TIMELINE_CHART)

    try:
        await asyncio.to_thread(save)
    except OSError as error:
        # The run is over and its weights are written: a full disk must not make it a failure.
        print(f"no timeline: {error}", file=sys.stderr)
