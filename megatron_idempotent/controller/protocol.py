"""The parts of the controller as protocols, their records, and the errors that end a run.

Each part can be replaced without touching the others.

All coroutines run in the controller's one event loop and must not block it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from megatron_idempotent.engines.protocol import Sample

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
class Generating:
    """A group that is being generated, as samplers see it.

    Example: `any(each.id == 7 for each in ready.generating())`.
    """

    id: int
    started: int
    """Counts the groups in the order in which they were started."""
    version: int
    """The weights that engines served when its attempt began: no token is older."""


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
    aborted: int = 0
    """Evicted while they were still being generated; `evicted` counts them too."""
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


LogprobsOf = Literal["policy", "reference"]
"""The model of log-probs: the weights that are being trained, or the reference model."""


class Prompts(Protocol):
    """The stream of prompts: a function of the place, so that any group can be asked for again."""

    def prompt(self, index: int) -> Any | None:
        """Returns the prompt at a place from 0; None after the last one."""
        ...

    def epoch(self, index: int) -> int:
        """Returns how often the data was used up before that place."""
        ...


class Generator(Protocol):
    """Turns prompts into scored samples, and brings new weights to the engines."""

    async def generate(self, group_id: int, prompt: Any, *, attempt: int) -> RolloutGroup:
        """All samples of a prompt. Cancelled, it frees what it held.

        Errors: `PoisonedPrompt` where no attempt can succeed; `EnginesLost` where no engine is
            left, which says nothing of the prompt; anything else counts as a failed attempt.
        """
        ...

    async def publish(self, version: int) -> Mapping[str, float]:
        """Bring the policy's weights to the engines, as the trainer's `version`.

        The policy's weights do not change meanwhile. Afterwards every token is drawn with them, or
        says which older ones it was drawn with. The same version may be published again, and
        after a restore a lower one. Returns metrics, such as `pause_s`, which loggers get as
        `sync/…`.
        Errors: `EnginesLost` where no engine took them.
        """
        ...

    async def recover(self) -> bool:
        """Returns whether an engine answers again after all were lost, and needs a `publish`."""
        ...


class Policy(Protocol):
    """A model and its optimizer on all ranks. A step's calls are idempotent by their ids.

    Errors of every method: `workers.RanksLost` where ranks are gone; anything else leaves them
    alive, and the step can be aborted.
    """

    async def begin(self, step_id: str) -> None:
        """Open an optimizer step."""
        ...

    async def logprobs(self, batch: Any, which: LogprobsOf) -> Any:
        """Log-probs of a batch's response tokens. Legal while a step is open."""
        ...

    async def microbatch(self, step_id: str, batch: Any, *, microbatch_id: str, last: bool) -> None:
        """Forward and backward of one batch; `last` is the last one of the step."""
        ...

    async def finish(self, step_id: str) -> StepOutcome:
        """One reduction and one update. Sent again with the id, it returns the same outcome."""
        ...

    async def abort(self, step_id: str | None = None) -> None:
        """Undo an open step; without one, nothing."""
        ...


class OneShotPolicy(Policy, Protocol):
    """A policy that makes a whole step in one call too; `train` is all it has more."""

    async def train(self, step_id: str, batch: Any) -> StepOutcome:
        """One optimizer step over one batch: `begin`, `microbatch` and `finish` at once.

        Sent again with the id it returns the same outcome. Where it raises, the step can be
        aborted, or is undone already, or was made: then it says so when it is sent again.
        """
        ...


class Recipe(Protocol):
    """Turns groups into training data. Plain functions that take microseconds to milliseconds."""

    def rejects(self, group: RolloutGroup) -> str:
        """Why a group is of no use, in a word or two that counts as a metric; "" keeps it."""
        ...

    def inputs(self, groups: Sequence[RolloutGroup]) -> Any:
        """The batch that `Policy.logprobs` is asked about, of the groups that train next: one, or
        up to `groups_per_call`.
        """
        ...

    def batch(
        self,
        groups: Sequence[RolloutGroup],
        inputs: Any,
        logprobs: Mapping[LogprobsOf, Any],
    ) -> Any:
        """The batch that `Policy.microbatch` takes: with advantages, and with the correction for
        weights that are not those the samples were drawn with.
        """
        ...

    def metrics(self, groups: Sequence[RolloutGroup], version: int) -> Mapping[str, float]:
        """Returns metrics of the groups of one optimizer step, at the version before it."""
        ...


class DataPlane(Protocol):
    """Holds complete groups until they are trained. Every method is idempotent."""

    async def put(self, group: RolloutGroup) -> None:
        """Keep a group, under its id."""
        ...

    async def get(self, group_id: int) -> RolloutGroup:
        """The group. Errors: `KeyError` for one that is not there."""
        ...

    async def clear(self, group_ids: Sequence[int]) -> None:
        """Forget groups; unknown ids are fine."""
        ...

    async def close(self) -> None:
        """Release what is held."""
        ...


class Ready(Protocol):
    """The complete groups in the buffer, as a sampler may look at them without a scan of all."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Held]:
        """Yields groups in order of arrival."""
        ...

    def versions(self) -> Sequence[int]:
        """Versions that there are groups of, ascending."""
        ...

    def of_version(self, version: int) -> Iterator[Held]:
        """Yields groups in order of arrival."""
        ...

    def by_id(self) -> Iterator[Held]:
        """Yields groups by id, ascending."""
        ...

    @property
    def lowest_unfinished(self) -> int | None:
        """The smallest id that is still being generated; None where none is."""
        ...

    def generating(self) -> Iterator[Generating]:
        """Yields the groups that are being generated, in the order in which they were started."""
        ...

    def generating_before(self, version: int) -> Iterator[Generating]:
        """Yields those of them that older weights than `version` began, the oldest first."""
        ...


class Sampler(Protocol):
    """Decides which groups start, which train next, and which have become too old."""

    @property
    def name(self) -> str:
        """The name in the configuration and in checkpoints."""
        ...

    @property
    def max_staleness(self) -> int | None:
        """Most versions between a group's weights and those it trains; None for no limit."""
        ...

    @property
    def drains(self) -> bool:
        """True if running groups end before engines get new weights."""
        ...

    def required_capacity(self, groups_per_step: int) -> int:
        """Groups that the buffer must hold, or nothing would ever train."""
        ...

    def room(self, admission: Admission) -> int:
        """Returns how many more groups may start now, apart from capacity and concurrency."""
        ...

    def select(self, ready: Ready, *, version: int, count: int) -> Sequence[Held]:
        """Up to `count` groups for the step that makes `version` + 1, the best first."""
        ...

    def evict(self, ready: Ready, *, version: int) -> Sequence[Held]:
        """Complete groups that no step will take any more."""
        ...


class AbortingSampler(Sampler, Protocol):
    """A sampler that does not let every group run to its end; `abort` is all it has more."""

    def abort(self, ready: Ready, *, version: int) -> Sequence[Generating]:
        """Groups that are being generated, and that no step would take once they are complete.

        Their requests are cancelled, they count as evicted, and others take their places: `room`
        must not let any start that would be aborted at once.
        """
        ...


class Store(Protocol):
    """Checkpoints: the policy's own, and the state of the controller beside it."""

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """Write one, complete or not at all. The policy's weights do not change meanwhile."""
        ...

    async def restore(self) -> Mapping[str, Any] | None:
        """Restart lost ranks and load the newest checkpoint into them; its state.

        None where there is no checkpoint: then the ranks are as they were at the very beginning.
        """
        ...


class ControllerError(RuntimeError):
    """A run that cannot go on. Everything up to the last checkpoint is kept."""


class Stalled(ControllerError):
    """Nothing has made progress for as long as the settings allow, and work remains."""


class StepFailed(ControllerError):
    """An optimizer step that failed as often as the settings allow; it was undone each time."""


class PublishFailed(ControllerError):
    """Weights that could not be read or sent, as often as the settings allow, though engines are
    there to take them.
    """


class EnginesLost(RuntimeError):
    """No engine is left to sample, or to take new weights; the message says why, by engine."""


class PoisonedPrompt(ValueError):
    """A prompt that can never be answered; its group is dropped and reported."""
