"""Defines the settings of a weight sync, its phases and outcomes, its report and its errors."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol

from megatron_idempotent.rl.engines import PauseMode

Phase = Literal["stage", "pause", "commit", "wake", "stamp", "resume", "settle"]
"""A phase of an update; see `WeightSync`. "wake" wakes colocated engines, and "settle" repairs or
quarantines the engines that failed."""


class PhaseTimer(Protocol):
    """The protocol of a timer that measures phases, such as NeMo-RL's `Timer`.
    Example: `with timer.time("stage"): …`.
    """

    def time(self, phase: str) -> AbstractContextManager[object]:
        """Return a context manager that measures its `with` block as the phase `phase`."""
        ...


_log = logging.getLogger(__name__)


class Phases:
    """Times the phases of one update with a `PhaseTimer`. An error of the timer is logged, and the
    update continues without the timer.
    Example: `with Phases(timer).time("commit"): …`.
    """

    def __init__(self, timer: PhaseTimer | None) -> None:
        self._timer = timer

    @contextlib.contextmanager
    def time(self, phase: Phase) -> Iterator[None]:
        """Measure the `with` block as `phase` with the timer. If there is no timer, or the timer
        has raised before, only run the block.
        """
        stack = contextlib.ExitStack()
        if self._timer is not None:
            with self._harmless(phase):
                stack.enter_context(self._timer.time(phase))
        try:
            yield
        finally:
            # Without the phase's exception, so that the timer cannot swallow it.
            with self._harmless(phase):
                stack.close()

    @contextlib.contextmanager
    def _harmless(self, phase: Phase) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 (a timer must not break a sync)
            self._timer = None
            _log.warning("the timer failed in phase %s, and is not used again: %r", phase, error)


Outcome = Literal["committed", "behind", "quarantined"]
"""The state of an engine after a sync. `committed`: it serves the new version. `behind`: it serves
a known older version. `quarantined`: it must not serve until a later update repairs it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SyncSettings:
    """The settings of a weight sync: the bucket size, the pause mode, time limits and numbers of
    attempts. Example: `SyncSettings(bucket_bytes=64 << 20, pause_mode="abort")`.
    """

    bucket_bytes: int = 256 << 20
    """The maximum size of a bucket in bytes; a larger tensor has a bucket of its own. Two
    buckets are in memory at a time."""
    pause_mode: PauseMode = "keep"
    """Treatment of running requests: "keep" continues them with the new weights, "abort" returns
    partial samples to be sent again, "wait" waits until they end."""
    colocated: bool = False
    """True if the engines share the trainer's devices and are asleep. The sync then wakes their
    weights before loading them, and their caches afterwards, so that old weights, new weights and
    caches are never in memory together."""
    bucket_timeout_s: float = 120.0
    """Seconds for an engine to take one bucket; the sync continues without a slower engine."""
    stage_timeout_s: float = 1800.0
    """Seconds for all buckets of an update, on one engine."""
    pause_timeout_s: float = 60.0
    """Seconds for a pause."""
    commit_timeout_s: float = 120.0
    """Seconds for one attempt at a commit or a rollback."""
    resume_timeout_s: float = 60.0
    """Seconds for one attempt at a resume or a wake, and for a health check."""
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
    """The result of an update on one engine: the outcome, and the version that the engine serves.
    Example: `report.engines["vllm-0"].outcome`.
    """

    outcome: Outcome
    version: int | None
    """The version that the engine serves; None if it is quarantined."""
    detail: str = ""
    """The reason why the update was not committed, including the engine's error."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """The result of one weight update: the outcome on each engine, and the update's sizes and
    times. Example: `report.pause_s / report.total_s`.
    """

    version: int
    engines: Mapping[str, EngineOutcome]
    bytes_sent: int
    """The bytes that were sent to each engine that took all buckets."""
    tensors_sent: int
    """The number of tensors that were sent."""
    elements_changed: int
    """The number of elements that were sent; a delta has only the changed elements."""
    elements: int
    """The number of elements of the model."""
    bytes_whole: int
    """The bytes of a full update."""
    encode_s: float
    """Seconds in which rank 0 encoded deltas, or waited for a source that does; part of
    `stage_s`."""
    decode_s: float
    """Seconds in which the slowest engine checked and decoded deltas; part of `stage_s`."""
    stage_s: float
    """Seconds from the first bucket until the last engine has all; engines keep serving."""
    pause_s: float
    """Seconds from the first pause to the last resume."""
    total_s: float
    """Seconds for the entire update."""

    def named(self, outcome: Outcome) -> tuple[str, ...]:
        """Return the names of the engines with the outcome `outcome`, in the engines' order."""
        return tuple(name for name, engine in self.engines.items() if engine.outcome == outcome)

    def describe(self) -> str:
        """Return one line of text that lists the engines that do not serve the new version, with
        reasons; empty if all engines serve it.
        """
        return "; ".join(
            f"{name} is {engine.outcome}"
            + ("" if engine.version is None else f" at version {engine.version}")
            + (f": {engine.detail}" if engine.detail else "")
            for name, engine in self.engines.items()
            if engine.outcome != "committed"
        )


class SyncError(RuntimeError):
    """An update of the engines cannot begin, or no engine accepted the update."""


class SyncFailed(SyncError):
    """No engine serves the new version after an update; `report` has the outcome of each engine."""

    def __init__(self, report: SyncReport) -> None:
        super().__init__(
            f"no engine took version {report.version}: {report.describe()}; the next update brings "
            "those back that answer again"
        )
        self.report = report
