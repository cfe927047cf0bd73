"""The settings of a weight sync, and its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from megatron_idempotent.engines import PauseMode

Phase = Literal["stage", "pause", "commit", "wake", "stamp", "resume", "settle"]
"""A part of an update: see `WeightSync`; "wake" is of colocated engines, and "settle" what is done
about those that failed."""


class PhaseTimer(Protocol):
    """Measures phases, such as NeMo-RL's `Timer`. Example: `with timer.time("stage"): …`."""

    def time(self, phase: str) -> AbstractContextManager[object]:
        """A context that lasts as long as the phase."""
        ...


Outcome = Literal["committed", "behind", "quarantined"]
"""The state of an engine after a sync: it serves the new version; it serves a known older one; or
it must not serve until a later update has repaired it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SyncSettings:
    """Limits of a sync. Example: `SyncSettings(bucket_bytes=64 << 20, pause_mode="abort")`."""

    bucket_bytes: int = 256 << 20
    """Largest bucket; a larger tensor is one by itself. Two buckets are alive at a time."""
    pause_mode: PauseMode = "keep"
    """The treatment of running requests: "keep" lets them go on with the new weights, "abort"
    returns partial samples to be sent again, "wait" lets them end first."""
    colocated: bool = False
    """The engines share the trainer's devices and are asleep: their weights are woken before they
    are loaded, and their caches after that, so that old weights, new weights and caches are
    never in memory at once."""
    bucket_timeout_s: float = 120.0
    """Seconds in which an engine takes one bucket; the sync goes on without a slower one."""
    stage_timeout_s: float = 1800.0
    """Seconds for all buckets of an update, on one engine."""
    pause_timeout_s: float = 60.0
    commit_timeout_s: float = 120.0
    """Seconds for one attempt."""
    resume_timeout_s: float = 60.0
    """Seconds for one attempt, and for each request for an engine's health."""
    attempts: int = 3
    """Attempts at a commit, a rollback or a resume before the engine is quarantined."""
    retry_wait_s: float = 0.5
    """Seconds between two attempts."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "pause_mode":
                if value not in ("keep", "abort", "wait"):
                    raise ValueError(
                        f"SyncSettings() got pause_mode={value!r}: 'keep', 'abort' or 'wait'"
                    )
            elif field.name != "colocated" and not value > 0:
                raise ValueError(f"SyncSettings() got {field.name}={value!r}: above 0")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineOutcome:
    """The result of a sync for one engine. Example: `report.engines["vllm-0"].outcome`."""

    outcome: Outcome
    version: int | None
    """The version that it serves; None if it is quarantined."""
    detail: str = ""
    """Why it was not committed, in the words of the engine's own error."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """One update on all engines. Example: `report.pause_s / report.total_s`."""

    version: int
    engines: Mapping[str, EngineOutcome]
    bytes_sent: int
    """Bytes that were sent to each engine that took all buckets."""
    tensors_sent: int
    tensors_unchanged: int
    """Tensors that were not sent because the engines have them already."""
    stage_s: float
    """Seconds from the first bucket until the last engine has all; engines serve meanwhile."""
    pause_s: float
    """Seconds from the first pause to the last resume."""
    total_s: float

    def named(self, outcome: Outcome) -> tuple[str, ...]:
        """The engines with that outcome, in their order."""
        return tuple(name for name, found in self.engines.items() if found.outcome == outcome)

    def describe(self) -> str:
        """One line per engine that does not serve the version."""
        return "; ".join(
            f"{name} is {found.outcome}"
            + ("" if found.version is None else f" at version {found.version}")
            + (f": {found.detail}" if found.detail else "")
            for name, found in self.engines.items()
            if found.outcome != "committed"
        )


class SyncError(RuntimeError):
    """An update that cannot begin, or that no engine took."""


class SyncFailed(SyncError):
    """No engine serves the version; `report` says what became of each."""

    def __init__(self, report: SyncReport) -> None:
        super().__init__(
            f"no engine took version {report.version}: {report.describe()}; the next update brings "
            "those back that answer again"
        )
        self.report = report
