"""Draws two curves and a table of a run from its metrics file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_idempotent.trainer.names import HELD_OUT, LOSS, REWARD, TOKENS_PER_S, TOTAL_S

CURVES_FILE = "curves.png"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A run in six numbers. Rewards are from 0 to 1, `seconds` leaves the set-up aside.

    Example: `Summary(rollouts=110, first_held_out=0.04, last_held_out=0.96, ...)`.
    """

    rollouts: int
    first_held_out: float
    last_held_out: float
    best_held_out: float
    seconds: float
    tokens_per_s: float


def summarize(rows: Sequence[dict[str, Any]]) -> Summary:
    """The summary of a metrics file with at least one evaluation. A resumed run counts whole."""
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
    )


def print_summary(summary: Summary, out: Path) -> None:
    """The table at the end of a run, on standard output."""
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
    ):
        table.add_row(name, value)
    Console().print(table)


def draw_curves(rows: Sequence[dict[str, Any]], path: Path, *, step: str) -> None:
    """Reward and loss over steps, as a PNG; `step` says what one is, such as "rollout"."""
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
