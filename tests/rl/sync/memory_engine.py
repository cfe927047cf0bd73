"""An engine in memory that fails on request at every call: before it, within it and after it.

It keeps the rules of the protocol and nothing else: weights are written tensor by tensor, so that a
commit that ends half-way leaves a mixture, and serving one is noticed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import torch

from megatron_idempotent.rl.engines import (
    EngineDead,
    EngineError,
    EngineHealth,
    PauseMode,
    Request,
    Sample,
)
from megatron_idempotent.rl.engines.protocol import refuse_kv_scales
from megatron_idempotent.rl.simulator.clock import run as run_virtually
from megatron_idempotent.rl.sync import SyncReport, SyncSettings, WeightSync
from megatron_idempotent.rl.weights import Bucket, Staging, TensorInfo, UpdateRefused, WeightUpdate
from megatron_idempotent.rl.weights.deltas import Patch

NAMES = ("a", "b", "c", "d")
SIZE = 256
INFOS = tuple(TensorInfo(name=name, shape=(SIZE,), dtype=torch.float32) for name in NAMES)
FAULTS = ("raises", "raises in the middle", "done, then raises", "hangs", "dies")

LIMITS = ("bucket", "stage", "pause", "commit", "resume")


def limits(seconds: float) -> SyncSettings:
    """The same limit for all, and ten times as much for staging."""
    every = {f"{name}_timeout_s": seconds * (10 if name == "stage" else 1) for name in LIMITS}
    return SyncSettings(**every, retry_wait_s=seconds / 200)


QUICK = limits(0.2)


def serves(engine: MemoryEngine) -> int:
    """The version of what it serves, which is of one version only."""
    request = Request(id="r", prompt=(1,), max_tokens=1)
    return run_virtually(engine.generate(request)).versions[0]


def three(**faults: list[str]) -> list[MemoryEngine]:
    """Three engines, of which the middle one fails."""
    return [MemoryEngine("a"), MemoryEngine("b", faults), MemoryEngine("c")]


def sync(engines: Sequence[MemoryEngine], **more: Any) -> WeightSync:
    """A sync of engines, with short limits."""
    return WeightSync(engines, **{"settings": QUICK, **more})


def update(one: WeightSync, version: int, **more: Any) -> SyncReport:
    """One update of all engines, in virtual time."""
    return run_virtually(one.update(Source(version), version, **more))


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    """All weights of a version; of the others than `a` the first 8 elements change."""
    tensors = {name: torch.full((SIZE,), float(index)) for index, name in enumerate(NAMES)}
    for name in NAMES[1:]:
        tensors[name][:8] += version
    return tensors


class Source:
    """One tensor per bucket; `made` counts them, and `closed` says that an iteration was ended."""

    def __init__(self, version: int, *, fails_at: int | None = None) -> None:
        self.version = version
        self.made = 0
        self.closed = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.being_made = threading.Event()
        self._fails_at = fails_at
        self._left = list(tensors_of(version).items())

    def tensors(self) -> tuple[TensorInfo, ...]:
        return INFOS

    def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
        return self

    def __iter__(self) -> Iterator[Bucket]:
        return self

    def __next__(self) -> Bucket:
        if not self._left:
            raise StopIteration
        if self.made == self._fails_at:
            raise OSError("the other rank is gone")
        self.being_made.set()
        self.may_go_on.wait(20)
        self.being_made.clear()
        name, tensor = self._left.pop(0)
        self.made += 1
        return Bucket.of(self.made - 1, {name: tensor})

    def close(self) -> None:
        assert not self.being_made.is_set(), "closed while a bucket was being made"
        self.closed = True


class MemoryEngine:
    """`faults` maps a method to what goes wrong there, once for each entry of the list.

    Example: `MemoryEngine("a", faults={"commit": ["raises in the middle", "dies"]})`.
    """

    def __init__(self, name: str, faults: dict[str, list[str]] | None = None) -> None:
        self.name = name
        self.faults = faults or {}
        self.calls: list[str] = []
        self.weights = tensors_of(0)
        self.version: int | None = 0
        self.paused = self.dirty = self.dead = False
        self.served: list[int] = []
        self.fp8_cache = False
        self.kv_scales: dict[str, float] = {}
        self.decode_s = 0.0
        self._committed_id = ""
        self._staged: tuple[WeightUpdate, dict[str, torch.Tensor]] | None = None
        self._before: tuple[int | None, dict[str, torch.Tensor]] | None = None

    async def _call(self, method: str, when: str) -> None:
        """Return the fault at this point of a call, if there is one."""
        if self.dead:
            raise EngineDead(f"engine {self.name} does not answer")
        due = self.faults.get(method, [])
        fault = due[0] if due else ""
        points = {
            "before": ("raises", "hangs", "dies"),
            "middle": FAULTS[1:2],
            "behind": FAULTS[2:3],
        }
        if fault not in points[when]:
            return
        due.pop(0)
        if fault == "hangs":
            await asyncio.sleep(3600)
        if fault == "dies":
            self.dead = True
            raise EngineDead(f"engine {self.name} does not answer")
        raise EngineError(f"engine {self.name}: {method} {fault}")

    async def generate(self, request: Request) -> Sample:
        assert (self.paused, self.dirty, self.dead) == (False, False, False)
        values = {float(self.weights[name][0]) - NAMES.index(name) for name in NAMES[1:]}
        assert len(values) == 1, f"serves a mixture: {values}"
        assert values == {float(self.version or 0)}, "serves another version than it says"
        return Sample(
            request_id=request.id,
            tokens=(1,),
            logprobs=(0.0,),
            versions=(int(values.pop()),),
            finish_reason="length",
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        self.calls.append("pause")
        await self._call("pause", "before")
        self.paused = True
        await self._call("pause", "behind")

    async def resume(self) -> None:
        self.calls.append("resume")
        await self._call("resume", "before")
        if self.dirty:
            raise EngineError(f"engine {self.name} is DIRTY")
        self.paused = False
        await self._call("resume", "behind")

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        self.calls.append("stage")
        await self._call("stage", "before")
        if update.id == self._committed_id:
            return
        if not self.fp8_cache:
            refuse_kv_scales(self.name, update, "it has no cache")
        self._staged = None
        if self.version is not None and update.version <= self.version:
            raise UpdateRefused(f"engine {self.name} has version {self.version}")
        if update.base_version not in (None, self.version):
            raise UpdateRefused(f"engine {self.name} has version {self.version}")
        staging = Staging(update, expected=INFOS, served=self.weights.__getitem__)
        async for bucket in buckets:
            staging.add(bucket)
            await self._call("stage", "middle")
        self._staged = update, dict(staging.complete())
        self.decode_s = staging.decode_s
        await self._call("stage", "behind")

    async def commit(self, update_id: str) -> int:
        self.calls.append("commit")
        await self._call("commit", "before")
        if update_id == self._committed_id:
            assert self.version is not None
            return self.version
        if self._staged is None or self._staged[0].id != update_id:
            raise EngineError(f"engine {self.name} has not staged {update_id}")
        if not self.paused:
            raise EngineError(f"engine {self.name} is not paused")
        update, tensors = self._staged
        if not self.dirty:
            self._before = self.version, dict(self.weights)
        self.dirty, self.version = True, None
        for name, tensor in tensors.items():
            self.weights[name] = tensor.made() if isinstance(tensor, Patch) else tensor.clone()
            if name == "b":
                await self._call("commit", "middle")
        self.dirty, self.version = False, update.version
        self.kv_scales = dict(update.kv_scales or self.kv_scales)
        self._committed_id, self._staged = update_id, None
        await self._call("commit", "behind")
        return update.version

    async def rollback(self, update_id: str) -> None:
        self.calls.append("rollback")
        await self._call("rollback", "before")
        if self._staged is None or self._staged[0].id != update_id:
            return
        self._staged = None
        if self.dirty and self._before is not None:
            self.version, self.weights = self._before
            self.dirty = False
        await self._call("rollback", "behind")

    async def health(self) -> EngineHealth:
        if self.dead:
            return EngineHealth(status="DEAD", version=None, detail="does not answer")
        if self.dirty:
            return EngineHealth(status="DIRTY", version=None, detail="half committed")
        status = "PAUSED" if self.paused else "SERVING"
        return EngineHealth(status=status, version=self.version, decode_s=self.decode_s)

    async def close(self) -> None:
        self.dead = True
