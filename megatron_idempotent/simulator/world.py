"""The other parts of a controller: prompts, recipe, weights, store, data plane, logger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_idempotent.controller.data_plane import MemoryPlane
from megatron_idempotent.controller.protocol import LogprobsOf
from megatron_idempotent.controller.records import RolloutGroup
from megatron_idempotent.weights import Bucket, TensorInfo

from .faults import Faults, InjectedError
from .latency import uniform
from .policy import SimulatedPolicy, Update

#: Streams of random numbers, so that a group's fate is not that of its lengths.
_FLAT = 101


def _now() -> float:
    return asyncio.get_running_loop().time()


class SimulatedPrompts:
    """A number of prompts, each a number; 0 for no end."""

    def __init__(self, count: int = 0) -> None:
        self._count = count

    def prompt(self, index: int) -> int | None:
        """The prompt at a place: the place."""
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
        """The groups themselves."""
        return groups

    def batch(
        self,
        groups: Sequence[RolloutGroup],
        inputs: Any,
        logprobs: Mapping[LogprobsOf, Any],
    ) -> Sequence[RolloutGroup]:
        """The groups themselves."""
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
        self._newest: tuple[list[Update], str] | None = None

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
