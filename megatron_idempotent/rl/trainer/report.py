"""Reports a run with loggers, a progress bar, two curves and a final table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

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
    BYTES_SENT,
    BYTES_WHOLE,
    CHANGED,
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


def print_summary(summary: Mapping[str, float], out: Path) -> None:
    """Print the final table of a run to standard output."""
    table = Table(show_header=False, title=str(out))
    for name, value in summary.items():
        table.add_row(name, f"{value:.3f}".removesuffix(".000"))
    Console().print(table)


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, *, step: str) -> Any:
    """Draw reward and loss over steps as a PNG; `step` names their unit, such as "rollout".

    With deltas, a third panel shows the sent elements and bytes. At least one row must have an
    evaluation. Returns matplotlib's figure.
    """
    # Not pyplot, which needs a display and keeps figures alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sent = [
        {"step": row["step"], CHANGED: 100 * row[CHANGED], BYTES_SENT: 100 * share}
        for row in rows
        if BYTES_WHOLE in row and (share := row[BYTES_SENT] / row[BYTES_WHOLE])
    ]
    heights = (5, 3, 3) if any(row[BYTES_SENT] < 100 for row in sent) else (5, 3)
    figure = Figure(figsize=(8, 0.6 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    reward_axes, loss_axes, *sent_axes = figure.subplots(
        len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights}
    )
    for axes in (reward_axes, loss_axes, *sent_axes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    reward_axes.plot(
        *_column(rows, REWARD), label="training prompts", linewidth=1, color="tab:blue", alpha=0.7
    )
    steps, held_out = _column(rows, HELD_OUT)
    reward_axes.plot(
        steps, held_out, "o-", label="held-out prompts", markersize=4, color="tab:orange"
    )
    for index in (0, -1):
        reward_axes.annotate(
            f"{held_out[index]:.2f}",
            (steps[index], held_out[index]),
            xytext=(0, -14 if held_out[index] > 0.5 else 7),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    reward_axes.set(ylabel="mean reward", ylim=(0, 1.02))
    loss_axes.plot(*_column(rows, LOSS), linewidth=1, color="tab:blue", alpha=0.7)
    loss_axes.set(ylabel="loss per token")
    for axes in sent_axes:
        for name, label in ((CHANGED, "elements sent"), (BYTES_SENT, "bytes sent")):
            axes.plot(*_column(sent, name), label=label, linewidth=1, alpha=0.7)
        axes.set(ylabel="% of the model", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
    for axes in (reward_axes, *sent_axes):
        # Above the axes, where there are no lines.
        axes.legend(
            loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, ncols=2, frameon=False
        )
    figure.axes[-1].set_xlabel(step)
    figure.align_ylabels()
    figure.savefig(path, dpi=110)
    return figure


def _column(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]


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
    """Shows a synchronous run on rank 0: a bar on a terminal, otherwise a line per evaluation.

    Example: `RolloutProgress(config, first_rollout=0, terminal=sys.stderr)`.
    """

    def __init__(self, config: Config, *, first_rollout: int, terminal: IO[str]) -> None:
        self._rollouts, self._terminal = config.run.rollouts, terminal
        self._held_out = float("nan")
        self._bar: Progress | None = None
        if not terminal.isatty():
            return
        self._bar = Progress(
            # At most 80 columns in total, else rich would shrink a column to nothing.
            MofNCompleteColumn(),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=Console(file=terminal),
            # Drawn by `log` only: a refresh thread would take a core from the ranks.
            auto_refresh=False,
            # These would swallow what Megatron prints to the log file.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._bar.add_task("train", total=self._rollouts, completed=first_rollout, numbers="")
        self._bar.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Move the bar to `step`, or print a line if the row has a held-out reward."""
        self._held_out = metrics.get(HELD_OUT, self._held_out)
        digits = 3 if self._bar is None else 2
        numbers = f"held-out {self._held_out:.{digits}f}"
        if REWARD in metrics:
            numbers = (
                f"reward {metrics[REWARD]:.{digits}f} {numbers} loss {metrics[LOSS]:+.{digits}f} "
                f"grad {metrics[GRAD_NORM]:.1f} {metrics[TOKENS_PER_S]:.0f} tok/s"
            )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, numbers=numbers, refresh=True)
        elif HELD_OUT in metrics:
            print(f"rollout {step}/{self._rollouts} {numbers}", file=self._terminal, flush=True)

    def close(self) -> None:
        """Stop the bar, leaving its last state on the screen, and restore the cursor."""
        if self._bar is not None:
            self._bar.stop()
