"""Defines the numbers that a simulation gives, and prints them as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.patching.table import render


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """Holds the results of one simulated run. Seconds are virtual, except for `cpu_s`.

    Example: `simulate(scenario).overlap_efficiency`.
    """

    steps: int
    """Optimizer steps that are in the weights at the end."""
    measured_s: float
    """Seconds that the whole run took, from the first publish to the end of the last step."""
    generate_s: float
    """A lower bound on the seconds that the engines need for all tokens they drew, if they wait for
    nothing: tokens ÷ (engines x tokens/s of one engine). An engine's tokens/s are those with its
    equal share of the most requests that capacity and concurrency admit, or with its slots if they
    are fewer. They are concave in the requests, so that no other split is faster."""
    train_s: float
    """Seconds in which the trainer computed, steps that were undone included."""
    pause_s: float
    """Seconds in which engines were paused for new weights."""
    sync_s: float
    """Seconds of all publishes, from staging to resuming; engines serve except in `pause_s`."""
    generated_tokens: float
    """Tokens that all engines drew."""
    trained_tokens: int
    """Tokens of the groups that are in the weights."""
    evicted_tokens: int
    """Tokens of complete groups that were cleared without being trained."""
    filtered_tokens: int
    """Tokens of groups that the recipe rejected."""
    lost_tokens: float
    """Tokens of requests without an answer: an engine died, their group was aborted, or the run
    ended."""
    engine_idle: float
    """Share of all engines' seconds in which an engine drew no token."""
    trainer_idle: float
    """Share of the seconds in which the trainer did not compute."""
    staleness: Mapping[int, int]
    """The number of trained groups, by the versions between the oldest weights of their tokens and
    the weights that they trained."""
    counts: Mapping[str, int]
    """The controller's `Counts`, by name."""
    conserved: bool
    """True if `counts` add up, and each trained group is in the weights exactly once."""
    left_over: int
    """Groups in the data plane at the end, minus those that are ready; 0 unless groups leak."""
    dropped: Mapping[str, float]
    """Groups that could not be generated or stored, and calls that were tried again, by the name of
    the metric; none that are 0."""
    restores: int
    """Restores of lost ranks from a checkpoint."""
    faults: tuple[tuple[float, str], ...]
    """Second and description of each fault that happened."""
    step_ends_s: tuple[float, ...]
    """Seconds at which a logger got each optimizer step's row."""
    cpu_s: float
    """Processor seconds of the whole simulation: controller, engines and clock."""

    @property
    def overlap_efficiency(self) -> float:
        """max(`generate_s`, `train_s` + `pause_s`) ÷ `measured_s`.

        It is 1 if the longer of generation and training hides the other one.
        """
        return max(self.generate_s, self.train_s + self.pause_s) / self.measured_s

    @property
    def useful_efficiency(self) -> float:
        """`overlap_efficiency` without the share of `generate_s` for evicted and lost tokens."""
        spent = self.evicted_tokens + self.lost_tokens
        useful = 1 - spent / self.generated_tokens if self.generated_tokens else 1.0
        return max(self.generate_s * useful, self.train_s + self.pause_s) / self.measured_s

    @property
    def wasted(self) -> float:
        """The share of all generated tokens that were evicted."""
        return self.evicted_tokens / self.generated_tokens if self.generated_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """The tokens that were trained, per virtual second."""
        return self.trained_tokens / self.measured_s

    @property
    def mean_staleness(self) -> float:
        """The staleness in versions, averaged over the groups that were trained."""
        groups = sum(self.staleness.values())
        return sum(lag * count for lag, count in self.staleness.items()) / max(groups, 1)

    @property
    def cpu_ms_per_group(self) -> float:
        """The processor milliseconds of the simulation, per group that was submitted."""
        return 1e3 * self.cpu_s / max(self.counts["submitted"], 1)

    def summary(self) -> dict[str, Any]:
        """Return all fields and properties by name, for JSON."""
        found = dataclasses.asdict(self)
        found["staleness"] = {str(lag): count for lag, count in self.staleness.items()}
        derived = (name for name, each in vars(type(self)).items() if isinstance(each, property))
        return found | {name: getattr(self, name) for name in derived}


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
"""The rows of the table: each one's name, and a function that formats its value."""


def print_table(reports: Sequence[tuple[str, SimulationReport]]) -> None:
    """Print a table with a column per report, by label."""
    columns = [[label, *(show(report) for _, show in ROWS)] for label, report in reports]
    aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    print(render((), [*zip(("", *(name for name, _ in ROWS)), *aligned, strict=True)]))
