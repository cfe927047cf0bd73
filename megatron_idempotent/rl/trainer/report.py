"""Reports a run with loggers, two curves and a final table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_idempotent.rl.metrics import loggers as metric_loggers
from megatron_idempotent.rl.metrics import names
from megatron_idempotent.rl.metrics.loggers import Logger, Loggers

from .config import Config
from .output import Job, rollouts_of

CURVES_FILE = "curves.png"


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return seven numbers about a run, by name, from the rows of its metrics file, such as the
    best held-out reward and tokens per second. One row or more must have an evaluation.

    A resumed run counts as one run. Set-up time does not count.
    """
    held_out = [row[names.HELD_OUT] for row in rows if names.HELD_OUT in row]
    trained = [row for row in rows if names.REWARD in row]
    seconds = sum(row[names.TOTAL_S] for row in trained)
    tokens = sum(row[names.TOKENS_PER_S] * row[names.TOTAL_S] for row in trained)
    return {
        "rollouts": len(trained),
        "held-out reward at the start": held_out[0],
        "held-out reward at the end": held_out[-1],
        "best held-out reward": max(held_out),
        "seconds, set-up aside": seconds,
        "response tokens per second": tokens / (seconds or 1.0),
        "positions computed per token": sum(row.get(names.POSITIONS, 0.0) for row in trained)
        / (tokens or 1.0),
    }


def print_summary(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Print the final table of a run, the numbers of `summarize`, to standard output."""
    table = Table(show_header=False, title=str(out))
    for name, value in summarize(rows).items():
        table.add_row(name, f"{value:.3f}".removesuffix(".000"))
    Console().print(table)


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, *, step: str) -> Any:
    """Draw reward and loss over steps to a PNG file; `step` names the unit, such as "rollout".

    At least one row must have an evaluation. Returns matplotlib's figure.
    """
    # Not pyplot, which needs a display and keeps figures alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    reward_axes, loss_axes = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": (5, 3)}
    )

    def plot(axes: Any, name: str, style: str, **options: Any) -> None:
        with_value = [row for row in rows if name in row]
        steps, values = ([row[key] for row in with_value] for key in ("step", name))
        axes.plot(steps, values, style, **options)

    plot(reward_axes, names.REWARD, "-", label="training prompts", linewidth=1, alpha=0.7)
    plot(reward_axes, names.HELD_OUT, "o-", label="held-out prompts", markersize=4)
    plot(loss_axes, names.LOSS, "-", linewidth=1, alpha=0.7)
    for axes in (reward_axes, loss_axes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    reward_axes.set(ylabel="mean reward", ylim=(0, 1.02))
    # Above the axes, where there are no lines.
    reward_axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=2, frameon=False
    )
    loss_axes.set(ylabel="loss per token", xlabel=step)
    figure.savefig(path, dpi=110)
    return figure


def make_loggers(job: Job, display: Logger | None, *, threaded: bool) -> Loggers:
    """Make the loggers of a run: its metrics file, TensorBoard, the configured loggers, and
    `display`, which shows the run to the user.

    If TensorBoard is not installed, its logger is dropped with a warning.
    """
    first = rollouts_of(job.resume_from) if job.resume_from is not None else 0
    events = job.out / metric_loggers.TENSORBOARD_DIRECTORY
    loggers: list[Logger | Callable[[], Logger]] = [
        *metric_loggers.logger_factories(["jsonl"], job.out, first_step=first),
        functools.partial(metric_loggers.TensorBoardLogger, events, first_step=first),
        *named_loggers(job.config, job.out, first_step=first),
    ]
    if display is not None:
        loggers.append(display)
    return Loggers(loggers, threaded=threaded)


def named_loggers(config: Config, out: Path, *, first_step: int = 0) -> list[Callable[[], Logger]]:
    """Return a factory for each logger that `controller.loggers` names.

    Raises:
        SettingsError: a logger is unknown, or its package is not installed.
    """
    loggers = [name.strip() for name in config.controller.loggers.split(",") if name.strip()]
    return metric_loggers.logger_factories(loggers, out, first_step=first_step)
