"""Engines on the trainer's own devices: weights, load, cache, and only then requests."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

pytest.importorskip("torch")

from memory_engine import QUICK, MemoryEngine, Source, serves

from megatron_idempotent.rl.engines import EngineError, EngineHealth, Request
from megatron_idempotent.rl.sync import SyncFailed, WeightSync
from megatron_idempotent.rl.weights import Bucket, TensorInfo, WeightUpdate

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
        self.calls += [f"wake {tag}" for tag in tags]
        await self._call("wake", "before")
        self.awake += tags

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


def test_weights_are_woken_then_loaded_then_the_cache_is_woken() -> None:
    engine = Sleeper("a")
    report = asyncio.run(WeightSync([engine], settings=COLOCATED).update(Source(1), 1))
    assert engine.calls == ["wake weights", "stage", "pause", "commit", "wake kv_cache", "resume"]
    assert report.named("committed") == ("a",)
    assert serves(engine) == 1


@pytest.mark.parametrize("fails", [0, 1])
def test_an_engine_that_cannot_wake_is_not_resumed(fails: int) -> None:
    engine = Sleeper("a", {"wake": ["hangs"] if fails == 0 else []})
    if fails:
        engine.faults["commit"] = []

        async def wake(tags: Sequence[str]) -> None:
            if "kv_cache" in tags:
                raise EngineError("no memory left")
            engine.awake += tags

        engine.wake = wake  # type: ignore[method-assign]
    with pytest.raises(SyncFailed, match="a is quarantined: waking its"):
        asyncio.run(WeightSync([engine], settings=COLOCATED).update(Source(1), 1))
    assert engine.paused


def test_an_engine_that_serves_the_new_weights_all_the_same_counts() -> None:
    engine = Sleeper("a")

    async def wake(tags: Sequence[str]) -> None:
        engine.awake += tags
        if "kv_cache" in tags:
            raise EngineError("the answer was lost")

    engine.wake = wake  # type: ignore[method-assign]
    report = asyncio.run(WeightSync([engine], settings=COLOCATED).update(Source(1), 1))
    assert report.engines["a"].outcome == "committed"
    assert serves(engine) == 1


def test_engines_that_cannot_sleep_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engines that cannot sleep: \['b'\]"):
        WeightSync([Sleeper("a"), MemoryEngine("b")], settings=COLOCATED)


def test_a_real_engine_wakes_with_the_new_weights() -> None:
    transformers = pytest.importorskip("transformers")
    from megatron_idempotent.rl.engines.transformers import TransformersEngine

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    new = {name: tensor.detach() * 2 for name, tensor in model.state_dict().items()}

    class Once:
        def tensors(self) -> tuple[TensorInfo, ...]:
            return tuple(TensorInfo.of(name, tensor) for name, tensor in new.items())

        def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
            return iter([Bucket.of(0, new)])

    async def scenario() -> None:
        engine = TransformersEngine(model)
        sync = WeightSync([engine], settings=COLOCATED)
        request = Request(id="r", prompt=(1, 2), max_tokens=3, seed=1)
        assert (await engine.generate(request)).versions == (0, 0, 0)
        await engine.sleep()
        assert (await engine.health()).status == "DIRTY"
        report = await sync.update(Once(), 1)
        assert report.named("committed") == ("local",), report.describe()
        assert (await engine.generate(request)).versions == (1, 1, 1)
        assert all(tensor.equal(new[name]) for name, tensor in model.state_dict().items())
        await engine.close()

    asyncio.run(scenario())
