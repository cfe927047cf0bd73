"""Shows a run with loggers, a progress bar, two curves and a final table."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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

from . import checkpoint_dir
from .config import Config, ConfigError
from .output import Job

CURVES_FILE = "curves.png"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Describes a run in seven numbers.

    Example: `Summary(rollouts=110, first_held_out=0.04, last_held_out=0.96, ...)`.
    """

    rollouts: int
    """Number of rollouts; of optimizer steps in an asynchronous run."""
    first_held_out: float
    """Mean reward on held-out prompts in the first evaluation, from 0 to 1."""
    last_held_out: float
    """Mean reward on held-out prompts in the last evaluation."""
    best_held_out: float
    """Highest mean reward on held-out prompts of all evaluations."""
    seconds: float
    """Seconds of all rollouts, without the set-up."""
    tokens_per_s: float
    """Response tokens per second."""
    positions_per_token: float
    """Positions computed in training for each response token that counts; 0 if unknown."""


def summarize(rows: Sequence[dict[str, Any]]) -> Summary:
    """Summarize the rows of a metrics file, at least one of which has an evaluation.

    A resumed run counts as a whole.
    """
    held_out = [row[HELD_OUT] for row in rows if HELD_OUT in row]
    trained = [row for row in rows if REWARD in row]
    seconds = sum(row[TOTAL_S] for row in trained)
    tokens = sum(row[TOKENS_PER_S] * row[TOTAL_S] for row in trained)
    return Summary(
        rollouts=len(trained),
        first_held_out=held_out[0],
        last_held_out=held_out[-1],
        best_held_out=max(held_out),
        seconds=seconds,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        positions_per_token=sum(row.get(POSITIONS, 0.0) for row in trained) / (tokens or 1.0),
    )


def print_summary(summary: Summary, out: Path) -> None:
    """Print the table at the end of a run, on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, title=str(out))
    for name, value in (
        ("rollouts", str(summary.rollouts)),
        ("held-out reward at the start", f"{summary.first_held_out:.3f}"),
        ("held-out reward at the end", f"{summary.last_held_out:.3f}"),
        ("best held-out reward", f"{summary.best_held_out:.3f}"),
        ("time, set-up aside", f"{summary.seconds:.1f} s"),
        ("response tokens per second", f"{summary.tokens_per_s:.0f}"),
        ("positions computed per token", f"{summary.positions_per_token:.2f}"),
    ):
        table.add_row(name, value)
    Console().print(table)


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, *, step: str) -> None:
    """Draw reward and loss over steps as a PNG; `step` names their unit, such as "rollout".

    At least one row has to have an evaluation.
    """
    # The object interface: pyplot would look for a display and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    reward_axes, loss_axes = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": (5, 3)}
    )
    for axes in (reward_axes, loss_axes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    reward_axes.plot(
        *_column(rows, REWARD), label="training prompts", linewidth=1, color="tab:blue", alpha=0.7
    )
    steps, held_out = _column(rows, HELD_OUT)
    reward_axes.plot(
        steps, held_out, "o-", label="held-out prompts", markersize=4, color="tab:orange"
    )
    for place in (0, -1):
        reward_axes.annotate(
            f"{held_out[place]:.2f}",
            (steps[place], held_out[place]),
            xytext=(0, -14 if held_out[place] > 0.5 else 7),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    reward_axes.set(ylabel="mean reward", ylim=(0, 1.02))
    reward_axes.legend(loc="lower right", frameon=False)
    loss_axes.plot(*_column(rows, LOSS), linewidth=1, color="tab:blue", alpha=0.7)
    loss_axes.set(ylabel="loss per token", xlabel=step)
    figure.align_ylabels()
    figure.savefig(path, dpi=110)


def _column(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in found], [value for _, value in found]


def make_loggers(job: Job, *shown: Logger, threaded: bool) -> Loggers:
    """Make the loggers of a run: its files, those that the configuration names, and `shown`.

    TensorBoard is left out, with a warning, if it is not installed.
    """
    first = checkpoint_dir.rollouts_of(job.resume_from) if job.resume_from is not None else 0
    events = job.out / TENSORBOARD_DIRECTORY
    made: list[Logger | Callable[[], Logger]] = [
        functools.partial(JsonlLogger, job.out / METRICS_FILE, first_step=first),
        functools.partial(TensorBoardLogger, events, first_step=first),
        *named_loggers(job.config, job.out, first_step=first),
        *shown,
    ]
    return Loggers(made, threaded=threaded)


def named_loggers(config: Config, out: Path, *, first_step: int = 0) -> list[Callable[[], Logger]]:
    """Return functions that make the loggers in `controller.loggers`. Errors: `ConfigError`."""
    names = [name.strip() for name in config.controller.loggers.split(",") if name.strip()]
    try:
        return logger_factories(names, out, first_step=first_step)
    except SettingsError as error:
        raise ConfigError(f"controller.loggers: {error}") from error


def make_progress(config: Config, *, first_rollout: int, terminal: IO[str]) -> Logger:
    """Return a progress bar if `terminal` is a terminal, else a printer of lines."""
    if terminal.isatty():
        return ProgressBar(config.run.rollouts, first_rollout, terminal)
    return ProgressLines(config.run.rollouts, config.evaluation.every, terminal)


def describe(metrics: Mapping[str, float], held_out: float) -> str:
    """Return the main numbers of one rollout in one line."""
    return (
        f"reward {metrics[REWARD]:.3f}  held-out {held_out:.3f}  loss {metrics[LOSS]:+.4f}  "
        f"grad norm {metrics[GRAD_NORM]:.2f}  {metrics[TOKENS_PER_S]:.0f} tokens/s"
    )


class ProgressBar:
    """Draws a progress bar with rich, on rank 0."""

    def __init__(self, rollouts: int, first_rollout: int, terminal: IO[str]) -> None:
        self._held_out = float("nan")
        self._progress = Progress(
            # Together no wider than 80 columns: rich would squeeze a column to nothing.
            MofNCompleteColumn(),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=Console(file=terminal),
            # Drawn when there is something new: a thread would take a core from the ranks.
            auto_refresh=False,
            # These would swallow what Megatron prints to the log file.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task(
            "train", total=rollouts, completed=first_rollout, numbers=""
        )
        self._progress.start()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Move the bar to `step`, and show the numbers."""
        self._held_out = metrics.get(HELD_OUT, self._held_out)
        if REWARD in metrics:
            numbers = (
                f"reward {metrics[REWARD]:.2f} held-out {self._held_out:.2f} "
                f"loss {metrics[LOSS]:+.2f} grad {metrics[GRAD_NORM]:.1f} "
                f"{metrics[TOKENS_PER_S]:.0f} tok/s"
            )
            self._progress.update(self._task, completed=step, numbers=numbers)
        self._progress.refresh()

    def close(self) -> None:
        """Leave the last state on the screen, and give the cursor back."""
        self._progress.stop()


class ProgressLines:
    """Prints a line per evaluation, for files and pipes."""

    def __init__(self, rollouts: int, every: int, terminal: IO[str]) -> None:
        self._rollouts = rollouts
        self._every = every
        self._terminal = terminal

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Print a line if the row has a held-out reward."""
        if HELD_OUT not in metrics:
            return
        told = f"held-out {metrics[HELD_OUT]:.3f}"
        if REWARD in metrics:
            told = describe(metrics, metrics[HELD_OUT])
        print(f"rollout {step}/{self._rollouts}  {told}", file=self._terminal, flush=True)

    def close(self) -> None:
        """Do nothing."""
