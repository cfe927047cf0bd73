"""Defines the controller's parts as protocols, their records, and the errors that end a run.

Each part can be replaced without touching the others. All coroutines run in the controller's one
event loop and must not block it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from megatron_idempotent.rl.engines.protocol import Sample


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """Holds the samples of one prompt, with a reward for each.

    `versions` of the samples are the trainer's, not the engines' own numbers.
    Example: `RolloutGroup(id=3, prompt=prompt, samples=(a, b), rewards=(1.0, 0.0))`.
    Errors: `ValueError` without samples, or with another number of rewards than of samples.
    """

    id: int
    """Index of the prompt in the run's stream of prompts, from 0."""
    prompt: Any
    """The prompt, as `Prompts.prompt` returned it."""
    samples: tuple[Sample, ...]
    """The samples that were drawn, which may be fewer than were asked for."""
    rewards: tuple[float, ...]
    """A reward for each of `samples`."""
    failed: int = 0
    """The number of samples that could not be drawn, and are left out."""

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.rewards) or not self.samples:
            raise ValueError(
                f"group {self.id} has {len(self.samples)} samples and {len(self.rewards)} rewards; "
                "give one reward per sample, and at least one sample"
            )

    @property
    def oldest_version(self) -> int:
        """The version of the oldest weights that drew any token; staleness is measured from it."""
        return min((min(each.versions) for each in self.samples if each.versions), default=0)

    @property
    def tokens(self) -> int:
        """The number of response tokens in all samples."""
        return sum(len(each.tokens) for each in self.samples)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Describes a complete group in the buffer to a sampler. Example: `version - held.version`."""

    id: int
    """Index of the group's prompt in the run's stream of prompts, from 0."""
    arrival: int
    """The number of groups that became complete before it."""
    version: int
    """The version of the oldest weights that drew any of its tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generating:
    """Describes a group that is being generated to a sampler.

    Example: `any(each.id == 7 for each in ready.generating())`.
    """

    id: int
    """Index of the group's prompt in the run's stream of prompts, from 0."""
    started: int
    """A number that is higher the later the group was started."""
    version: int
    """The version that engines served when its attempt began: no token is from older weights."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Counts groups by what has become of them.

    At every moment `submitted == trained + filtered + evicted + running`.
    Example: `buffer.counts.conserved`.
    """

    submitted: int = 0
    """Groups that were admitted since the run began, those before a resume included."""
    trained: int = 0
    """Groups that finished optimizer steps have used."""
    filtered: int = 0
    """Groups that were of no use, could not be generated, or were lost."""
    evicted: int = 0
    """Groups that were given up because their weights had become too old."""
    aborted: int = 0
    """Groups that were evicted while they were still being generated; `evicted` counts them too."""
    generating: int = 0
    """Groups that are being generated."""
    ready: int = 0
    """Complete groups that wait for a step."""
    leased: int = 0
    """Groups in the optimizer step that is open."""

    @property
    def running(self) -> int:
        """The number of groups that are generating, ready or leased."""
        return self.generating + self.ready + self.leased

    @property
    def conserved(self) -> bool:
        """True if no group is lost and none is counted twice."""
        return self.submitted == self.trained + self.filtered + self.evicted + self.running


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Holds what a sampler needs to decide how many more groups may start.

    Example: `sampler.room(Admission(rollout_version=2, trainer_version=3, groups_per_step=4,
    accepted=14, running=2))`.
    """

    rollout_version: int
    """The version of the weights that engines serve."""
    trainer_version: int
    """The version of the weights that are being trained."""
    groups_per_step: int
    """The number of groups in one optimizer step."""
    accepted: int
    """Groups that were trained, are in the open step or are ready. Filtered and evicted ones do not
    count."""
    running: int
    """Groups that are being generated."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """Holds the result of one optimizer step on all ranks. Example: `outcome.metrics["loss"]`."""

    updated: bool
    """False if the weights stayed, because no token counted or gradients overflowed."""
    tokens: int
    """The number of response tokens that counted, on all ranks."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the step; loggers get each with `train/` before its name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Describes a run at a moment, as `ping` returns it.

    Example: `(await controller.ping()).trainer_version`.
    """

    state: Literal["starting", "running", "draining", "ended"]
    """`starting` before `run`, `draining` once `drain` was called, `ended` after `run`."""
    trainer_version: int
    """Optimizer steps that succeeded since the run began, those before a resume included."""
    rollout_version: int
    """The version of the weights that engines serve."""
    train_steps: int
    """Optimizer steps that succeeded in this process."""
    outer_steps: int
    """Outer steps that were completed since the run began; engines get new weights after each."""
    epoch: int
    """The number of times that the data was used up."""
    inflight_rollouts: int
    """Groups that are being generated."""
    rollouts_permitted: bool
    """True if one more group could start now."""
    ready_groups: int
    """Complete groups that wait for a step."""
    step_groups: int
    """Groups that the policy has of the open step so far."""
    doing: str
    """Says what the train pump does or waits for."""
    idle_s: float
    """Seconds since anything made progress; 0 unless the run is running or draining."""
    counts: Mapping[str, int]
    """The fields of `Counts` and its `running`, by name."""


LogprobsOf = Literal["policy", "reference"]
"""Names the model that computes log-probs: the one that is being trained, or the reference."""


class Prompts(Protocol):
    """Gives the prompts of a run by index, so that any group can be asked for again.

    The same index always gives the same prompt.
    """

    def prompt(self, index: int) -> Any | None:
        """Return the prompt at an index from 0; None after the last one."""

    def epoch(self, index: int) -> int:
        """Return how often the data was used up before that index."""


class Generator(Protocol):
    """Turns prompts into scored samples, and brings new weights to the engines."""

    async def generate(self, group_id: int, prompt: Any, *, attempt: int) -> RolloutGroup:
        """Draw and score all samples of a prompt; return them as a group.

        `attempt` is the number of failed attempts at this group. If it is cancelled, it ends the
        requests and frees what it held.
        Errors: `PoisonedPrompt` if no attempt can succeed; `EnginesLost` if no engine is left,
            which does not count as an attempt; anything else counts as a failed attempt.
        """

    async def publish(self, version: int) -> Mapping[str, float]:
        """Bring the policy's weights to the engines, as the trainer's `version`; return metrics.

        The policy's weights do not change meanwhile. From then on every token is drawn with them,
        or its version names the older weights that drew it. The same version may be published
        again, and after a restore a lower one. Loggers get a metric such as `pause_s` as
        `sync/pause_s`.
        Errors: `EnginesLost` if no engine took the weights.
        """

    async def recover(self) -> bool:
        """Return whether an engine answers again after all were lost, and needs a `publish`."""


class Policy(Protocol):
    """Trains a model on all ranks; a call that is sent again with the same ids counts once.

    Errors of every method: `workers.RanksLost` if ranks are gone; after anything else ranks are
    alive and the step can be aborted.
    """

    async def begin(self, step_id: str) -> None:
        """Open an optimizer step."""

    async def logprobs(self, batch: Any, which: LogprobsOf) -> Any:
        """Return log-probs of a batch's response tokens, in a form that the recipe knows.

        It may be called while a step is open.
        """

    async def microbatch(self, step_id: str, batch: Any, *, microbatch_id: str, last: bool) -> None:
        """Run forward and backward on one batch; `last` is true for the last one of the step."""

    async def finish(self, step_id: str) -> StepOutcome:
        """Reduce gradients and update the weights, once; return the outcome.

        If it is sent again with the same id, it returns the same outcome and changes nothing.
        """

    async def abort(self, step_id: str | None = None) -> None:
        """Undo the open step; do nothing if no step is open."""


class OneShotPolicy(Policy, Protocol):
    """Adds to `Policy` a method that takes a whole step in one call."""

    async def train(self, step_id: str, batch: Any) -> StepOutcome:
        """Take one optimizer step over one batch: `begin`, `microbatch` and `finish` in one call.

        If it is sent again with the same id, it returns the same outcome and changes nothing. A
        call that raises may have made the update: send it again to learn its outcome, or abort.
        """


class Recipe(Protocol):
    """Turns groups into batches, in plain functions that take milliseconds at most."""

    def rejects(self, group: RolloutGroup) -> str:
        """Say in a word or two why a group is of no use; return "" to keep it."""

    def inputs(self, groups: Sequence[RolloutGroup]) -> Any:
        """Return the batch for `Policy.logprobs`, made of the up to `groups_per_call` groups that
        train next.
        """

    def batch(
        self, groups: Sequence[RolloutGroup], inputs: Any, logprobs: Mapping[LogprobsOf, Any]
    ) -> Any:
        """Return the batch for `Policy.microbatch`, with advantages and the off-policy correction.

        `inputs` is what `inputs(groups)` returned, and `logprobs` holds what `Policy.logprobs`
        returned for it, by model: those that `ControllerSettings.logprobs` asks for.
        """

    def metrics(self, groups: Sequence[RolloutGroup], version: int) -> Mapping[str, float]:
        """Return metrics of one optimizer step's groups; `version` is that before the step.

        Loggers get each with `train/` before its name.
        """


class DataPlane(Protocol):
    """Keeps complete groups until they are trained. Every method may be called twice."""

    async def put(self, group: RolloutGroup) -> None:
        """Keep a group under its id, in place of one that has the id already."""

    async def get(self, group_id: int) -> RolloutGroup:
        """Return the group. Errors: `KeyError` if it is not there."""

    async def clear(self, group_ids: Sequence[int]) -> None:
        """Forget groups; ids that are not there change nothing."""

    async def close(self) -> None:
        """Forget all groups, and release what is held for them."""


class Ready(Protocol):
    """Shows a sampler the complete groups, and those being generated."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Held]:
        """Yield groups in order of arrival."""

    @property
    def lowest_unfinished(self) -> int | None:
        """The smallest id that has no result yet; None if there is none."""

    def generating(self) -> Iterator[Generating]:
        """Yield the groups that are being generated, in the order in which they were started."""


class Sampler(Protocol):
    """Decides which groups start, which train next, and which have become too old."""

    @property
    def name(self) -> str:
        """The sampler's name in checkpoints and messages, not empty."""

    @property
    def max_staleness(self) -> int | None:
        """The most versions between a group's weights and those it trains; None for no limit."""

    @property
    def drains(self) -> bool:
        """True if all running groups have to end before engines get new weights."""

    def required_capacity(self, groups_per_step: int) -> int:
        """Return the fewest groups for which the buffer must have places, or training stalls."""

    def room(self, admission: Admission) -> int:
        """Return how many more groups may start now, apart from capacity and concurrency."""

    def select(self, ready: Ready, *, version: int, count: int) -> Sequence[Held]:
        """Return up to `count` groups for the step that makes `version` + 1, the best first."""

    def evict(self, ready: Ready, *, version: int) -> Sequence[Held]:
        """Return the complete groups that no step from `version` on will take."""


class AbortingSampler(Sampler, Protocol):
    """Adds to `Sampler` a method that ends groups while they are still being generated."""

    def abort(self, ready: Ready, *, version: int) -> Sequence[Generating]:
        """Return groups that are being generated, and that no step would take once complete.

        Their requests are cancelled, they count as evicted, and others take their places: `room`
        must not let any start that would be aborted at once.
        """


class Store(Protocol):
    """Writes and restores checkpoints of the policy, with the controller's state in them."""

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of the policy and of `state`, complete or not at all.

        The policy's weights do not change meanwhile. `state` can be written as JSON.
        """

    async def restore(self) -> Mapping[str, Any] | None:
        """Restart lost ranks, load the newest checkpoint into all, and return its `state`.

        It returns None if there is no checkpoint: then ranks have the weights of the beginning.
        """


class ControllerError(RuntimeError):
    """The run cannot go on. Everything up to the last checkpoint is kept."""


class Stalled(ControllerError):
    """Nothing has made progress for as long as the settings allow, and work remains."""


class StepFailed(ControllerError):
    """An optimizer step failed as often as the settings allow, and was undone each time."""


class PublishFailed(ControllerError):
    """Weights could not be read or sent in `step_attempts` attempts, though engines were there."""


class EnginesLost(RuntimeError):
    """No engine is left to sample, or to take new weights; the message says why, by engine."""


class PoisonedPrompt(ValueError):
    """A prompt can never be answered; its group is dropped and reported."""
