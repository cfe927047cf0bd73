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
    """The samples of one prompt, with a reward for each.

    The samples' `versions` are the trainer's version numbers, not the engines'.

    Raises:
        ValueError: there is no sample, or the numbers of samples and rewards differ.

    Example: `RolloutGroup(id=3, prompt=prompt, samples=(a, b), rewards=(1.0, 0.0))`.
    """

    id: int
    """Index of the prompt in the run's stream of prompts, from 0."""
    prompt: Any
    """The prompt, as `Prompts.prompt` returned it."""
    samples: tuple[Sample, ...]
    """The samples, possibly fewer than were requested."""
    rewards: tuple[float, ...]
    """A reward for each of `samples`."""
    failed: int = 0
    """The number of samples that failed and are missing."""

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.rewards) or not self.samples:
            raise ValueError(
                f"group {self.id} has {len(self.samples)} samples and {len(self.rewards)} rewards; "
                "give one reward per sample, and at least one sample"
            )

    @property
    def oldest_version(self) -> int:
        """The oldest version of the weights that sampled any of the group's tokens, from which the
        group's staleness is computed.
        """
        return min((min(sample.versions) for sample in self.samples if sample.versions), default=0)

    @property
    def tokens(self) -> int:
        """The number of response tokens in all samples."""
        return sum(len(sample.tokens) for sample in self.samples)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The record of a complete group in the buffer, from which samplers decide: the group's id, its
    order of arrival, and the oldest weight version of its tokens.

    Example: `version - held.version`.
    """

    id: int
    """Index of the group's prompt in the run's stream of prompts, from 0."""
    arrival: int
    """The number of groups that became complete before it."""
    version: int
    """The oldest version that sampled any of its tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generating:
    """The record of a group that is being generated, from which samplers decide: the group's id,
    its order of start, and the engines' weight version at that start.

    Example: `any(group.id == 7 for group in ready.generating())`.
    """

    id: int
    """Index of the group's prompt in the run's stream of prompts, from 0."""
    started: int
    """A number that increases with every started group."""
    version: int
    """The version that engines served when this attempt began; all tokens have it or a later
    one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """The number of a run's groups in each state, such as generating, ready, trained or evicted.

    At every moment `submitted == trained + filtered + evicted + running`.
    Example: `buffer.counts.conserved`.
    """

    submitted: int = 0
    """Groups that were admitted since the run began, including those before a resume."""
    trained: int = 0
    """Groups that completed optimizer steps were trained on."""
    filtered: int = 0
    """Groups that the recipe rejected, that failed to generate, or that were lost."""
    evicted: int = 0
    """Groups that became too stale."""
    aborted: int = 0
    """Groups that were evicted while they were being generated; `evicted` includes them."""
    generating: int = 0
    """Groups that are being generated."""
    ready: int = 0
    """Complete groups that wait for an optimizer step."""
    leased: int = 0
    """Groups in the optimizer step that is open."""

    @property
    def running(self) -> int:
        """The number of groups that are generating, ready or leased to the open step."""
        return self.generating + self.ready + self.leased

    def by_name(self) -> dict[str, int]:
        """Return all fields and `running` as a dictionary, for metrics and `Status`."""
        return {**dataclasses.asdict(self), "running": self.running}

    @property
    def conserved(self) -> bool:
        """True if `submitted` equals the number of all running, trained, filtered and evicted
        groups, so that no group is lost or counted twice.
        """
        return self.submitted == self.trained + self.filtered + self.evicted + self.running


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The inputs from which a sampler's `room` decides how many more groups may start.

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
    """Groups that are trained, in the open step or ready; not filtered or evicted ones."""
    running: int
    """Groups that are being generated."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """The result of one optimizer step on all ranks: whether the weights were updated, the number
    of tokens in the loss, and metrics. Example: `outcome.metrics["loss"]`.
    """

    updated: bool
    """False if the step was skipped, because no token was in the loss or gradients overflowed."""
    tokens: int
    """The number of response tokens in the loss, on all ranks."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metrics of the step; loggers prefix each name with `train/`."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """A snapshot of a run's progress, as `Controller.ping` returns it: versions, counts of groups,
    and the current activity.

    Example: `(await controller.ping()).trainer_version`.
    """

    state: Literal["starting", "running", "draining", "ended"]
    """`starting` before `run`, `draining` once `drain` was called, `ended` after `run`."""
    trainer_version: int
    """Optimizer steps that succeeded since the run began, including those before a resume."""
    rollout_version: int
    """The version of the weights that engines serve."""
    train_steps: int
    """Optimizer steps that succeeded in this process."""
    outer_steps: int
    """Outer steps that were completed since the run began; engines get new weights after each."""
    epoch: int
    """The number of complete passes over the data."""
    inflight_rollouts: int
    """Groups that are being generated."""
    rollouts_permitted: bool
    """True if one more group could start now."""
    ready_groups: int
    """Complete groups that wait for a step."""
    step_groups: int
    """Groups of the open step that the policy has so far."""
    doing: str
    """The current activity of the train pump, or the event that it waits for."""
    idle_s: float
    """Seconds since anything made progress; 0 unless the run is running or draining."""
    counts: Mapping[str, int]
    """The fields of `Counts` and its `running`, by name."""


LogprobsOf = Literal["policy", "reference"]
"""Names the model that computes log-probs: the one that is being trained, or the reference."""


class Prompts(Protocol):
    """The protocol of a run's prompts, which are looked up by index.

    The same index always gives the same prompt.
    """

    def prompt(self, index: int) -> Any | None:
        """Return the prompt at `index`, counted from 0; None after the last prompt."""

    def epoch(self, index: int) -> int:
        """Return the number of complete passes over the data before the prompt at `index`."""


class Generator(Protocol):
    """The protocol of the part that turns prompts into scored groups of samples, and publishes new
    weights to the engines.
    """

    async def generate(self, group_id: int, prompt: Any, *, attempt: int) -> RolloutGroup:
        """Sample and score all responses to a prompt; return them as a group.

        `attempt` is the number of failed attempts at this group. A cancelled call must end its
        requests and free their resources.

        Raises:
            PoisonedPrompt: no attempt at this prompt can succeed.
            EnginesLost: no engine is left; this does not count as an attempt.
            Exception: any other error counts as a failed attempt.
        """

    async def publish(self, version: int) -> Mapping[str, float]:
        """Send the policy's weights to the engines, as the trainer's `version`; return metrics.

        The policy's weights do not change during the call. Afterwards every token is sampled with
        these weights, or its version names the older ones. The same version may be published again,
        and after a restore a lower one. Loggers get a metric such as `pause_s` as `sync/pause_s`.

        Raises:
            EnginesLost: no engine took the weights.
        """

    async def recover(self) -> bool:
        """Return True if all engines were lost, and one has recovered and needs a `publish`."""


class Policy(Protocol):
    """The protocol of the model that is trained on all ranks. A call that is repeated with the same
    `step_id` and `microbatch_id` has no further effect.

    Raises:
        RanksLost: by every method, if ranks are gone. After any other error ranks are alive, and
            the step can be aborted.
    """

    async def begin(self, step_id: str) -> None:
        """Open an optimizer step with the id `step_id` on all ranks."""

    async def logprobs(self, batch: Any, which: LogprobsOf) -> Any:
        """Return the log-probs of a batch's response tokens under the policy or the reference model
        (`which`), in the form that `Recipe.batch` takes.

        May be called while a step is open.
        """

    async def microbatch(self, step_id: str, batch: Any, *, microbatch_id: str, last: bool) -> None:
        """Run forward and backward on one batch of the open step, and accumulate the gradients;
        `last` is True for the step's last batch.
        """

    async def finish(self, step_id: str) -> StepOutcome:
        """Reduce the gradients of the open step and update the weights, once; return the outcome.

        Repeating the call with the same id returns the same outcome and changes nothing.
        """

    async def abort(self, step_id: str | None = None) -> None:
        """Undo the open step, so that weights and optimizer are as if the step had never begun. If
        no step is open: no-op.
        """


class OneShotPolicy(Policy, Protocol):
    """A `Policy` that can also take a complete step in one call."""

    async def train(self, step_id: str, batch: Any) -> StepOutcome:
        """Take one optimizer step over one batch: `begin`, `microbatch` and `finish` in one call.

        Repeating the call with the same id returns the same outcome and changes nothing. A call
        that raises may have made the update: repeat it to learn the outcome, or abort.
        """


class Recipe(Protocol):
    """The protocol of an RL algorithm: it rejects useless groups and turns the others into batches,
    in plain functions that take milliseconds at most.
    """

    def rejects(self, group: RolloutGroup) -> str:
        """Return the reason, in a word or two, why a group must not be trained; return "" for a
        group that may be trained.
        """

    def inputs(self, groups: Sequence[RolloutGroup]) -> Any:
        """Return the batch from which `Policy.logprobs` computes the log-probs of these groups."""

    def batch(
        self, groups: Sequence[RolloutGroup], inputs: Any, logprobs: Mapping[LogprobsOf, Any]
    ) -> Any:
        """Return the batch of these groups for `Policy.microbatch`, with advantages and the
        off-policy correction.

        `inputs` is the result of `inputs(groups)`, and `logprobs` has the result of
        `Policy.logprobs` for each model that `ControllerSettings.logprobs` selects.
        """

    def metrics(self, groups: Sequence[RolloutGroup], version: int) -> Mapping[str, float]:
        """Return metrics of the groups of one optimizer step; `version` is the policy's version
        before the step.

        Loggers prefix each name with `train/`.
        """


class DataPlane(Protocol):
    """The protocol of a store that keeps complete groups until they are trained. Every call may
    safely be made again with the same arguments.
    """

    async def put(self, group: RolloutGroup) -> None:
        """Store a complete group, replacing one of the same id."""

    async def get(self, group_id: int) -> RolloutGroup:
        """Return the stored group with this id.

        Raises:
            KeyError: there is no such group.
        """

    async def clear(self, group_ids: Sequence[int]) -> None:
        """Remove the groups with these ids; unknown ids are ignored."""

    async def close(self) -> None:
        """Remove all groups, and release the store's resources."""


class Ready(Protocol):
    """A sampler's read-only view of the buffer: iterates over the complete groups, and lists those
    being generated.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Held]:
        """Yield the complete groups in order of arrival."""

    @property
    def lowest_unfinished(self) -> int | None:
        """The smallest id of a group that is not complete yet, because it is being generated or
        must be generated again. None if there is none.
        """

    def generating(self) -> Iterator[Generating]:
        """Yield the groups that are being generated, in the order in which they were started."""


class Sampler(Protocol):
    """The protocol of the part that decides which groups start, which train next, and which are too
    stale.
    """

    @property
    def name(self) -> str:
        """The sampler's non-empty name, in checkpoints and messages."""

    @property
    def max_staleness(self) -> int | None:
        """The largest staleness at which a group may train; None for no limit.

        Staleness is the version of the weights before the step - `Held.version`.
        """

    @property
    def drains(self) -> bool:
        """True if all running groups must end before engines get new weights."""

    def required_capacity(self, groups_per_step: int) -> int:
        """Return the smallest buffer capacity, in groups, at which training never waits for a group
        that finds no room in the buffer.
        """

    def room(self, admission: Admission) -> int:
        """Return how many more groups the sampler allows to start now. The caller then also applies
        the limits of capacity and concurrency.
        """

    def select(self, ready: Ready, *, version: int, count: int) -> Sequence[Held]:
        """Return up to `count` ready groups for the optimizer step from `version` to `version` + 1,
        in the sampler's order of preference.
        """

    def evict(self, ready: Ready, *, version: int) -> Sequence[Held]:
        """Select the complete groups that are too stale for any step from `version` on, and return
        them; the caller removes them from the buffer.
        """


class AbortingSampler(Sampler, Protocol):
    """The protocol of a `Sampler` that can also select groups to abort while they are still being
    generated.
    """

    def abort(self, ready: Ready, *, version: int) -> Sequence[Generating]:
        """Select the groups that are being generated and would be too stale once complete, and
        return them; the caller cancels these groups.

        Their requests are cancelled, they count as evicted, and other groups start instead: `room`
        must not let groups start that would be aborted at once.
        """


class Store(Protocol):
    """The protocol of a store for checkpoints of the policy together with the controller's
    state.
    """

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of the policy and of `state`, atomically.

        The policy's weights do not change during the call. `state` can be written as JSON.
        """

    async def restore(self) -> Mapping[str, Any] | None:
        """Restart lost ranks, load the newest checkpoint on all ranks, and return the `state` that
        was saved in it; return None if there is no checkpoint.

        Without a checkpoint, ranks get the initial weights.
        """


class ControllerError(RuntimeError):
    """The run cannot continue. Everything up to the last checkpoint is kept."""


class Stalled(ControllerError):
    """The run made no progress for `stall_s` seconds, although work remains."""


class GroupsRejected(ControllerError):
    """The recipe rejected as many groups in a row as train in `rejected_steps` outer steps, so that
    nothing can train.
    """


class StepFailed(ControllerError):
    """An optimizer step failed `step_attempts` times, and was undone each time."""


class PublishFailed(ControllerError):
    """The policy's weights could not be read or sent to the engines in `step_attempts` attempts,
    although engines were alive.
    """


class EnginesLost(RuntimeError):
    """No engine is left to sample or to take new weights; the message has each engine's reason."""


class PoisonedPrompt(ValueError):
    """A prompt to which no engine can ever respond; its group is dropped and reported."""
