"""The bar on a terminal, or a line now and then where the output is a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_idempotent.controller.protocol import Logger
from megatron_idempotent.trainer.config import Config
from megatron_idempotent.trainer.names import GRAD_NORM, HELD_OUT, LOSS, REWARD, TOKENS_PER_S


def make_progress(config: Config, *, first_rollout: int, terminal: IO[str]) -> Logger:
    """A bar where `terminal` is one, lines otherwise."""
    if terminal.isatty():
        return ProgressBar(config.run.rollouts, first_rollout, terminal)
    return ProgressLines(config.run.rollouts, config.evaluation.every, terminal)


def describe(metrics: Mapping[str, float], held_out: float) -> str:
    """The numbers of one rollout, for a line of a log."""
    return (
        f"reward {metrics[REWARD]:.3f}  held-out {held_out:.3f}  loss {metrics[LOSS]:+.4f}  "
        f"grad norm {metrics[GRAD_NORM]:.2f}  {metrics[TOKENS_PER_S]:.0f} tokens/s"
    )


class ProgressBar:
    """A rich progress bar, drawn by rank 0 itself."""

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
        """Move the bar."""
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
        """Leave the last state on the screen and give the cursor back."""
        self._progress.stop()


class ProgressLines:
    """One line per evaluation, for logs and pipes."""

    def __init__(self, rollouts: int, every: int, terminal: IO[str]) -> None:
        self._rollouts = rollouts
        self._every = every
        self._terminal = terminal

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Print where there is a held-out reward to tell."""
        if HELD_OUT not in metrics:
            return
        told = f"held-out {metrics[HELD_OUT]:.3f}"
        if REWARD in metrics:
            told = describe(metrics, metrics[HELD_OUT])
        print(f"rollout {step}/{self._rollouts}  {told}", file=self._terminal, flush=True)

    def close(self) -> None:
        """Nothing is held."""
