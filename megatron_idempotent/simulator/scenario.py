"""What is simulated: one record, from a TOML file or built by hand."""

from __future__ import annotations

import dataclasses
import math

from megatron_idempotent.controller.protocol import Sampler
from megatron_idempotent.controller.samplers import load_sampler
from megatron_idempotent.controller.settings import ControllerSettings, LogprobsAsked

from .costs import EngineCosts
from .faults import Fault
from .latency import Constant, Distribution, LogNormal
from .policy import TrainCosts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SyncCosts:
    """Limits and shape of a weight sync; what it takes is the engines'."""

    buckets: int = 4
    """Of one update."""
    pause_mode: str = "keep"
    """What becomes of running requests: keep, abort or wait."""
    attempts: int = 3
    """Of a commit, a rollback and a resume."""
    retry_wait_s: float = 0.5
    bucket_timeout_s: float = 120.0
    commit_timeout_s: float = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of the controller; see `ControllerSettings` for each."""

    step_attempts: int = 3
    group_attempts: int = 3
    restarts: int = 3
    group_timeout_s: float = 3600.0
    retry_wait_s: float = 0.5
    stall_s: float = 14400.0
    look_again_s: float = 5.0
    checkpoint_every: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Engines, a trainer, and the controller's settings between them.

    Example: `Scenario(engines=16, steps=50, sampler="windowed", staleness=2)`.
    """

    name: str = ""
    seed: int = 0
    steps: int = 50
    """Optimizer steps of the run."""
    prompts: int = 0
    """In the data; 0 for as many as are asked for."""
    engines: int = 8
    group_size: int = 8
    """Samples per prompt."""
    groups_per_step: int = 16
    """Groups of one optimizer step."""
    minibatches: int = 1
    """Optimizer steps between two weight syncs."""
    sampler: str = "windowed"
    """windowed, strict, first_ready, in_order, or `package.module:Class`."""
    staleness: int = 1
    """The window of windowed, and the lookahead of in_order."""
    order: str = "freshest"
    """In which windowed trains eligible groups: freshest or oldest."""
    capacity: int = 0
    """Groups that are held at once; 0 for what the sampler needs."""
    concurrency: int = 0
    """Groups that are generated at once; 0 for the capacity."""
    logprobs: LogprobsAsked = "none"
    """Whose are computed per group: policy, reference, both or none."""
    groups_per_call: int = 1
    """That are handed to the trainer at once, where as many are there."""
    length: Distribution = dataclasses.field(
        default_factory=lambda: LogNormal(median=800, p99=6000)
    )
    """Tokens of a response."""
    hardness: Distribution = dataclasses.field(default_factory=lambda: Constant(value=1.0))
    """By which the lengths of all responses to one prompt are multiplied."""
    most_tokens: int = 32768
    """Longest response."""
    tokens_per_entry: int = 256
    """That one entry of a simulated sample stands for: more is cheaper, and coarser."""
    filtered: float = 0.0
    """Share of the groups that are of no use."""
    engine: EngineCosts = dataclasses.field(default_factory=EngineCosts)
    train: TrainCosts = dataclasses.field(default_factory=TrainCosts)
    sync: SyncCosts = dataclasses.field(default_factory=SyncCosts)
    limits: Limits = dataclasses.field(default_factory=Limits)
    faults: tuple[Fault, ...] = ()
    limit_s: float = 1e9
    """Of virtual time."""

    def __post_init__(self) -> None:
        for name in ("steps", "engines", "group_size", "groups_per_step", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: 1 or more")
        if not 1 <= self.tokens_per_entry <= self.most_tokens:
            raise ValueError(
                f"tokens_per_entry is {self.tokens_per_entry}; allowed: 1 to most_tokens, "
                f"{self.most_tokens}"
            )
        if not 0 <= self.filtered < 1:
            raise ValueError(f"filtered is {self.filtered}; allowed: 0 or more, below 1")
        for fault in self.faults:
            if fault.target == "engine" and fault.index >= self.engines:
                raise ValueError(
                    f"a fault is of engine {fault.index}; allowed: 0 to {self.engines - 1}"
                )

    def settings(self) -> ControllerSettings:
        """The controller's. Errors: `SettingsError`."""
        return ControllerSettings(
            target_groups=self.groups_per_step * self.minibatches,
            group_size=self.group_size,
            train_global_batch_size=self.groups_per_step * self.group_size,
            logprobs=self.logprobs,
            groups_per_call=self.groups_per_call,
            capacity=self.capacity,
            concurrency=self.concurrency,
            **dataclasses.asdict(self.limits),
        )

    def make_sampler(self) -> Sampler:
        """The sampler. Errors: `SettingsError`."""
        options: dict[str, dict[str, object]] = {
            "windowed": {"max_staleness": self.staleness, "order": self.order},
            "in_order": {"lookahead": self.staleness},
        }
        return load_sampler(self.sampler, **options.get(self.sampler, {}))

    def most_requests(self) -> int:
        """That can be on the engines at once, by capacity and concurrency."""
        groups = self.settings().checked_capacity(self.make_sampler())
        return self.group_size * min(groups, self.concurrency or groups)

    def most_entries(self) -> int:
        """Of one response."""
        return math.ceil(self.most_tokens / self.tokens_per_entry)
