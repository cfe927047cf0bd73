"""Records of the controller: groups of samples, optimizer steps, and the state of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from megatron_idempotent.rollout.records import Sample

Outcome = Literal["trained", "filtered", "evicted"]
"""The way in which a group leaves the buffer: an optimizer step has used it; it was of no use (no
spread of rewards, a prompt that cannot be answered); or its weights had become too old."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All samples of one prompt, with a reward for each.

    `versions` of the samples are the trainer's, not the engines' own numbers. `failed` samples
    could not be generated and are left out, so `samples` may be fewer than were asked for.
    Example: `RolloutGroup(id=3, prompt=prompt, samples=(a, b), rewards=(1.0, 0.0))`.
    """

    id: int
    """Place of the prompt in the run's stream of prompts, from 0."""
    prompt: Any
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    failed: int = 0

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.rewards) or not self.samples:
            raise ValueError(
                f"group {self.id} has {len(self.samples)} samples and {len(self.rewards)} rewards; "
                "one reward per sample, and at least one"
            )

    @property
    def oldest_version(self) -> int:
        """The oldest weights that drew any of its tokens; staleness is measured from it."""
        return min((min(each.versions) for each in self.samples if each.versions), default=0)

    @property
    def tokens(self) -> int:
        """Response tokens of all samples."""
        return sum(len(each.tokens) for each in self.samples)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A complete group in the buffer, as samplers see it. Example: `version - held.version`."""

    id: int
    arrival: int
    """Counts the groups in the order in which they were complete."""
    version: int
    """Oldest weights of any of its tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Groups by what has become of them. At every moment
    `submitted == trained + filtered + evicted + running`.

    Example: `buffer.counts.conserved`.
    """

    submitted: int = 0
    """Admitted since the run began."""
    trained: int = 0
    """Groups of optimizer steps that were finished."""
    filtered: int = 0
    """Groups of no use, or impossible to generate."""
    evicted: int = 0
    """Too old."""
    generating: int = 0
    ready: int = 0
    """Complete, and in the buffer."""
    leased: int = 0
    """Groups in the optimizer step that is open."""

    @property
    def running(self) -> int:
        """Admitted, and none of trained, filtered and evicted."""
        return self.generating + self.ready + self.leased

    @property
    def conserved(self) -> bool:
        """True if no group is lost and none is counted twice."""
        return self.submitted == self.trained + self.filtered + self.evicted + self.running


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The state in which a sampler decides how many more groups may start.

    Example: `sampler.room(Admission(rollout_version=2, trainer_version=3, groups_per_step=4,
    accepted=14, running=2))`.
    """

    rollout_version: int
    """The version of the weights that engines serve."""
    trainer_version: int
    groups_per_step: int
    """Groups of one optimizer step."""
    accepted: int
    """Groups that were trained, are being trained or are complete; filtered and evicted ones gave
    their place back."""
    running: int
    """Groups that are being generated."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """The result of one optimizer step, on all ranks. Example: `outcome.metrics["loss"]`."""

    updated: bool
    """False for a step without a valid token, or with an overflow."""
    tokens: int
    """Response tokens that counted, on all ranks."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The metrics that loggers get, without the `train/` before each name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The answer of `ping`. Example: `(await controller.ping()).trainer_version`."""

    state: Literal["starting", "running", "draining", "ended"]
    trainer_version: int
    """Optimizer steps that succeeded since the run began, those before a resume included."""
    rollout_version: int
    """The version of the weights that engines serve."""
    train_steps: int
    """Optimizer steps of this process."""
    outer_steps: int
    epoch: int
    inflight_rollouts: int
    """Groups that are being generated."""
    rollouts_permitted: bool
    """True if one more group could start now."""
    ready_groups: int
    step_groups: int
    """Groups of the step that is open, handed over so far."""
    doing: str
    """The work of the train pump, or the thing that it waits for."""
    idle_s: float
    """Since anything made progress."""
    counts: Mapping[str, int]
    """`Counts`, by name."""
