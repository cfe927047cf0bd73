"""Describes all that is simulated in one record, read from a TOML file or built in code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_idempotent.rl.controller.protocol import Sampler
from megatron_idempotent.rl.controller.samplers import configured_sampler
from megatron_idempotent.rl.controller.state import ControllerSettings, LogprobsAsked
from megatron_idempotent.rl.engines.protocol import PauseMode
from megatron_idempotent.settings import Field, SettingsReader, settings

from .faults import Fault
from .latency import AnyDistribution, Constant, LogNormal
from .serving import EngineCosts
from .trainer import TrainCosts


class ScenarioError(ValueError):
    """A scenario cannot be simulated; the message names the key, its value and what is allowed."""


@settings(ScenarioError, "sync.")
class SyncCosts:
    """Sets the size and limits of a weight sync; `EngineCosts` sets the time that it takes."""

    buckets: int = Field(default=4, ge=0)
    """Number of buckets in one update."""
    pause_mode: PauseMode = "keep"
    """Treatment of running requests in a pause: `keep`, `wait` or `abort`."""
    attempts: int = Field(default=3, ge=1)
    """Attempts at a commit, a rollback and a resume."""
    retry_wait_s: float = Field(default=0.5, gt=0)
    """Virtual seconds between two attempts."""
    bucket_timeout_s: float = Field(default=120.0, gt=0)
    """Virtual seconds that an engine may take for one bucket."""
    commit_timeout_s: float = Field(default=120.0, gt=0)
    """Virtual seconds that an engine may take for a commit."""


@settings(ScenarioError, "limits.")
class Limits:
    """Sets limits of the controller; `ControllerSettings` describes and checks each."""

    step_attempts: int = 3
    group_attempts: int = 3
    restarts: int = 3
    group_timeout_s: float = 3600.0
    retry_wait_s: float = 0.5
    stall_s: float = 14400.0
    look_again_s: float = 5.0
    checkpoint_every: int = 0


@settings(ScenarioError)
class Scenario:
    """Describes a simulated run: its engines, its trainer, and the controller's settings.

    Example: `Scenario(engines=16, steps=50, sampler="windowed", staleness=2)`.
    Errors: `ScenarioError`, with a line for each key that is wrong.
    """

    name: str = ""
    """Name of the scenario; that of its file if the file gives none."""
    seed: int = 0
    """Seed of all random draws."""
    steps: int = Field(default=50, ge=1)
    """Optimizer steps of the run."""
    prompts: int = Field(default=0, ge=0)
    """Number of prompts in the data; 0 for no end."""
    engines: int = Field(default=8, ge=1)
    """Number of engines."""
    group_size: int = Field(default=8, ge=1)
    """Samples per prompt."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups of one optimizer step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps between two weight syncs."""
    sampler: str = "windowed"
    """The sampler: `windowed`, `strict`, `first_ready`, `in_order`, or `package.module:Class`."""
    staleness: int = 1
    """`max_staleness` of `windowed`, and `lookahead` of `in_order`; others ignore it."""
    order: str = "freshest"
    """Order in which `windowed` trains eligible groups: `freshest` or `oldest`."""
    gated: bool = True
    """True to start only groups that can train within the window, false to start as many as
    capacity allows; `windowed` and `strict` have it."""
    abort_stale: bool = False
    """True to end groups that become too old while they are being generated; `windowed` and
    `strict` have it."""
    capacity: int = 0
    """The most groups that are generating or complete at once; 0 for what the sampler needs."""
    concurrency: int = 0
    """The most groups that are generating at once; 0 for the capacity."""
    logprobs: LogprobsAsked = "none"
    """Log-probs that are computed per group: `policy`, `reference`, `both` or `none`."""
    groups_per_call: int = 1
    """The most groups that are handed to the trainer in one call."""
    min_groups_per_call: int = 1
    """The fewest groups that are handed to the trainer in one call, unless a step lacks fewer."""
    length: AnyDistribution = dataclasses.field(
        default_factory=lambda: LogNormal(median=800, p99=6000)
    )
    """Length of a response in tokens."""
    hardness: AnyDistribution = dataclasses.field(default_factory=lambda: Constant(value=1.0))
    """Factor on the lengths of all responses to one prompt."""
    most_tokens: int = 32768
    """The most tokens of a response; longer ones are cut."""
    tokens_per_entry: int = Field(default=256, ge=1)
    """Tokens that one entry of a simulated sample stands for: more make the run cheaper and
    coarser."""
    filtered: float = Field(default=0.0, ge=0, lt=1)
    """Share of the groups that the recipe rejects."""
    engine: EngineCosts = dataclasses.field(default_factory=EngineCosts)
    """Time that an engine's work takes."""
    train: TrainCosts = dataclasses.field(default_factory=TrainCosts)
    """Time that the trainer's work takes."""
    sync: SyncCosts = dataclasses.field(default_factory=SyncCosts)
    """Size and limits of weight syncs."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    """Limits of the controller."""
    faults: tuple[Fault, ...] = ()
    """Faults that happen in the run."""
    limit_s: float = Field(default=1e9, gt=0)
    """Virtual seconds after which a simulation is given up."""

    def __post_init__(self) -> None:
        if self.tokens_per_entry > self.most_tokens:
            raise ValueError(
                f"tokens_per_entry is {self.tokens_per_entry}; allowed: up to most_tokens, "
                f"{self.most_tokens}"
            )
        for fault in self.faults:
            if fault.target == "engine" and fault.index >= self.engines:
                raise ValueError(
                    f"a fault is of engine {fault.index}; allowed: 0 to {self.engines - 1}, since "
                    f"engines is {self.engines}"
                )

    def settings(self) -> ControllerSettings:
        """Return the controller's settings. Errors: `SettingsError` for values that it refuses."""
        return ControllerSettings(
            target_groups=self.groups_per_step * self.minibatches,
            group_size=self.group_size,
            train_global_batch_size=self.groups_per_step * self.group_size,
            logprobs=self.logprobs,
            groups_per_call=self.groups_per_call,
            min_groups_per_call=self.min_groups_per_call,
            capacity=self.capacity,
            concurrency=self.concurrency,
            **dataclasses.asdict(self.limits),
        )

    def make_sampler(self) -> Sampler:
        """Return a new sampler with its options. Errors: `SettingsError`; see `load_sampler`."""
        return configured_sampler(
            self.sampler,
            window=self.staleness,
            order=self.order,
            gated=self.gated,
            abort_stale=self.abort_stale,
        )

    def most_requests(self) -> int:
        """Return the most requests that engines have at once, given capacity and concurrency."""
        groups = self.settings().checked_capacity(self.make_sampler())
        return self.group_size * min(groups, self.concurrency or groups)

    def most_entries(self) -> int:
        """Return the entries of a response of `most_tokens` tokens."""
        return math.ceil(self.most_tokens / self.tokens_per_entry)


def load_scenario(path: Path | None = None, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario from a TOML file; None for one of defaults.

    Args:
        path: the file.
        overrides: texts `key=value` or `section.key=value`, applied over the file in order.

    Errors: `ScenarioError` for a file, key or value that is wrong, and for settings with which the
        controller could not run.
    Example: `load_scenario(None, ["staleness=2", "engine.slots=32"])`.
    """
    given = SettingsReader(Scenario, ScenarioError, path)
    if path is not None:
        given.table.setdefault("name", path.stem)
    scenario = given.set(*overrides).build()
    try:
        scenario.settings().checked_capacity(scenario.make_sampler())
    except ValueError as error:
        raise ScenarioError(str(error)) from error
    return scenario
