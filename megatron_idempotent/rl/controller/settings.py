"""Defines the settings of a run, which are checked when they are built."""

from __future__ import annotations

from typing import Literal

from megatron_idempotent.rl.metrics.loggers import SettingsError
from megatron_idempotent.settings import Field, settings

from .protocol import LogprobsOf, Sampler
from .samplers import asked

# As many prompts as the asynchronous trainer's step has.
_GROUPS = 32

LogprobsAsked = Literal["policy", "reference", "both", "none"]


@settings(SettingsError)
class ControllerSettings:
    """Holds the sizes and limits of a run. Engines get new weights after each outer step.

    If one of `target_groups` and `train_global_batch_size` is 0, it is made to fit the other: an
    outer step then has one optimizer step. If both are 0, a step has 32 groups.

    Example: `ControllerSettings(target_groups=16, group_size=16, train_global_batch_size=256)`.
    Errors: `SettingsError` with a line for every keyword that is unknown, missing or out of range.
    """

    target_groups: int = Field(default=0, ge=0)
    """Groups of one outer step; 0 for as many as one optimizer step has."""
    group_size: int = Field(ge=1)
    """Samples per prompt."""
    train_global_batch_size: int = Field(default=0, ge=0)
    """Sequences of one optimizer step; 0 for as many as one outer step has."""
    logprobs: LogprobsAsked = "none"
    """Log-probs that are computed per group before its advantages."""
    groups_per_call: int = Field(default=1, ge=1)
    """The most groups that are handed to the policy in one call. More of them use a device better;
    one by one they train sooner."""
    min_groups_per_call: int = Field(default=1, ge=1)
    """The fewest groups that are handed to the policy in one call, unless a step lacks fewer. With
    more, fewer calls use the device better, and an optimizer step begins later."""
    capacity: int = Field(default=0, ge=0)
    """The most groups that may be generating or complete at once, besides those of the open step;
    0 for as many as the sampler needs."""
    concurrency: int = Field(default=0, ge=0)
    """The most groups that may be generating at once; 0 for as many as the capacity."""
    step_attempts: int = Field(default=3, ge=1)
    """Attempts at an optimizer step with the same groups, and at a publish, before the run ends."""
    group_attempts: int = Field(default=3, ge=1)
    """Attempts at a group before it is dropped and reported."""
    restarts: int = Field(default=3, ge=0)
    """Restarts of lost ranks without a step in between before the run ends."""
    group_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that one attempt at a group may take, all its samples included."""
    retry_wait_s: float = Field(default=0.5, gt=0)
    """Seconds before a second attempt, and twice as long before each one after it."""
    stall_s: float = Field(default=1200.0, gt=0)
    """Seconds without any progress, while work remains, after which the run ends with an error that
    says where it stands."""
    look_again_s: float = Field(default=5.0, gt=0)
    """Seconds between two looks for engines while none is left, and between attempts to publish."""
    abort_s: float = Field(default=300.0, gt=0)
    """Seconds that ranks have to undo a step; after that they count as lost."""
    drain_s: float = Field(default=60.0, gt=0)
    """Seconds that a drain gives the open step to finish; after that the step is undone."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Outer steps between two checkpoints; the run's last version gets one too. 0 writes one only
    when the run is drained."""

    def __post_init__(self) -> None:
        groups = self.target_groups or self.train_global_batch_size // self.group_size
        if not self.train_global_batch_size:
            groups = groups or _GROUPS
            object.__setattr__(self, "train_global_batch_size", groups * self.group_size)
        object.__setattr__(self, "target_groups", groups)
        longest = self.group_attempts * self.group_timeout_s
        if self.stall_s <= longest:
            raise ValueError(
                f"stall_s is {self.stall_s:g} and a group may take {longest:g} s "
                f"({self.group_attempts} attempts of group_timeout_s {self.group_timeout_s:g}); "
                "allowed: more than that, or a hung rollout would end the run"
            )
        if self.train_global_batch_size % self.group_size:
            raise ValueError(
                f"train_global_batch_size is {self.train_global_batch_size} and group_size is "
                f"{self.group_size}; allowed: whole groups in an optimizer step"
            )
        if self.groups_per_call > self.groups_per_step:
            raise ValueError(
                f"groups_per_call is {self.groups_per_call}; allowed: up to the "
                f"{self.groups_per_step} groups of an optimizer step"
            )
        if self.min_groups_per_call > self.groups_per_call:
            raise ValueError(
                f"min_groups_per_call is {self.min_groups_per_call}; allowed: up to "
                f"groups_per_call, which is {self.groups_per_call}"
            )
        if self.target_groups % self.groups_per_step:
            raise ValueError(
                f"target_groups is {self.target_groups} and an optimizer step has "
                f"{self.groups_per_step} groups (train_global_batch_size "
                f"{self.train_global_batch_size} / group_size {self.group_size}); allowed: whole "
                "optimizer steps in an outer step"
            )

    @property
    def groups_per_step(self) -> int:
        """The number of groups in one optimizer step."""
        return self.train_global_batch_size // self.group_size

    @property
    def minibatches(self) -> int:
        """The number of optimizer steps in one outer step."""
        return self.target_groups // self.groups_per_step

    @property
    def asked(self) -> tuple[LogprobsOf, ...]:
        """The models whose log-probs are computed."""
        both: tuple[LogprobsOf, ...] = ("policy", "reference")
        return both if self.logprobs == "both" else tuple(e for e in both if e == self.logprobs)

    def checked_capacity(self, sampler: Sampler) -> int:
        """Return the buffer's capacity with a sampler: the one that was set, or what it needs.

        Errors: `SettingsError` for a capacity with which the run would wait for ever, and for a
            `max_staleness` that the later optimizer steps of an outer step can never keep to.
        """
        window = sampler.max_staleness
        if window is not None and window < self.minibatches - 1:
            raise SettingsError(
                f"an outer step has {self.minibatches} optimizer steps (target_groups "
                f"{self.target_groups} / {self.groups_per_step} groups each), so the last one's "
                f"groups are {self.minibatches - 1} versions old; sampler {sampler.name} allows "
                f"{window}: allow {self.minibatches - 1}, or publish after every optimizer step "
                f"with target_groups={self.groups_per_step}"
            )
        needed = max(asked(sampler, "required_capacity", self.groups_per_step), self.target_groups)
        if self.capacity and self.capacity < needed:
            raise SettingsError(
                f"capacity is {self.capacity}; allowed: {needed} or more, which sampler "
                f"{sampler.name} needs with {self.groups_per_step} groups per optimizer step: with "
                "less, generation waits for training, or for ever"
            )
        return self.capacity or needed
