"""An engine in memory that fails on request at every call: before it, within it and after it.

It keeps the rules of the protocol and nothing else: weights are written tensor by tensor, so that a
commit that ends half-way leaves a mixture, and serving one is noticed.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks._virtual_clock import run as run_virtually
from megatron_idempotent.rl.engines import (
    EngineDead,
    EngineError,
    EngineHealth,
    PauseMode,
    Request,
    Sample,
)
from megatron_idempotent.rl.engines.protocol import refuse_kv_scales
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
    sample = run_virtually(engine.generate(request))
    assert sample.versions == sample.logprobs, "serves a mixture, or another version than it says"
    return sample.versions[0]


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

    A response has `length(request)` tokens and takes `token_s` seconds for each. The log-prob of a
    token is the number that the weights have, so that versions can be held to the weights.

    Example: `MemoryEngine("a", faults={"commit": ["raises in the middle", "dies"]})`.
    """

    def __init__(
        self,
        name: str,
        faults: dict[str, list[str]] | None = None,
        *,
        token_s: float = 0.0,
        bucket_s: float = 0.0,
        length: Callable[[Request], float] = lambda request: 1,
    ) -> None:
        self.name = name
        self.faults = faults or {}
        self.token_s, self.bucket_s, self.length = token_s, bucket_s, length
        self.calls: list[str] = []
        self.fp8_cache = False
        self.kv_scales: dict[str, float] = {}
        self.decode_s = 0.0
        self.drawn = 0
        self.starts = self._aborts = self._running = 0
        self.dead = False
        self.start()

    def start(self) -> None:
        """Serve the weights of version 0; what was called before this fails."""
        self.starts += 1
        self.weights = tensors_of(0)
        self.version: int | None = 0
        self.paused = self.dirty = self.dead = self._draining = False
        self._committed_id = ""
        self._staged: tuple[WeightUpdate, dict[str, torch.Tensor]] | None = None
        self._before: tuple[int | None, dict[str, torch.Tensor]] | None = None

    def _live(self, start: int | None = None) -> None:
        if self.dead or start not in (None, self.starts):
            raise EngineDead(f"engine {self.name} does not answer")

    async def _call(self, method: str, when: str) -> None:
        """Bring about the fault at this point of a call, if there is one."""
        self._live()
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
        self._live()
        whole, start, aborts = self.length(request), self.starts, self._aborts
        most = min(max(whole - request.continued, 1), request.max_tokens)
        versions: list[int] = []
        numbers: list[float] = []
        while self.paused or self._draining:
            await asyncio.sleep(0.05)
            self._live(start)
        self._running += 1
        try:
            while len(versions) < most and aborts == self._aborts:
                if self.token_s:
                    await asyncio.sleep(self.token_s)
                while self.paused and aborts == self._aborts:
                    await asyncio.sleep(0.05)
                self._live(start)
                if aborts == self._aborts:
                    numbers.append(self._number())
                    versions.append(self.version or 0)
                    self.drawn += 1
        finally:
            self._running -= 1
        ends = request.continued + len(versions) >= whole
        return Sample(
            request_id=request.id,
            tokens=(1,) * len(versions),
            logprobs=tuple(numbers),
            versions=tuple(versions),
            finish_reason="abort" if len(versions) < most else "stop" if ends else "length",
        )

    def _number(self) -> float:
        """Return the number that all weights have; NaN if they are of two versions."""
        numbers = {float(self.weights[name][0]) - NAMES.index(name) for name in NAMES[1:]}
        return numbers.pop() if len(numbers) == 1 and not self.dirty else math.nan

    async def pause(self, mode: PauseMode = "keep") -> None:
        self.calls.append("pause")
        await self._call("pause", "before")
        if mode == "wait":
            self._draining = True
            while self._running and self._draining:
                await asyncio.sleep(0.05)
                self._live()
        self._aborts += mode == "abort"
        self.paused, self._draining = True, False
        await self._call("pause", "behind")

    async def resume(self) -> None:
        self.calls.append("resume")
        await self._call("resume", "before")
        if self.dirty:
            raise EngineError(f"engine {self.name} is DIRTY")
        self.paused = self._draining = False
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
        start = self.starts
        staging = Staging(update, expected=INFOS, served=self.weights.__getitem__)
        async for bucket in buckets:
            await asyncio.sleep(self.bucket_s)
            self._live(start)
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
