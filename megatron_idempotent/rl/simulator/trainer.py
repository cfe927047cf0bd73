"""Simulates the trainer's side: a policy that learns nothing, prompts, recipe, store, logger."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from megatron_idempotent.rl.controller.data_plane import MemoryPlane
from megatron_idempotent.rl.controller.protocol import LogprobsOf, RolloutGroup, StepOutcome
from megatron_idempotent.rl.weights import Bucket, TensorInfo
from megatron_idempotent.rl.workers.protocol import RanksLost
from megatron_idempotent.settings import Field, settings

from .faults import Faults, InjectedError, failing
from .latency import uniform


@settings(ValueError, "train.")
class TrainCosts:
    """Sets the virtual time that the trainer's work takes. Prompts' tokens cost nothing."""

    begin_s: float = Field(default=0.0, ge=0)
    """Seconds to begin a step."""
    logprobs_token_s: float = Field(default=0.0, ge=0)
    """Seconds of log-probs, per response token and model."""
    microbatch_s: float = Field(default=0.0, ge=0)
    """Seconds that each call of `microbatch` takes besides those of its tokens."""
    token_s: float = Field(default=1e-5, ge=0)
    """Seconds of forward and backward, per response token."""
    finish_s: float = Field(default=0.5, ge=0)
    """Seconds of a step's reduction and update."""
    abort_s: float = Field(default=0.1, ge=0)
    """Seconds to undo a step."""
    restore_s: float = Field(default=60.0, ge=0)
    """Seconds to start fresh ranks and load a checkpoint into them."""
    save_s: float = Field(default=5.0, ge=0)
    """Seconds to write a checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """Records an optimizer step that is in the weights. Example: `policy.updates[-1].group_ids`."""

    group_ids: tuple[int, ...]
    """Ids of the groups that it trained."""
    lags: tuple[int, ...]
    """Each group's staleness: versions between the oldest weights of its tokens and those that it
    trained."""
    entries: int
    """Number of entries in all samples of these groups."""


class BrokenRule(AssertionError):
    """A caller broke a rule of `Policy`, or a group would count twice."""


class SimulatedPolicy:
    """Implements `Policy` in virtual time; it raises if a group would train a second time.

    Example: `SimulatedPolicy(TrainCosts(), tokens_per_entry=64).updates`.
    """

    def __init__(
        self, costs: TrainCosts, *, tokens_per_entry: int = 1, faults: Faults | None = None
    ) -> None:
        self.costs = costs
        self.busy_s = 0.0
        """Virtual seconds that calls took, those of aborted steps included."""
        self.updates: list[SimulatedStep] = []
        """The steps in its weights, those of a restored checkpoint included."""
        self.lost = False
        """True if ranks are gone; `restart` brings them back."""
        self.aborted = 0
        """Number of open steps that were undone."""
        self._tokens_per_entry = tokens_per_entry
        self._faults = faults or Faults(())
        self._trained: set[int] = set()
        self._open = ""
        self._groups: dict[str, tuple[RolloutGroup, ...]] = {}
        self._finished: dict[str, StepOutcome] = {}

    @property
    def version(self) -> int:
        """The number of steps in its weights."""
        return len(self.updates)

    def has(self, group_id: int) -> bool:
        """Return whether a group has trained its weights."""
        return group_id in self._trained

    async def begin(self, step_id: str) -> None:
        """Open a step; see `Policy.begin`. Errors: `BrokenRule` if another one is open."""
        with await self._call("begin", self.costs.begin_s):
            if self._open and self._open != step_id:
                raise BrokenRule(f"begin({step_id}) while step {self._open} is open")
            if step_id in self._finished:
                raise BrokenRule(f"begin({step_id}) after its finish")
            self._open = step_id

    async def logprobs(self, batch: Any, which: LogprobsOf) -> Any:
        """Take the time of computing log-probs, and return None."""
        with await self._call("logprobs", self.costs.logprobs_token_s * self._tokens(batch)):
            return None

    async def microbatch(self, step_id: str, batch: Any, *, microbatch_id: str, last: bool) -> None:
        """Note the groups in `batch`, in the time of forward and backward; see `Policy.microbatch`.

        Errors: `BrokenRule` if the step is not open, or a group is in it or in the weights already.
        """
        del last
        seconds = self.costs.microbatch_s + self.costs.token_s * self._tokens(batch)
        with await self._call("microbatch", seconds):
            if step_id != self._open:
                raise BrokenRule(f"microbatch of {step_id} while {self._open or 'no step'} is open")
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

    async def finish(self, step_id: str) -> StepOutcome:
        """Count the open step's groups as trained; see `Policy.finish`.

        Errors: `BrokenRule` if the step is not open.
        """
        if step_id in self._finished:
            return self._finished[step_id]
        with await self._call("finish", self.costs.finish_s):
            if step_id != self._open:
                raise BrokenRule(f"finish of {step_id} while {self._open or 'no step'} is open")
            groups = [group for together in self._groups.values() for group in together]
            update = SimulatedStep(
                group_ids=tuple(group.id for group in groups),
                lags=tuple(self.version - group.oldest_version for group in groups),
                entries=sum(group.tokens for group in groups),
            )
            tokens = update.entries * self._tokens_per_entry
            outcome = StepOutcome(updated=bool(groups), tokens=tokens)
            self.updates.append(update)
            self._trained.update(update.group_ids)
            self._finished = {step_id: outcome}
            self._close()
        return outcome

    async def abort(self, step_id: str | None = None) -> None:
        """Undo the open step; a finished one stays finished. See `Policy.abort`."""
        with await self._call("abort", self.costs.abort_s if self._open else 0.0):
            if self._open and step_id in (None, self._open):
                self.aborted += 1
                self._close()

    def lose(self) -> None:
        """Lose all ranks and the open step; all calls raise `RanksLost` until `restart`."""
        self.lost = True
        self._close()

    def restart(self, updates: list[SimulatedStep]) -> None:
        """Start fresh ranks whose weights have had these steps."""
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

    async def _call(self, call: str, seconds: float) -> AbstractContextManager[None]:
        """Take the time of a call; return a context for what it does, which a fault may end.

        Errors: `RanksLost`.
        """
        if self.lost:
            raise RanksLost(f"{call}: the simulated ranks are gone; restore them first")
        fault = self._faults.due("policy", call=call)
        if fault is not None and fault.kind == "hangs":
            await asyncio.get_running_loop().create_future()
        if seconds:
            started = _now()
            try:
                await asyncio.sleep(seconds)
            finally:
                self.busy_s += _now() - started
        if fault is not None and fault.kind == "ranks lost":
            self.lose()
            raise RanksLost(f"{call}: a simulated rank died")
        return failing(fault, call)


#: Streams of random numbers, so that a group's fate is not that of its lengths.
_FLAT = 101


def _now() -> float:
    return asyncio.get_running_loop().time()


class SimulatedPrompts:
    """Implements `Prompts`: each prompt is its own index; a `count` of 0 has no end."""

    def __init__(self, count: int = 0) -> None:
        self._count = count

    def prompt(self, index: int) -> int | None:
        """Return the index itself, or None after the last one."""
        return None if self._count and index >= self._count else index

    def epoch(self, index: int) -> int:
        """Return 0: the data counts as used once."""
        del index
        return 0


class SimulatedRecipe:
    """Implements `Recipe`: rejects the share `filtered` of the groups, and passes on the others."""

    def __init__(self, *, seed: int, filtered: float) -> None:
        self._seed = seed
        self._filtered = filtered
        self.filtered_entries = 0

    def rejects(self, group: RolloutGroup) -> str:
        """Return "flat" for a rejected group and "" for others; seed and id alone decide."""
        if self._filtered and uniform(self._seed, _FLAT, group.id) < self._filtered:
            self.filtered_entries += group.tokens
            return "flat"
        return ""

    def inputs(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        """Return the groups themselves."""
        return groups

    def batch(
        self, groups: Sequence[RolloutGroup], inputs: Any, logprobs: Mapping[LogprobsOf, Any]
    ) -> Sequence[RolloutGroup]:
        """Return the groups themselves."""
        del inputs, logprobs
        return groups

    def metrics(self, groups: Sequence[RolloutGroup], version: int) -> Mapping[str, float]:
        """Return the mean reward of the groups' samples."""
        del version
        rewards = [reward for group in groups for reward in group.rewards]
        return {"reward": sum(rewards) / max(len(rewards), 1)}


class SimulatedWeights:
    """Implements `WeightSource` with buckets that have no tensors; engines take time for them."""

    def __init__(self, buckets: int, faults: Faults) -> None:
        self._buckets = buckets
        self._faults = faults

    def tensors(self) -> tuple[TensorInfo, ...]:
        """Return no tensors."""
        return ()

    def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
        """Yield the buckets, whatever `bucket_bytes` is. Errors: `InjectedError` for a fault."""
        del bucket_bytes
        for index in range(self._buckets):
            if self._faults.due("weights"):
                raise InjectedError("the export of the weights fails")
            yield Bucket(index=index, tensors={}, checksums={})


class MemoryStore:
    """Implements `Store` in memory: keeps the newest checkpoint, its state as JSON."""

    def __init__(self, policy: SimulatedPolicy) -> None:
        self.restored = 0
        self._policy = policy
        self._newest: tuple[list[SimulatedStep], str] | None = None

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        """Keep the policy's steps and `state`, in the time of a write; see `Store.save`."""
        updates = list(self._policy.updates)
        if len(updates) != version:
            raise AssertionError(f"version {version} is saved, and the policy has {len(updates)}")
        await asyncio.sleep(self._policy.costs.save_s)
        self._newest = updates, json.dumps(state)

    async def restore(self) -> Mapping[str, Any] | None:
        """Restart the policy with the newest checkpoint's steps; returns its state, or None."""
        await asyncio.sleep(self._policy.costs.restore_s)
        self.restored += 1
        updates, state = self._newest or ([], "null")
        self._policy.restart(updates)
        found: Mapping[str, Any] | None = json.loads(state)
        return found


class CountingPlane(MemoryPlane):
    """Adds counts of cleared groups, and faults, to the controller's data plane in memory."""

    def __init__(self, policy: SimulatedPolicy, faults: Faults) -> None:
        super().__init__()
        self.evicted_entries = 0
        """Number of entries in groups that were cleared without being in the weights."""
        self.clears = 0
        """Number of groups that were in the data plane and were cleared."""
        self._policy = policy
        self._faults = faults

    @property
    def entries(self) -> int:
        """The number of entries in the groups that are there."""
        return sum(group.tokens for group in self._groups.values())

    async def put(self, group: RolloutGroup) -> None:
        """Keep a group; see `DataPlane.put`. Errors: `InjectedError` for a fault."""
        with failing(self._faults.due("plane", call="put"), "put"):
            await super().put(group)

    async def get(self, group_id: int) -> RolloutGroup:
        """Return a group; see `DataPlane.get`. Errors: `InjectedError` for a fault."""
        with failing(self._faults.due("plane", call="get"), "get"):
            return await super().get(group_id)

    async def clear(self, group_ids: Sequence[int]) -> None:
        """Forget and count groups; see `DataPlane.clear`. Errors: `InjectedError` for a fault."""
        with failing(self._faults.due("plane", call="clear"), "clear"):
            for group_id in group_ids:
                group = self._groups.get(group_id)
                if group is not None:
                    self.clears += 1
                    if not self._policy.has(group_id):
                        self.evicted_entries += group.tokens
            await super().clear(group_ids)


class Recorder:
    """Implements `Logger`: keeps the last row, and the times at which rows came."""

    def __init__(self) -> None:
        self.last: Mapping[str, float] = {}
        """The metrics of the last optimizer step; empty before the first."""
        self.ends_s: list[float] = []
        """The virtual second at which each optimizer step's row came."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep a row of an optimizer step; ignore that of version 0."""
        if step:
            self.last = dict(metrics)
            self.ends_s.append(_now())

    def close(self) -> None:
        """Do nothing."""
