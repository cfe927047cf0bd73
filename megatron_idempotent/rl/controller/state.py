"""Defines the settings of a run, and the state that the controller's loops share."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from megatron_idempotent.rl.metrics.loggers import SettingsError
from megatron_idempotent.rl.metrics.names import InflightClock
from megatron_idempotent.rl.metrics.timeline import Timeline
from megatron_idempotent.settings import MAY_CHANGE, Field, refused, settings

from .buffer import GroupBuffer
from .protocol import (
    Admission,
    DataPlane,
    Generator,
    LogprobsOf,
    Policy,
    Prompts,
    Recipe,
    RolloutGroup,
    Sampler,
    Status,
)
from .samplers import call_sampler, checked_room

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


# The default number of prompts in a step of the asynchronous trainer.
_GROUPS = 32


@settings(SettingsError)
class ControllerLimits:
    """The base class of `ControllerSettings` and of the trainer's `[controller]` settings: limits
    of a run, such as its capacity, attempts and timeouts.

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
    step_attempts: int = Field(default=3, ge=1, json_schema_extra=MAY_CHANGE)
    """Attempts at an optimizer step with the same groups, and at a publish, before the run ends."""
    group_attempts: int = Field(default=3, ge=1, json_schema_extra=MAY_CHANGE)
    """Attempts at a group before it is dropped and reported."""
    restarts: int = Field(default=3, ge=0, json_schema_extra=MAY_CHANGE)
    """Restarts of lost ranks, without a completed step in between, before the run ends."""
    rejected_steps: int = Field(default=10, ge=1, json_schema_extra=MAY_CHANGE)
    """The run ends with an error once the recipe has rejected this many outer steps' groups in a
    row: the verifier then probably gives every sample the same reward."""
    group_timeout_s: float = Field(default=300.0, gt=0, json_schema_extra=MAY_CHANGE)
    """Time limit of one attempt at a group, with all of its samples, in seconds."""
    stall_s: float = Field(default=1200.0, gt=0, json_schema_extra=MAY_CHANGE)
    """Seconds without any progress, while work remains, after which the run ends with an error that
    reports its state."""
    drain_s: float = Field(default=60.0, gt=0, json_schema_extra=MAY_CHANGE)
    """Seconds for the open step to finish when the run is drained, such as by SIGTERM, after which
    it is undone."""

    def __post_init__(self) -> None:
        longest = self.group_attempts * self.group_timeout_s
        if self.stall_s <= longest:
            allowed = f"more than the {longest:g} s of a group, or a hung rollout would end the run"
            raise refused(self, "stall_s", "group_attempts", "group_timeout_s", allowed=allowed)


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
            allowed = "whole groups in an optimizer step"
            raise refused(self, "train_global_batch_size", "group_size", allowed=allowed)
        if self.groups_per_call > self.groups_per_step:
            allowed = f"up to the {self.groups_per_step} groups of an optimizer step"
            raise refused(self, "groups_per_call", allowed=allowed)
        if self.min_groups_per_call > self.groups_per_call:
            raise refused(
                self, "min_groups_per_call", "groups_per_call", allowed="at most groups_per_call"
            )
        if self.target_groups % self.groups_per_step:
            sizes = "target_groups", "train_global_batch_size", "group_size"
            allowed = f"whole optimizer steps, of {self.groups_per_step} groups each"
            raise refused(self, *sizes, allowed=allowed)

    @property
    def groups_per_step(self) -> int:
        """The number of groups in one optimizer step."""
        return self.train_global_batch_size // self.group_size

    @property
    def minibatches(self) -> int:
        """The number of optimizer steps in one outer step, i.e. from one publish of weights to the
        next.
        """
        return self.target_groups // self.groups_per_step

    @property
    def logprob_models(self) -> tuple[LogprobsOf, ...]:
        """The models whose log-probs the policy computes for each group before the recipe computes
        advantages: the policy, the reference model, both or none.
        """
        both: tuple[LogprobsOf, ...] = ("policy", "reference")
        return both if self.logprobs == "both" else tuple(m for m in both if m == self.logprobs)

    def checked_capacity(self, sampler: Sampler) -> int:
        """Return the buffer's capacity: the setting `capacity`, or if it is 0, the smallest
        capacity with which the sampler works. Raise `SettingsError` if the setting is too small.

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


class Measure:
    """Sums the seconds of each phase of a run, and draws the phases on a timeline, if any.

    Example: `with measure.phase("policy_training"): …`.
    """

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @staticmethod
    def now() -> float:
        """Return the event loop's time in seconds, possibly of a virtual clock."""
        return asyncio.get_running_loop().time()

    @contextmanager
    def phase(self, name: str, *, track: str = "train", **args: Any) -> Iterator[None]:
        """Add the duration of the `with` block to the phase `name`, and draw the block on the
        timeline.

        A block that raises also counts.
        """
        start = self.now()
        try:
            yield
        finally:
            end = self.now()
            self._seconds[name] += end - start
            self.span(track, name, start, args)

    def span(self, track: str, name: str, start: float, args: Mapping[str, Any]) -> None:
        """Draw a span on the timeline, from `start` (a result of `now`) to the present."""
        if self._timeline is not None:
            self._timeline.span(track, name, start, self.now(), args)

    def count(self, name: str, value: float) -> None:
        """Draw the new value of a counter on the timeline."""
        if self._timeline is not None:
            self._timeline.count(name, self.now(), value)

    def mark(self, track: str, name: str) -> None:
        """Draw a mark on a track of the timeline, for an event that happens now."""
        if self._timeline is not None:
            self._timeline.mark(track, name, self.now())

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call of `take`, and reset them."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


@dataclasses.dataclass(eq=False)
class RunState:
    """Holds the parts of one run, such as its policy and its sampler, and the mutable state that
    the controller's loops share.

    Only coroutines of one event loop change it, so it cannot change between two awaits.
    """

    settings: ControllerSettings
    sampler: Sampler
    prompts: Prompts
    generator: Generator
    policy: Policy
    recipe: Recipe
    measure: Measure
    buffer: GroupBuffer
    state: Literal["starting", "running", "draining", "ended"] = "starting"
    trainer_version: int = 0
    rollout_version: int = 0
    train_steps: int = 0
    published: int = -1
    """The last published version; -1 if this run has published none."""
    permitted: bool = False
    """True if groups may start with the published weights."""
    next_prompt: int = 0
    exhausted: bool = False
    publish_failed: bool = False
    """True if a publish during a step failed, so that no groups of its version will arrive."""
    engines_back: bool = False
    """True if an engine has recovered after all were lost, and needs the weights."""
    step_groups: int = 0
    doing: str = ""
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    """Groups that could not be generated, by reason."""
    dropped_for: str = ""
    """The error for which the last group was dropped."""
    retries: Counter[str] = dataclasses.field(default_factory=Counter)
    idle_since: float = 0.0
    sync_metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the last publish."""
    inflight: InflightClock | None = None
    """Integrates the number of groups being generated over time; None before the first row."""
    _waiting: list[asyncio.Future[None]] = dataclasses.field(default_factory=list)

    def forget(self) -> None:
        """Empty the buffer, and reset all versions and flags to the start of a run."""
        self.buffer = GroupBuffer(self.buffer.capacity)
        self.trainer_version = self.rollout_version = self.next_prompt = 0
        self.published = -1
        self.exhausted = self.permitted = self.engines_back = self.publish_failed = False

    def count_generating(self) -> None:
        """Record the number of groups being generated, for averages and the timeline."""
        generating = self.buffer.counts.generating
        if self.inflight is not None:
            self.inflight.now(self.measure.now(), generating)
        self.measure.count("generating groups", generating)

    def lose(self, group_id: int) -> None:
        """Drop from the buffer a ready group that the data plane has lost, so that another one can
        start.
        """
        self.buffer.drop(group_id, "filtered")
        self.dropped["lost"] += 1
        self.tell()

    def progressed(self) -> None:
        """Record that the run made progress: restart the watchdog's time, and wake all coroutines
        that wait in `change`.
        """
        self.idle_since = self.measure.now()
        self.tell()

    def tell(self) -> None:
        """Wake all coroutines that wait in `change`."""
        # Not an asyncio.Event, which is bound to one event loop: every `run` may have another.
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def change(self) -> None:
        """Wait until another coroutine calls `tell` or `progressed`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await waiter

    @property
    def current(self) -> bool:
        """True if the weights of the newest outer step have been published to the engines."""
        return self.published >= self.trainer_version - (
            self.trainer_version % self.settings.minibatches
        )

    @property
    def draining(self) -> bool:
        """True from the call of `drain` until the run has ended: no further groups start."""
        return self.state == "draining"

    def room(self) -> int:
        """Return how many more groups may start now, given the sampler, the buffer's capacity and
        the setting `concurrency`.

        Raises:
            SamplerError: the sampler failed.
        """
        if not self.permitted or self.state != "running" or self.exhausted:
            return 0
        running = self.buffer.counts.generating
        admission = Admission(
            rollout_version=self.rollout_version,
            trainer_version=self.trainer_version,
            groups_per_step=self.settings.groups_per_step,
            accepted=self.buffer.accepted,
            running=running,
        )
        groups = int(min(checked_room(self.sampler, admission), self.buffer.free))
        if self.settings.concurrency:
            groups = min(groups, self.settings.concurrency - running)
        return max(groups, 0)


def status_of(shared: RunState) -> Status:
    """Return a snapshot of a run: versions, counts of groups, and the current activity.

    Raises:
        SamplerError: the sampler failed.
    """
    counts = shared.buffer.counts
    running = shared.state in ("running", "draining")
    return Status(
        state=shared.state,
        trainer_version=shared.trainer_version,
        rollout_version=shared.rollout_version,
        train_steps=shared.train_steps,
        outer_steps=shared.trainer_version // shared.settings.minibatches,
        epoch=shared.prompts.epoch(shared.next_prompt),
        inflight_rollouts=counts.generating,
        rollouts_permitted=shared.room() > 0,
        ready_groups=counts.ready,
        step_groups=shared.step_groups,
        doing=shared.doing,
        idle_s=shared.measure.now() - shared.idle_since if running else 0.0,
        counts=counts.by_name(),
    )


class StoredGroups:
    """Puts complete groups into the data plane, gets and removes them there, and repeats calls that
    fail.

    Example: `await stored.clear([3, 4])`.
    """

    def __init__(self, shared: RunState, plane: DataPlane) -> None:
        self._shared = shared
        self.plane = plane
        self._owed: set[int] = set()

    async def put(self, group: RolloutGroup) -> None:
        """Store a group in the data plane, in up to `group_attempts` attempts.

        Raises:
            Exception: the data plane's error at the last attempt.
        """
        self._owed.discard(group.id)  # the id is in use again
        await self._retry("put", lambda: self.plane.put(group))

    async def get(self, group_id: int) -> RolloutGroup | None:
        """Return a group from the data plane; None if the data plane has lost it.

        Raises:
            Exception: the data plane's error at the last attempt.
        """
        try:
            return await self._retry("get", lambda: self.plane.get(group_id), final=KeyError)
        except KeyError:
            return None

    async def clear(self, group_ids: Iterable[int]) -> None:
        """Remove groups from the data plane, including those that an earlier call failed to remove.

        An error of the data plane is logged, not raised; the next call tries again.
        """
        self._owed.update(group_ids)
        ids = sorted(self._owed)
        if not ids:
            return
        try:
            await self.plane.clear(ids)
        except Exception as error:  # noqa: BLE001 (any error of a data plane; the next call retries)
            _log.warning("%d groups are not cleared yet: %r", len(ids), error)
            self._shared.retries["clear"] += 1
        else:
            self._owed.difference_update(ids)

    def owe(self, group_id: int) -> None:
        """Have the next `clear` also remove this group from the data plane; it is unknown whether
        the group was stored there.
        """
        self._owed.add(group_id)

    async def _retry(
        self,
        action: str,
        call: Callable[[], Awaitable[_T]],
        final: type[Exception] | tuple[()] = (),
    ) -> _T:
        settings, attempt = self._shared.settings, 0
        while True:
            try:
                return await call()
            except final:
                raise
            except Exception:
                self._shared.retries[action] += 1
                attempt += 1
                if attempt == settings.group_attempts:
                    raise
            await asyncio.sleep(settings.retry_wait_s * 2 ** (attempt - 1))
