"""Declares the settings of a controller's run, and checks them against each other."""

from __future__ import annotations

from typing import Literal

from megatron_idempotent.rl.metrics.loggers import SettingsError
from megatron_idempotent.settings import Field, settings

from .protocol import LogprobsOf, Sampler
from .samplers import call_sampler

# The default number of prompts in a step of the asynchronous trainer.
_GROUPS = 32


@settings(SettingsError)
class ControllerLimits:
    """The limits of a run that `ControllerSettings` and the trainer's `[controller]` share.

    Example: `ControllerLimits(concurrency=64, stall_s=3600.0)`.
    """

    capacity: int = Field(default=0, ge=0)
    """The most groups that may be generating or complete at once, besides those of the open step;
    0 for the sampler's minimum."""
    concurrency: int = Field(default=0, ge=0)
    """The most groups that may be generating at once; 0 for the capacity."""
    groups_per_call: int = Field(default=0, ge=0)
    """The most groups per call of the policy; 0 for half of an optimizer step's groups. Larger
    calls use a device better; smaller ones train groups sooner."""
    min_groups_per_call: int = Field(default=1, ge=1)
    """The fewest groups per call of the policy, unless fewer complete a step."""
    step_attempts: int = Field(default=3, ge=1)
    """Attempts at an optimizer step with the same groups, and at a publish, before the run ends."""
    group_attempts: int = Field(default=3, ge=1)
    """Attempts at a group before it is dropped and reported."""
    restarts: int = Field(default=3, ge=0)
    """Restarts of lost ranks, without a completed step in between, before the run ends."""
    rejected_steps: int = Field(default=10, ge=1)
    """The run ends with an error once the recipe has rejected this many outer steps' groups in a
    row: the verifier then probably gives every sample the same reward."""
    group_timeout_s: float = Field(default=300.0, gt=0)
    """Time limit of one attempt at a group, with all of its samples, in seconds."""
    stall_s: float = Field(default=1200.0, gt=0)
    """Seconds without any progress, while work remains, after which the run ends with an error that
    reports its state."""
    drain_s: float = Field(default=60.0, gt=0)
    """Seconds for the open step to finish when the run is drained, such as by SIGTERM, after which
    it is undone."""

    def __post_init__(self) -> None:
        longest = self.group_attempts * self.group_timeout_s
        if self.stall_s <= longest:
            raise ValueError(
                f"stall_s is {self.stall_s:g} and a group may take {longest:g} s "
                f"({self.group_attempts} attempts of group_timeout_s {self.group_timeout_s:g}); "
                "allowed: more than that, or a hung rollout would end the run"
            )


@settings(SettingsError)
class ControllerSettings(ControllerLimits):
    """The sizes and limits of a run. Engines get new weights after each outer step.

    If one of `target_groups` and `train_global_batch_size` is 0, it is derived from the other such
    that an outer step has one optimizer step. If both are 0, a step has 32 groups.

    Raises:
        SettingsError: with a line for every keyword that is unknown, missing or out of range.

    Example: `ControllerSettings(target_groups=16, group_size=16, train_global_batch_size=256)`.
    """

    target_groups: int = Field(default=0, ge=0)
    """Groups of one outer step; 0 for as many as one optimizer step has."""
    group_size: int = Field(ge=1)
    """Samples per prompt."""
    train_global_batch_size: int = Field(default=0, ge=0)
    """Sequences of one optimizer step; 0 for as many as one outer step has."""
    logprobs: Literal["policy", "reference", "both", "none"] = "none"
    """Log-probs that are computed per group before its advantages."""
    retry_wait_s: float = Field(default=0.5, gt=0)
    """Seconds before a second attempt, and twice as long before each one after it."""
    look_again_s: float = Field(default=5.0, gt=0)
    """Seconds between two looks for engines while none is left, and between attempts to publish."""
    abort_s: float = Field(default=300.0, gt=0)
    """Seconds that ranks have to undo a step; after that they count as lost."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Outer steps between two checkpoints; the run's last version gets one too. 0 writes one only
    when the run is drained."""

    def __post_init__(self) -> None:
        ControllerLimits.__post_init__(self)
        groups = self.target_groups or self.train_global_batch_size // self.group_size
        if not self.train_global_batch_size:
            groups = groups or _GROUPS
            object.__setattr__(self, "train_global_batch_size", groups * self.group_size)
        object.__setattr__(self, "target_groups", groups)
        if not self.groups_per_call:
            object.__setattr__(self, "groups_per_call", max(self.groups_per_step // 2, 1))
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
        """The models whose log-probs are computed before advantages."""
        both: tuple[LogprobsOf, ...] = ("policy", "reference")
        return both if self.logprobs == "both" else tuple(m for m in both if m == self.logprobs)

    def checked_capacity(self, sampler: Sampler) -> int:
        """Return the buffer's capacity: the setting, or if it is 0 the sampler's requirement.

        Raises:
            SettingsError: the run would wait for ever with this capacity, or the later optimizer
                steps of an outer step would always exceed `max_staleness`.
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
        needed = max(
            call_sampler(sampler, "required_capacity", self.groups_per_step), self.target_groups
        )
        if self.capacity and self.capacity < needed:
            raise SettingsError(
                f"capacity is {self.capacity}; allowed: {needed} or more, which sampler "
                f"{sampler.name} needs with {self.groups_per_step} groups per optimizer step: with "
                "less, generation waits for training, or for ever"
            )
        return self.capacity or needed
