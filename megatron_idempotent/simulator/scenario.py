"""One record of all that is simulated, from a TOML file or built in code."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from megatron_idempotent.controller.protocol import Sampler
from megatron_idempotent.controller.samplers import load_sampler
from megatron_idempotent.controller.settings import ControllerSettings, LogprobsAsked
from megatron_idempotent.engines.protocol import PauseMode
from megatron_idempotent.settings import Field, SettingsReader, settings

from .faults import Fault
from .latency import AnyDistribution, Constant, LogNormal
from .serving import EngineCosts
from .trainer import TrainCosts


class ScenarioError(ValueError):
    """A scenario that cannot be simulated; the message names the key, and what is allowed."""


@settings(ScenarioError, "sync.")
class SyncCosts:
    """Limits and shape of a weight sync; what it takes is the engines'."""

    buckets: int = Field(default=4, ge=0)
    """Buckets of one update."""
    pause_mode: PauseMode = "keep"
    """The fate of running requests."""
    attempts: int = Field(default=3, ge=1)
    """Attempts at a commit, a rollback and a resume."""
    retry_wait_s: float = Field(default=0.5, gt=0)
    bucket_timeout_s: float = Field(default=120.0, gt=0)
    commit_timeout_s: float = Field(default=120.0, gt=0)


@settings(ScenarioError, "limits.")
class Limits:
    """Limits of the controller; see `ControllerSettings`, which checks them, for each."""

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
    """Engines, a trainer, and the controller's settings between them.

    Example: `Scenario(engines=16, steps=50, sampler="windowed", staleness=2)`.
    """

    name: str = ""
    seed: int = 0
    steps: int = Field(default=50, ge=1)
    """Optimizer steps of the run."""
    prompts: int = Field(default=0, ge=0)
    """Prompts in the data; 0 for as many as are asked for."""
    engines: int = Field(default=8, ge=1)
    group_size: int = Field(default=8, ge=1)
    """Samples per prompt."""
    groups_per_step: int = Field(default=16, ge=1)
    """Groups of one optimizer step."""
    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps between two weight syncs."""
    sampler: str = "windowed"
    """windowed, strict, first_ready, in_order, or `package.module:Class`."""
    staleness: int = 1
    """The window of windowed, and the lookahead of in_order."""
    order: str = "freshest"
    """Order in which windowed trains eligible groups: freshest or oldest."""
    gated: bool = True
    """Start only groups that can train within the window; else as many as capacity allows. For
    windowed and strict."""
    abort_stale: bool = False
    """End the generation of groups that have become too old. For windowed and strict."""
    capacity: int = 0
    """Groups that are held at once; 0 for what the sampler needs."""
    concurrency: int = 0
    """Groups that are generated at once; 0 for the capacity."""
    logprobs: LogprobsAsked = "none"
    """Log-probs that are computed per group."""
    groups_per_call: int = 1
    """Groups that are handed to the trainer at once, where as many are there."""
    min_groups_per_call: int = 1
    """Groups that have to be there before any are handed over."""
    length: AnyDistribution = dataclasses.field(
        default_factory=lambda: LogNormal(median=800, p99=6000)
    )
    """Tokens of a response."""
    hardness: AnyDistribution = dataclasses.field(default_factory=lambda: Constant(value=1.0))
    """Factor on the lengths of all responses to one prompt."""
    most_tokens: int = 32768
    """Longest response."""
    tokens_per_entry: int = Field(default=256, ge=1)
    """Tokens that one entry of a simulated sample stands for: more is cheaper, and coarser."""
    filtered: float = Field(default=0.0, ge=0, lt=1)
    """Share of the groups that are of no use."""
    engine: EngineCosts = dataclasses.field(default_factory=EngineCosts)
    train: TrainCosts = dataclasses.field(default_factory=TrainCosts)
    sync: SyncCosts = dataclasses.field(default_factory=SyncCosts)
    limits: Limits = dataclasses.field(default_factory=Limits)
    faults: tuple[Fault, ...] = ()
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
                    f"a fault is of engine {fault.index}; allowed: 0 to {self.engines - 1}"
                )

    def settings(self) -> ControllerSettings:
        """Return the controller's. Errors: `SettingsError`."""
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
        """Return the sampler. Errors: `SettingsError`."""
        admission: dict[str, object] = {"gated": self.gated, "abort_stale": self.abort_stale}
        options: dict[str, dict[str, object]] = {
            "strict": admission,
            "windowed": {"max_staleness": self.staleness, "order": self.order, **admission},
            "in_order": {"lookahead": self.staleness},
        }
        return load_sampler(self.sampler, **options.get(self.sampler, {}))

    def most_requests(self) -> int:
        """Return the most requests on the engines at once, by capacity and concurrency."""
        groups = self.settings().checked_capacity(self.make_sampler())
        return self.group_size * min(groups, self.concurrency or groups)

    def most_entries(self) -> int:
        """Return the most entries of one response."""
        return math.ceil(self.most_tokens / self.tokens_per_entry)


def load_scenario(path: Path | None = None, overrides: Sequence[str] = ()) -> Scenario:
    """Return the scenario in a file, with `key=value` or `section.key=value` applied in order.

    Errors: `ScenarioError`, also for what a controller could not run.
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
