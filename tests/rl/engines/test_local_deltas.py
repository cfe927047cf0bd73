"""Deltas into a model that serves: the bits of a whole update, whatever is lost on the way."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import pytest
import torch
from ranks import on_ranks
from training import Training, flipped
from transformers import AutoModelForCausalLM

from megatron_idempotent.rl.engines import EngineHealth
from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.engines.transformers_weights import Incoming, ServedWeights
from megatron_idempotent.rl.sync import SyncFailed, SyncReport, SyncSettings, WeightSync
from megatron_idempotent.rl.weights import Bucket, WeightUpdate
from megatron_idempotent.rl.weights.deltas import encode, verify
from megatron_idempotent.rl.weights.records import DELTA, in_host_memory

SETTINGS = SyncSettings(bucket_bytes=1 << 16, retry_wait_s=0.001, attempts=2)


class Unreliable:
    """An engine that loses, breaks and forgets updates, and is started again."""

    def __init__(self, folder: Any, name: str) -> None:
        self.name, self._folder = name, folder
        self.fault = ""
        self.start(0)

    def start(self, version: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.bfloat16)
        self.inner = TransformersEngine(self.model, name=self.name, version=version)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def stage(self, update: Any, buckets: Any) -> None:
        await self.inner.stage(update, self._broken(buckets))
        if self.fault == "fails once it is staged":
            raise ConnectionError("the answer was lost")

    async def _broken(self, buckets: Any) -> Any:
        async for bucket in buckets:
            if bucket.index == 3:
                if self.fault == "ends half-way":
                    raise ConnectionError("the link is down")
                if self.fault == "flips a bit":
                    bucket = flipped(bucket, sealed=False)
                if self.fault == "flips a bit before the checksum":
                    bucket = flipped(bucket, sealed=True)
            yield bucket

    async def commit(self, update_id: str) -> int:
        if self.fault == "cannot commit":
            raise ConnectionError("the link is down")
        return await self.inner.commit(update_id)

    async def health(self) -> EngineHealth:
        return await self.inner.health()


FAULTS = (
    *("", "", "", "ends half-way", "flips a bit", "flips a bit before the checksum"),
    *("cannot commit", "fails once it is staged"),
    *("started again", "started again as the version that it had", "a bit of its own flips"),
)


def the_same(engine: Any, weights: dict[str, torch.Tensor]) -> bool:
    served = engine.inner._updates._weights.served
    return all(
        torch.equal(served(name).view(torch.int16), tensor.view(torch.int16))
        for name, tensor in weights.items()
    )


async def one_update(sync: WeightSync, training: Training, version: int) -> SyncReport:
    training.step()
    try:
        return await sync.update(training, version, deltas=True)
    except SyncFailed as failed:
        return failed.report


@pytest.mark.parametrize("updates", [25, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_whatever_is_lost_a_committed_engine_has_the_trainers_bits(
    updates: int, make_model: Any
) -> None:
    folder = make_model(seed=1, family="qwen3_moe", dtype=torch.bfloat16, hidden=32, layers=1)
    training, choice = Training(folder), random.Random(3)
    engines = [Unreliable(folder, name) for name in "ab"]
    sync = WeightSync(engines, settings=SETTINGS)  # type: ignore[arg-type]
    small = 0

    async def main() -> None:
        nonlocal small
        had: dict[str, int] = {}
        for version in range(1, updates + 1):
            for engine in engines:
                engine.fault = choice.choice(FAULTS) if choice.random() < 0.3 else ""
                if engine.fault.startswith("started again"):
                    engine.start(had.get(engine.name, 0) if "as" in engine.fault else 0)
                elif engine.fault == "a bit of its own flips":
                    engine.model.lm_head.weight.data.view(torch.int16)[3, 5] ^= 1
            report = await one_update(sync, training, version)
            small += report.bytes_sent < report.bytes_whole / 4
            for engine in engines:
                found, health = report.engines[engine.name], await engine.health()
                assert found.outcome != "quarantined", found.detail
                assert (health.status, health.version) == ("SERVING", found.version)
                had[engine.name] = found.version or 0
                if found.outcome == "committed":
                    assert found.version == version
                    assert the_same(engine, training.weights), (version, engine.fault)
        for engine in engines:
            engine.fault = ""
        for version in range(updates + 1, updates + 3):  # whole, if the last was refused
            report = await one_update(sync, training, version)
        assert report.named("committed") == ("a", "b")
        assert all(the_same(engine, training.weights) for engine in engines)

    asyncio.run(main())
    assert small > updates // 20


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
async def test_logits_after_ten_deltas_are_those_after_one_whole_update(
    family: str, make_model: Any
) -> None:
    folder = make_model(seed=1, family=family, dtype=torch.bfloat16, tied=family == "qwen2")
    training = Training(folder)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16) for _ in range(2)]
    engines = [
        TransformersEngine(model, name=name) for model, name in zip(models, "ab", strict=True)
    ]
    by_deltas, whole = (WeightSync([engine], settings=SETTINGS) for engine in engines)
    await by_deltas.update(training, 1, deltas=True)
    for version in range(2, 12):
        report = await one_update(by_deltas, training, version)
        assert report.bytes_sent < report.bytes_whole / 5
        # One in fifty changes; a tensor that comes whole counts with all of its elements.
        assert 0.005 < report.elements_changed / report.elements < 0.03
        assert report.decode_s > 0
    await whole.update(training, 11)
    tokens_BT = torch.arange(3, 35).view(2, 16)
    with torch.no_grad():
        logits = [model(tokens_BT).logits for model in models]
    assert torch.equal(logits[0].view(torch.int16), logits[1].view(torch.int16))


@pytest.mark.parametrize("written", [0, 4, 9])
@pytest.mark.parametrize("then", ["put back", "restored", "exchanged"])
def test_deltas_are_written_in_place_and_taken_back_from_half_way(
    make_model: Any, monkeypatch: pytest.MonkeyPatch, written: int, then: str
) -> None:
    folder = make_model(family="qwen3_moe", dtype=torch.bfloat16, layers=1)
    weights = ServedWeights(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    served = {info.name: weights.served(info.name) for info in weights.expected}
    old = {name: tensor.clone() for name, tensor in served.items()}
    new = {name: tensor.clone() for name, tensor in served.items()}
    for tensor in new.values():
        tensor.view(torch.int16).flatten()[::30] += 1
    came: dict[str, Any] = {
        name: verify(encode(tensor, old[name]), served[name]) for name, tensor in new.items()
    }
    one = next(name for name in new if "experts.1.down_proj" in name)  # other experts: patches
    came[one] = new[one]
    staged = weights.assemble(came)
    assert sum(isinstance(each, torch.Tensor) for each in staged.values()) == 1
    put, calls = ServedWeights._put, itertools.count()
    fails = {written} if then == "put back" else {written, written + 1}

    def failing(weights: ServedWeights, name: str, what: Any) -> None:
        if next(calls) in fails:
            raise MemoryError("no room")
        put(weights, name, what)

    monkeypatch.setattr(ServedWeights, "_put", failing)
    with pytest.raises(MemoryError):
        weights.exchange(staged)
    assert weights.torn == (then != "put back")
    if then == "restored":
        weights.restore()
    elif then == "exchanged":
        weights.exchange(staged)
    wanted = new if then == "exchanged" else old
    assert all(torch.equal(weights.served(name), each) for name, each in wanted.items())
    moved = {name for name in served if weights.served(name).data_ptr() != served[name].data_ptr()}
    assert moved == {name for name in new if "down_proj" in name and wanted is new}


def staged_deltas(folder: Any, *, stand_in: bool) -> None:
    """Stage a delta of each tensor; the engine is to have made all tensors before the commit."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    weights = ServedWeights(model.cuda() if stand_in else model)
    served = {info.name: weights.served(info.name) for info in weights.expected}
    assert {in_host_memory(each) for each in served.values()} == {not stand_in}
    deltas = {}
    for name, old in served.items():
        new = old.clone()
        new.view(torch.int16).flatten()[::30] += 1
        deltas[name + DELTA] = encode(new, old).data
    incoming = Incoming(WeightUpdate(id="u", version=2, base_version=1), weights=weights)
    incoming.add(Bucket.of(0, deltas))
    assert {type(each) for each in incoming.complete().values()} == {torch.Tensor}


def test_requests_do_not_wait_for_elements_to_be_written_on_the_host(make_model: Any) -> None:
    staged_deltas(make_model(dtype=torch.bfloat16), stand_in=False)


@on_ranks(1)
def test_nor_where_its_memory_stands_for_a_device(folder_of_a_model: Any) -> None:
    staged_deltas(folder_of_a_model, stand_in=True)


@pytest.fixture
def folder_of_a_model(make_model: Any) -> Any:
    return make_model(dtype=torch.bfloat16)
