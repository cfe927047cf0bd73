"""Reports side by side, a column each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from .report import Report

ROWS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("optimizer steps", lambda r: str(r.steps)),
    ("measured", lambda r: f"{r.measured_s:.0f} s"),
    ("generation alone", lambda r: f"{r.generate_s:.0f} s"),
    ("training", lambda r: f"{r.train_s:.0f} s"),
    ("weight syncs", lambda r: f"{r.sync_s:.0f} s"),
    ("of them paused", lambda r: f"{r.pause_s:.0f} s"),
    ("overlap efficiency", lambda r: f"{r.overlap_efficiency:.3f}"),
    ("without wasted tokens", lambda r: f"{r.useful_efficiency:.3f}"),
    ("trained tokens/s", lambda r: f"{r.tokens_per_s:.0f}"),
    ("engines idle", lambda r: f"{r.engine_idle:.1%}"),
    ("trainer idle", lambda r: f"{r.trainer_idle:.1%}"),
    ("staleness, mean", lambda r: f"{r.mean_staleness:.2f}"),
    ("staleness, most", lambda r: str(max(r.staleness, default=0))),
    ("wasted tokens", lambda r: f"{r.wasted:.2%}"),
    ("groups submitted", lambda r: str(r.counts["submitted"])),
    ("trained", lambda r: str(r.counts["trained"])),
    ("filtered", lambda r: str(r.counts["filtered"])),
    ("evicted", lambda r: str(r.counts["evicted"])),
    ("running", lambda r: str(r.counts["running"])),
    ("conserved", lambda r: "yes" if r.conserved else "NO"),
    ("faults, restores", lambda r: f"{len(r.faults)}, {r.restores}"),
    ("cpu per group", lambda r: f"{r.cpu_ms_per_group:.2f} ms"),
)
"""The rows of the table, and their formats."""


def print_table(reports: Sequence[tuple[str, Report]]) -> None:
    """Prints with rich on a terminal that has it, else in plain text."""
    rows = [(name, [show(report) for _, report in reports]) for name, show in ROWS]
    heads = [label for label, _ in reports]
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ModuleNotFoundError:
            pass
        else:
            table = Table("", *heads)
            for name, cells in rows:
                table.add_row(name, *cells)
            Console().print(table)
            return
    print(plain(heads, rows))


def plain(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Columns as wide as their longest cell, two blanks between them."""
    lines = [("", *heads), *((name, *cells) for name, cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
