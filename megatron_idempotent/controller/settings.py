"""How a run of the controller goes, checked when it is built."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from .errors import SettingsError
from .protocol import LogprobsOf, Sampler

LogprobsAsked = Literal["policy", "reference", "both", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControllerSettings:
    """Sizes and limits. An outer step ends with new weights for the engines.

    Example: `ControllerSettings(target_groups=16, group_size=16, train_global_batch_size=256)`.
    """

    target_groups: int
    """Groups of one outer step."""
    group_size: int
    """Samples per prompt."""
    train_global_batch_size: int
    """Sequences of one optimizer step."""
    logprobs: LogprobsAsked = "none"
    """What is computed per group before its advantages."""
    groups_per_call: int = 1
    """Groups that are handed to the policy at once, where as many are there: more of them make
    better use of a device, one by one they train sooner."""
    capacity: int = 0
    """Groups that may be generating or complete at once, besides those of the open step; 0 for
    what the sampler needs."""
    concurrency: int = 0
    """Groups that may be generating at once; 0 for as many as the capacity."""
    step_attempts: int = 3
    """Of an optimizer step, with the same groups, before the run ends."""
    group_attempts: int = 3
    """Of a group, before it is dropped and reported."""
    restarts: int = 3
    """Of lost ranks, without a step in between, before the run ends."""
    group_timeout_s: float = 300.0
    """For all samples of a group, in one attempt."""
    retry_wait_s: float = 0.5
    """Before a second attempt, and twice as long before each one behind it."""
    stall_s: float = 1200.0
    """Without any progress while work remains, before the run ends with an error that says where
    it stands."""
    look_again_s: float = 5.0
    """Between two looks for engines that were lost, while none is left."""
    abort_s: float = 300.0
    """For ranks to undo a step; behind it they count as lost."""
    drain_s: float = 60.0
    """For a drain to finish the open step; behind it the step is undone instead."""
    checkpoint_every: int = 0
    """Outer steps between two checkpoints; the last one has one too. 0 writes one only when the
    run is drained."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "logprobs":
                if value not in get_args(LogprobsAsked):
                    raise SettingsError(
                        f"logprobs is {value!r}; allowed: {', '.join(get_args(LogprobsAsked))}"
                    )
            elif field.type == "int":
                low = 0 if field.name in ("capacity", "concurrency", "checkpoint_every") else 1
                low = 0 if field.name == "restarts" else low
                if type(value) is not int or value < low:
                    raise SettingsError(f"{field.name} is {value!r}; allowed: {low} or more")
            elif not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise SettingsError(f"{field.name} is {value!r}; allowed: seconds above 0")
        longest = self.group_attempts * self.group_timeout_s
        if self.stall_s <= longest:
            raise SettingsError(
                f"stall_s is {self.stall_s:g} and a group may take {longest:g} s "
                f"({self.group_attempts} attempts of group_timeout_s {self.group_timeout_s:g}); "
                "allowed: more than that, or a hung rollout would end the run"
            )
        if self.train_global_batch_size % self.group_size:
            raise SettingsError(
                f"train_global_batch_size is {self.train_global_batch_size} and group_size is "
                f"{self.group_size}; allowed: whole groups in an optimizer step"
            )
        if self.groups_per_call > self.groups_per_step:
            raise SettingsError(
                f"groups_per_call is {self.groups_per_call}; allowed: up to the "
                f"{self.groups_per_step} groups of an optimizer step"
            )
        if self.target_groups % self.groups_per_step:
            raise SettingsError(
                f"target_groups is {self.target_groups} and an optimizer step has "
                f"{self.groups_per_step} groups (train_global_batch_size "
                f"{self.train_global_batch_size} / group_size {self.group_size}); allowed: whole "
                "optimizer steps in an outer step"
            )

    @property
    def groups_per_step(self) -> int:
        """Groups of one optimizer step."""
        return self.train_global_batch_size // self.group_size

    @property
    def minibatches(self) -> int:
        """Optimizer steps of one outer step."""
        return self.target_groups // self.groups_per_step

    @property
    def asked(self) -> tuple[LogprobsOf, ...]:
        """Whose log-probs are computed."""
        both: tuple[LogprobsOf, ...] = ("policy", "reference")
        return both if self.logprobs == "both" else tuple(e for e in both if e == self.logprobs)

    def checked_capacity(self, sampler: Sampler) -> int:
        """The buffer's capacity for a sampler.

        Errors: `SettingsError` for one that would deadlock, and for a window of staleness that the
        later optimizer steps of an outer step can never meet.
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
        needed = max(sampler.required_capacity(self.groups_per_step), self.target_groups)
        if self.capacity and self.capacity < needed:
            raise SettingsError(
                f"capacity is {self.capacity}; allowed: {needed} or more, which sampler "
                f"{sampler.name} needs with {self.groups_per_step} groups per optimizer step: with "
                "less, generation waits for training, or for ever"
            )
        return self.capacity or needed
