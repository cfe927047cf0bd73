"""Engines on the trainer's own devices: weights, load, cache, and only then requests."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence

import pytest

pytest.importorskip("torch")

from memory_engine import QUICK, MemoryEngine, serves, sync, update

from megatron_idempotent.rl.engines import EngineError, EngineHealth
from megatron_idempotent.rl.sync import SyncFailed
from megatron_idempotent.rl.weights import Bucket, WeightUpdate

COLOCATED = dataclasses.replace(QUICK, colocated=True)


class Sleeper(MemoryEngine):
    """Has neither weights nor cache until they are woken."""

    def __init__(self, name: str, faults: dict[str, list[str]] | None = None) -> None:
        super().__init__(name, faults)
        self.awake: list[str] = []
        self.paused = True
        self.version = None

    async def sleep(self) -> None:
        self.awake, self.paused, self.version = [], True, None

    async def wake(self, tags: Sequence[str]) -> None:
        for tag in tags:
            self.calls.append(f"wake {tag}")
            await self._call(f"wake {tag}", "before")
            self.awake.append(tag)
            await self._call(f"wake {tag}", "behind")

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        assert self.awake == ["weights"]
        await super().stage(update, buckets)

    async def resume(self) -> None:
        if self.awake != ["weights", "kv_cache"]:
            raise EngineError("no memory for requests")
        await super().resume()

    async def health(self) -> EngineHealth:
        health = await super().health()
        if self.version is None and health.status == "PAUSED":
            return EngineHealth(status="DIRTY", version=None, detail="asleep: without weights")
        return health


@pytest.mark.parametrize("lost", [False, True])
def test_weights_are_woken_then_loaded_then_the_cache_is_woken(lost: bool) -> None:
    # An engine that is awake all the same, and only its answer is lost, counts.
    engine = Sleeper("a", {"wake kv_cache": ["done, then raises"] if lost else []})
    report = update(sync([engine], settings=COLOCATED), 1)
    *before, last = engine.calls
    woken = ["wake weights", "stage", "pause", "commit", "wake kv_cache"]
    assert (before, last) == (woken + ["rollback"] * lost, "resume")
    assert report.named("committed") == ("a",)
    assert serves(engine) == 1


@pytest.mark.parametrize("at", ["weights", "kv_cache"])
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_an_engine_that_cannot_wake_is_not_resumed(at: str, how: str) -> None:
    engine = Sleeper("a", {f"wake {at}": [how]})
    with pytest.raises(SyncFailed, match=f"a is quarantined: waking its {at} failed"):
        update(sync([engine], settings=COLOCATED), 1)
    assert engine.paused


def test_engines_that_cannot_sleep_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engines that cannot sleep: \['b'\]"):
        sync([Sleeper("a"), MemoryEngine("b")], settings=COLOCATED)
