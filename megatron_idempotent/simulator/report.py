"""The results of a simulation, with the definitions of its numbers, as a table."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """One run. Seconds are virtual, but for those of the processor.

    Example: `simulate(scenario).overlap_efficiency`.
    """

    steps: int
    """Optimizer steps that the weights at the end have seen."""
    measured_s: float
    """Seconds from the first publish to the last step's end."""
    generate_s: float
    """Least seconds that the engines need for the tokens they drew, had they nothing else to wait
    for: tokens ÷ (engines x tokens/s of one at its share of the most requests that capacity and
    concurrency admit, or at its slots if they are fewer). A lower bound, as tokens/s are
    concave in the requests: no other split of the requests over the engines is faster."""
    train_s: float
    """Seconds in which the trainer computed, steps that were undone included."""
    pause_s: float
    """Seconds in which engines were paused for new weights."""
    sync_s: float
    """Seconds in which new weights were staged and switched; the trainer waits, engines serve but
    for `pause_s`."""
    generated_tokens: float
    """Drawn by all engines."""
    trained_tokens: int
    evicted_tokens: int
    """Tokens of complete groups that were thrown away as too old."""
    filtered_tokens: int
    """Tokens of groups of no use."""
    lost_tokens: float
    """Tokens of requests without an answer: an engine died, their group was aborted, or the run
    ended."""
    engine_idle: float
    """Share of all engines' seconds in which none of their requests drew a token."""
    trainer_idle: float
    """Share of the seconds in which the trainer did not compute."""
    staleness: Mapping[int, int]
    """Groups by versions between the oldest weights of their tokens and those that they trained."""
    counts: Mapping[str, int]
    """Groups by what has become of them."""
    conserved: bool
    """True if those add up, and the trained groups are those in the weights, each once."""
    left_over: int
    """Groups that are still in the data plane, less those that are ready."""
    dropped: Mapping[str, float]
    """Groups that could not be generated or stored, and calls that were tried again, by name."""
    restores: int
    """Restores of lost ranks."""
    faults: tuple[tuple[float, str], ...]
    """Seconds and names of the faults that happened."""
    step_ends_s: tuple[float, ...]
    """The time at which a logger saw each optimizer step's end."""
    cpu_s: float
    """Processor seconds of the whole simulation: controller, engines and clock."""

    @property
    def overlap_efficiency(self) -> float:
        """max(generate, train + pause) ÷ measured: 1 where the longer of both hides the other."""
        return max(self.generate_s, self.train_s + self.pause_s) / self.measured_s

    @property
    def useful_efficiency(self) -> float:
        """The same, where tokens that were evicted or lost do not count as generation's work."""
        spent = self.evicted_tokens + self.lost_tokens
        useful = 1 - spent / self.generated_tokens if self.generated_tokens else 1.0
        return max(self.generate_s * useful, self.train_s + self.pause_s) / self.measured_s

    @property
    def wasted(self) -> float:
        """Evicted ÷ generated tokens."""
        return self.evicted_tokens / self.generated_tokens if self.generated_tokens else 0.0

    @property
    def groups_per_s(self) -> float:
        """Groups that were trained, per virtual second."""
        return self.counts["trained"] / self.measured_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens that were trained, per virtual second."""
        return self.trained_tokens / self.measured_s

    @property
    def mean_staleness(self) -> float:
        """Versions, over the groups that were trained."""
        groups = sum(self.staleness.values())
        return sum(lag * count for lag, count in self.staleness.items()) / max(groups, 1)

    @property
    def cpu_ms_per_group(self) -> float:
        """Processor milliseconds of the simulation per group that was submitted."""
        return 1e3 * self.cpu_s / max(self.counts["submitted"], 1)

    def summary(self) -> dict[str, Any]:
        """Return all numbers by name, for JSON."""
        found = dataclasses.asdict(self)
        found["staleness"] = {str(lag): count for lag, count in self.staleness.items()}
        for name in (
            "overlap_efficiency",
            "useful_efficiency",
            "wasted",
            "groups_per_s",
            "tokens_per_s",
            "mean_staleness",
            "cpu_ms_per_group",
        ):
            found[name] = getattr(self, name)
        return found

    def without_cpu(self) -> SimulationReport:
        """Returns the part that is the same in every run of one scenario."""
        return dataclasses.replace(self, cpu_s=0.0)


ROWS: tuple[tuple[str, Callable[[SimulationReport], str]], ...] = (
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
    ("of them aborted", lambda r: str(r.counts["aborted"])),
    ("running", lambda r: str(r.counts["running"])),
    ("conserved", lambda r: "yes" if r.conserved else "NO"),
    ("faults, restores", lambda r: f"{len(r.faults)}, {r.restores}"),
    ("cpu per group", lambda r: f"{r.cpu_ms_per_group:.2f} ms"),
)
"""The rows of the table, and their formats."""


def print_table(reports: Sequence[tuple[str, SimulationReport]]) -> None:
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
