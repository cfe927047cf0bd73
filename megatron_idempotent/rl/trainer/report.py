"""Reports a run with loggers, its progress, two curves and a final table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from megatron_idempotent.rl.metrics.console import live_table
from megatron_idempotent.rl.metrics.loggers import (
    METRICS_FILE,
    TENSORBOARD_DIRECTORY,
    JsonlLogger,
    Logger,
    Loggers,
    SettingsError,
    TensorBoardLogger,
    logger_factories,
)
from megatron_idempotent.rl.metrics.names import (
    GRAD_NORM,
    HELD_OUT,
    LOSS,
    POSITIONS,
    REWARD,
    TOKENS_PER_S,
    TOTAL_S,
)

from . import ConfigError
from .config import Config
from .output import Job, rollouts_of

CURVES_FILE = "curves.png"


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Summarize a metrics file, with at least one evaluation, in seven numbers.

    A resumed run counts as one run. Set-up time does not count.
    """
    held_out = [row[HELD_OUT] for row in rows if HELD_OUT in row]
    trained = [row for row in rows if REWARD in row]
    seconds = sum(row[TOTAL_S] for row in trained)
    tokens = sum(row[TOKENS_PER_S] * row[TOTAL_S] for row in trained)
    return {
        "rollouts": len(trained),
        "held-out reward at the start": held_out[0],
        "held-out reward at the end": held_out[-1],
        "best held-out reward": max(held_out),
        "seconds, set-up aside": seconds,
        "response tokens per second": tokens / (seconds or 1.0),
        "positions computed per token": sum(row.get(POSITIONS, 0.0) for row in trained)
        / (tokens or 1.0),
    }


def print_summary(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Print the final table of a run, the numbers of `summarize`, to standard output."""
    table = Table(show_header=False, title=str(out))
    for name, value in summarize(rows).items():
        table.add_row(name, f"{value:.3f}".removesuffix(".000"))
    Console().print(table)


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, *, step: str) -> Any:
    """Draw reward and loss over steps as a PNG; `step` names their unit, such as "rollout".

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

    plot(reward_axes, REWARD, "-", label="training prompts", linewidth=1, alpha=0.7)
    plot(reward_axes, HELD_OUT, "o-", label="held-out prompts", markersize=4)
    plot(loss_axes, LOSS, "-", linewidth=1, alpha=0.7)
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


def make_loggers(job: Job, *displays: Logger, threaded: bool) -> Loggers:
    """Make the loggers of a run: its files, the configured loggers, and `displays`.

    If TensorBoard is not installed, its logger is dropped with a warning.
    """
    first = rollouts_of(job.resume_from) if job.resume_from is not None else 0
    events = job.out / TENSORBOARD_DIRECTORY
    loggers: list[Logger | Callable[[], Logger]] = [
        functools.partial(JsonlLogger, job.out / METRICS_FILE, first_step=first),
        functools.partial(TensorBoardLogger, events, first_step=first),
        *named_loggers(job.config, job.out, first_step=first),
        *displays,
    ]
    return Loggers(loggers, threaded=threaded)


def named_loggers(config: Config, out: Path, *, first_step: int = 0) -> list[Callable[[], Logger]]:
    """Return factories of the loggers in `controller.loggers`.

    Raises:
        ConfigError: a logger is unknown, or its package is not installed.
    """
    names = [name.strip() for name in config.controller.loggers.split(",") if name.strip()]
    try:
        return logger_factories(names, out, first_step=first_step)
    except SettingsError as error:
        raise ConfigError(f"controller.loggers: {error}") from error


class RolloutProgress:
    """Shows a synchronous run on rank 0: a table on a terminal, otherwise a line per evaluation.

    Example: `RolloutProgress(config, terminal=sys.stderr)`.
    """

    def __init__(self, config: Config, *, terminal: IO[str]) -> None:
        self._rollouts, self._terminal = config.run.rollouts, terminal
        self._table = live_table(terminal)
        self._held_out = float("nan")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Draw the table, or print a line if the row has a held-out reward."""
        self._held_out = metrics.get(HELD_OUT, self._held_out)
        texts = {"rollout": f"{step}/{self._rollouts}"}
        if REWARD in metrics:
            texts["reward"] = f"{metrics[REWARD]:.3f}"
        texts["held-out"] = f"{self._held_out:.3f}"
        if REWARD in metrics:
            texts |= {"loss": f"{metrics[LOSS]:+.3f}", "grad": f"{metrics[GRAD_NORM]:.1f}"}
            texts["speed"] = f"{metrics[TOKENS_PER_S]:.0f} tok/s"
        if self._table is not None:
            left_s = (self._rollouts - step) * metrics.get(TOTAL_S, 0.0)
            self._table.draw(texts | {"left": f"{left_s / 60:.0f} min"})
        elif HELD_OUT in metrics:
            line = " ".join(f"{name} {text}" for name, text in texts.items())
            print(line, file=self._terminal, flush=True)

    def close(self) -> None:
        """Leave the last table on the screen, and restore the cursor."""
        if self._table is not None:
            self._table.close()
