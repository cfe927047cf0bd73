"""The trainer's side of a simulation: a policy that learns nothing, and the other parts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_idempotent.controller.data_plane import MemoryPlane
from megatron_idempotent.controller.protocol import LogprobsOf, RolloutGroup, StepOutcome
from megatron_idempotent.settings import Field, settings
from megatron_idempotent.weights import Bucket, TensorInfo
from megatron_idempotent.workers.protocol import RanksLost

from .faults import Fault, Faults, InjectedError
from .latency import uniform


@settings(ValueError, "train.")
class TrainCosts:
    """Virtual seconds of the trainer. Tokens are those of responses, not of prompts."""

    begin_s: float = Field(default=0.0, ge=0)
    logprobs_token_s: float = Field(default=0.0, ge=0)
    """Per token and model."""
    microbatch_s: float = Field(default=0.0, ge=0)
    """Per call, of however many groups."""
    token_s: float = Field(default=1e-5, ge=0)
    """Seconds of a forward and a backward, per token."""
    finish_s: float = Field(default=0.5, ge=0)
    """Reduction and update."""
    abort_s: float = Field(default=0.1, ge=0)
    restore_s: float = Field(default=60.0, ge=0)
    """Fresh ranks, and a checkpoint in them."""
    save_s: float = Field(default=5.0, ge=0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """One optimizer step that is in the weights. Example: `policy.updates[-1].group_ids`."""

    group_ids: tuple[int, ...]
    lags: tuple[int, ...]
    """Versions between the oldest weights of each group's tokens and those that it trained."""
    entries: int
    """Entries of all samples."""


class BrokenRule(AssertionError):
    """A caller broke a rule of `Policy`, or a group would count twice."""


class SimulatedPolicy:
    """A `Policy` that knows which groups are in its weights, and refuses one a second time.

    Example: `SimulatedPolicy(TrainCosts(), tokens_per_entry=64).updates`.
    """

    def __init__(
        self, costs: TrainCosts, *, tokens_per_entry: int = 1, faults: Faults | None = None
    ) -> None:
        self.costs = costs
        self.busy_s = 0.0
        """Seconds in calls that did something, also of steps that were aborted."""
        self.updates: list[SimulatedStep] = []
        """The updates in its weights, those of a restored checkpoint included."""
        self.lost = False
        """True if ranks are gone; `restart` brings them back."""
        self.aborted = 0
        """Open steps that were undone."""
        self._tokens_per_entry = tokens_per_entry
        self._faults = faults or Faults(())
        self._trained: set[int] = set()
        self._open = ""
        self._groups: dict[str, tuple[RolloutGroup, ...]] = {}
        self._finished: dict[str, StepOutcome] = {}

    @property
    def version(self) -> int:
        """Updates in its weights."""
        return len(self.updates)

    def has(self, group_id: int) -> bool:
        """Returns whether a group is in its weights."""
        return group_id in self._trained

    async def begin(self, step_id: str) -> None:
        """See the protocol."""
        fault = await self._call("begin", self.costs.begin_s)
        if self._open and self._open != step_id:
            raise BrokenRule(f"begin({step_id}) while step {self._open} is open")
        if step_id in self._finished:
            raise BrokenRule(f"begin({step_id}) after its finish")
        self._open = step_id
        self._behind(fault)

    async def logprobs(self, batch: Any, which: LogprobsOf) -> Any:
        """See the protocol; nothing, in as long as it takes."""
        fault = await self._call("logprobs", self.costs.logprobs_token_s * self._tokens(batch))
        self._behind(fault)

    async def microbatch(self, step_id: str, batch: Any, *, microbatch_id: str, last: bool) -> None:
        """See the protocol; `batch` has the groups."""
        del last
        seconds = self.costs.microbatch_s + self.costs.token_s * self._tokens(batch)
        fault = await self._call("microbatch", seconds)
        if step_id != self._open:
            raise BrokenRule(f"microbatch of {step_id}, and {self._open or 'no step'} is open")
        others = {
            each.id
            for name, groups in self._groups.items()
            for each in groups
            if name != microbatch_id
        }
        for group in batch:
            if group.id in others:
                raise BrokenRule(f"group {group.id} is in step {step_id} twice")
            if group.id in self._trained:
                raise BrokenRule(f"group {group.id} is in the weights already")
        self._groups[microbatch_id] = tuple(batch)
        self._behind(fault)

    async def finish(self, step_id: str) -> StepOutcome:
        """See the protocol."""
        if step_id in self._finished:
            return self._finished[step_id]
        fault = await self._call("finish", self.costs.finish_s)
        if step_id != self._open:
            raise BrokenRule(f"finish of {step_id}, and {self._open or 'no step'} is open")
        groups = [group for together in self._groups.values() for group in together]
        update = SimulatedStep(
            group_ids=tuple(group.id for group in groups),
            lags=tuple(self.version - group.oldest_version for group in groups),
            entries=sum(group.tokens for group in groups),
        )
        outcome = StepOutcome(
            updated=bool(groups),
            tokens=update.entries * self._tokens_per_entry,
        )
        self.updates.append(update)
        self._trained.update(update.group_ids)
        self._finished = {step_id: outcome}
        self._close()
        self._behind(fault)
        return outcome

    async def abort(self, step_id: str | None = None) -> None:
        """See the protocol. A finished step stays finished."""
        fault = await self._call("abort", self.costs.abort_s if self._open else 0.0)
        if self._open and step_id in (None, self._open):
            self.aborted += 1
            self._close()
        self._behind(fault)

    def lose(self) -> None:
        """Lose all ranks, and what they had with them."""
        self.lost = True
        self._close()

    def restart(self, updates: list[SimulatedStep]) -> None:
        """Fresh ranks, with the weights that those updates made."""
        self.lost = False
        self.updates = list(updates)
        self._trained = {group_id for update in updates for group_id in update.group_ids}
        self._finished = {}
        self._close()

    def _close(self) -> None:
        self._open = ""
        self._groups = {}

    def _tokens(self, groups: Sequence[RolloutGroup]) -> int:
        return sum(group.tokens for group in groups) * self._tokens_per_entry

    async def _call(self, call: str, seconds: float) -> Fault | None:
        """Takes the time; returns the fault that is to happen after it, if there is one."""
        if self.lost:
            raise RanksLost("the simulated ranks are gone")
        fault = self._faults.due("policy", asyncio.get_running_loop().time(), call=call)
        if fault is not None and fault.kind == "hangs":
            await asyncio.get_running_loop().create_future()
        if seconds:
            started = asyncio.get_running_loop().time()
            try:
                await asyncio.sleep(seconds)
            finally:
                self.busy_s += asyncio.get_running_loop().time() - started
        if fault is not None and fault.kind == "ranks lost":
            self.lose()
            raise RanksLost(f"{call}: a simulated rank died")
        if fault is not None and fault.kind == "raises":
            raise InjectedError(f"{call} fails")
        return fault

    def _behind(self, fault: Fault | None) -> None:
        if fault is not None:
            raise InjectedError("it was carried out, and then it failed")


#: Streams of random numbers, so that a group's fate is not that of its lengths.
_FLAT = 101


def _now() -> float:
    return asyncio.get_running_loop().time()


class SimulatedPrompts:
    """A number of prompts, each a number; 0 for no end."""

    def __init__(self, count: int = 0) -> None:
        self._count = count

    def prompt(self, index: int) -> int | None:
        """Return the prompt at a place: the place."""
        return None if self._count and index >= self._count else index

    def epoch(self, index: int) -> int:
        """Always the first."""
        del index
        return 0


class SimulatedRecipe:
    """Rejects a share of the groups, as those without spread of rewards are; the others train."""

    def __init__(self, *, seed: int, filtered: float) -> None:
        self._seed = seed
        self._filtered = filtered
        self.filtered_entries = 0

    def rejects(self, group: RolloutGroup) -> str:
        """Rejects by id, so that it is the same group in every run."""
        if self._filtered and uniform(self._seed, _FLAT, group.id) < self._filtered:
            self.filtered_entries += group.tokens
            return "flat"
        return ""

    def inputs(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """Return the groups themselves."""
        return groups

    def batch(
        self,
        groups: Sequence[RolloutGroup],
        inputs: Any,
        logprobs: Mapping[LogprobsOf, Any],
    ) -> Sequence[RolloutGroup]:
        """Return the groups themselves."""
        del inputs, logprobs
        return groups

    def metrics(self, groups: Sequence[RolloutGroup], version: int) -> Mapping[str, float]:
        """Their mean reward."""
        del version
        rewards = [reward for group in groups for reward in group.rewards]
        return {"reward": sum(rewards) / max(len(rewards), 1)}


class SimulatedWeights:
    """A `WeightSource` of buckets without tensors; what they cost, the engines say."""

    def __init__(self, buckets: int, faults: Faults) -> None:
        self._buckets = buckets
        self._faults = faults

    def tensors(self) -> tuple[TensorInfo, ...]:
        """None."""
        return ()

    def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
        """Yields as many buckets as were asked for."""
        del bucket_bytes
        for index in range(self._buckets):
            if self._faults.due("weights", _now()):
                raise InjectedError("the export of the weights fails")
            yield Bucket(index=index, tensors={}, checksums={})


class MemoryStore:
    """Checkpoints in memory, as the JSON that a file would hold; the newest one is kept."""

    def __init__(self, policy: SimulatedPolicy) -> None:
        self.saved = self.restored = 0
        self._policy = policy
        self._newest: tuple[list[SimulatedStep], str] | None = None

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """See the protocol."""
        updates = list(self._policy.updates)
        if len(updates) != version:
            raise AssertionError(f"version {version} is saved, and the policy has {len(updates)}")
        await asyncio.sleep(self._policy.costs.save_s)
        self._newest = updates, json.dumps(state)
        self.saved += 1

    async def restore(self) -> Mapping[str, Any] | None:
        """See the protocol."""
        await asyncio.sleep(self._policy.costs.restore_s)
        self.restored += 1
        updates, state = self._newest or ([], "null")
        self._policy.restart(updates)
        found: Mapping[str, Any] | None = json.loads(state)
        return found


class CountingPlane(MemoryPlane):
    """The controller's own data plane; it knows how much was thrown away, and can fail."""

    def __init__(self, policy: SimulatedPolicy, faults: Faults) -> None:
        super().__init__()
        self.evicted_entries = 0
        """Entries of groups that were cleared and are in no update."""
        self.clears = 0
        """Groups that were there and are cleared."""
        self._policy = policy
        self._faults = faults

    @property
    def entries(self) -> int:
        """Returns the entries of the groups that are there."""
        return sum(group.tokens for group in self._groups.values())

    async def put(self, group: RolloutGroup) -> None:
        """See the protocol."""
        fault = self._fault("put")
        await super().put(group)
        if fault:
            raise InjectedError("put was carried out, and then it failed")

    async def get(self, group_id: int) -> RolloutGroup:
        """See the protocol."""
        self._fault("get")
        return await super().get(group_id)

    async def clear(self, group_ids: Sequence[int]) -> None:
        """See the protocol."""
        fault = self._fault("clear")
        for group_id in group_ids:
            group = self._groups.get(group_id)
            if group is not None:
                self.clears += 1
                if not self._policy.has(group_id):
                    self.evicted_entries += group.tokens
        await super().clear(group_ids)
        if fault:
            raise InjectedError("clear was carried out, and then it failed")

    def _fault(self, call: str) -> bool:
        """Returns whether it is to fail after the call. Errors: `InjectedError` before it."""
        fault = self._faults.due("plane", _now(), call=call)
        if fault is not None and fault.kind == "raises":
            raise InjectedError(f"{call} fails")
        return fault is not None


class Recorder:
    """A logger that keeps the last row, and when each of them came."""

    def __init__(self) -> None:
        self.last: Mapping[str, float] = {}
        self.ends_s: list[float] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """See the protocol."""
        if step:
            self.last = dict(metrics)
            self.ends_s.append(_now())

    def close(self) -> None:
        """Nothing to close."""


class FaultyLogger:
    """A logger that fails where it is to, and does nothing else."""

    def __init__(self, faults: Faults) -> None:
        self.rows = 0
        self._faults = faults

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """See the protocol."""
        del metrics, step
        if self._faults.due("logger", _now()):
            raise InjectedError("the logger's disk is full")
        self.rows += 1

    def close(self) -> None:
        """Nothing to close."""
