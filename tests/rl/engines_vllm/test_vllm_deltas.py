"""Deltas into a real vLLM: in place in fused and sharded parameters, or layer by layer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from contract_base import ContractBase, next_update
from served import ARGUMENTS, AVX512, ONE_PROCESS, faulty_server
from training import Training, flipped

from megatron_idempotent.rl.engines import EngineError, Request
from megatron_idempotent.rl.engines.vllm import VllmEngine, VllmServer
from megatron_idempotent.rl.sync import SyncReport, SyncSettings, WeightSync
from megatron_idempotent.rl.weights import Bucket, UpdateDamaged, UpdateRefused, checksum
from megatron_idempotent.rl.weights.deltas import EncodedDelta, encode
from megatron_idempotent.rl.weights.records import DELTA
from megatron_idempotent.rl.weights.transports import SharedMemorySender

SETTINGS = SyncSettings(bucket_bytes=1 << 16, retry_wait_s=0.01, attempts=1)
#: For each family, more arguments of vLLM, its environment, and why deltas do not go in place.
SERVERS: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "qwen2": (("--tensor-parallel-size", "2"), {"TEST_PLAIN_WEIGHTS": "1"}, ""),
    "qwen3_moe": (
        ONE_PROCESS,
        {},
        "computes with what it makes" if AVX512 else "is in another layout",
    ),
}


class TestDeltas(ContractBase):
    @pytest.mark.parametrize("family", SERVERS)
    def test_whatever_comes_or_is_refused_the_bits_are_those_of_a_whole_update(
        self, family: str, make_model: Any, shared: Any
    ) -> None:
        shared.server.stop()
        more, environment, self.because = SERVERS[family]
        folder = make_model(family=family, vocabulary=64, dtype=torch.bfloat16)
        arguments = ("--dtype", "bfloat16", *ARGUMENTS[2:], *more)
        with faulty_server(folder, *arguments, **environment) as server:
            asyncio.run(asyncio.wait_for(self.scenario(server, Training(folder)), 200))

    async def scenario(self, server: VllmServer, training: Training) -> None:
        engine = VllmEngine(server.url, transport=SharedMemorySender)
        sync = WeightSync([engine], settings=SETTINGS)
        try:
            start = await self.served_bits(engine)
            await sync.update(training, 1, deltas=True)  # the same weights
            assert await self.served_bits(engine) == start
            for version in range(2, 6):
                before = dict(training.weights)
                training.step()
                report: SyncReport = await sync.update(training, version, deltas=True)
                assert report.bytes_sent < report.bytes_whole / 5
            by_deltas = await self.served_bits(engine)
            assert by_deltas != start
            assert self.because in by_deltas["whole_because"]
            assert bool(self.because) == bool(by_deltas["whole_because"])
            await self.refused(engine, training, before)
            assert await self.served_bits(engine) == by_deltas
            await self.broken(engine, training, before)
            assert await self.served_bits(engine) == by_deltas
            await WeightSync([engine], settings=SETTINGS).update(training, 9)
            assert await self.served_bits(engine) == by_deltas
        finally:
            await engine.close()

    async def served_bits(self, engine: VllmEngine) -> dict[str, Any]:
        """Log-probs of a greedy and of random responses, and of parameters their checksums."""
        found: dict[str, Any] = {}
        for seed in range(3):
            request = Request(id=f"s{seed}", prompt=(7, 3, 21, 40 + seed), max_tokens=12, seed=seed)
            sample = await engine.generate(request)
            found[request.id] = (sample.tokens, sample.logprobs)
        answer = await engine._control.post("/collective_rpc", {"method": "bits"}, limit="commit_s")
        for rank, each in enumerate(answer["results"]):
            found[f"rank {rank}"] = each["parameters"]
            found["whole_because"] = each["whole_because"]
        return found

    async def refused(self, engine: VllmEngine, training: Training, older: dict[str, Any]) -> None:
        """A lost delta, a wrong base, a bit that flipped: the engine serves on as it did."""
        health = await engine.health()
        other = {name: tensor * 1.5 for name, tensor in training.weights.items()}
        for error, base, was, damage in (
            (UpdateRefused, 4, training.weights, None),
            (UpdateRefused, 5, older, None),
            (UpdateDamaged, 5, training.weights, False),
            (UpdateDamaged, 5, training.weights, True),
        ):
            update = dataclasses.replace(await next_update(engine), base_version=base)
            with pytest.raises(error):
                await engine.stage(update, deltas(other, was, damage))
            assert await engine.health() == dataclasses.replace(
                health, decode_s=(await engine.health()).decode_s
            )

    async def broken(self, engine: VllmEngine, training: Training, older: dict[str, Any]) -> None:
        """A commit that breaks off half-way is taken back; the undo of a delta is one."""
        update = dataclasses.replace(await next_update(engine), base_version=5)
        await engine.stage(update, deltas(older, training.weights))
        await engine.pause()
        await engine._control.rpc({"do": "fault", "at": "load", "after": 7})
        with pytest.raises(EngineError, match="a fault for a test"):
            await engine.commit(update.id)
        assert (await engine.health()).status == "DIRTY"
        await engine.rollback(update.id)
        await engine.resume()
        was = await self.served_bits(engine)
        for forth in (True, False):
            update = await next_update(engine)
            update = dataclasses.replace(update, base_version=update.version - 1)
            await engine.stage(update, deltas(older, training.weights, undo=not forth))
            await self.put_in(engine, update)
            assert (await self.served_bits(engine) == was) != forth


async def deltas(
    new: dict[str, torch.Tensor],
    old: dict[str, torch.Tensor],
    damage: bool | None = None,
    *,
    undo: bool = False,
) -> AsyncIterator[Bucket]:
    """Each tensor's delta in a bucket; the third is damaged, before it got its checksum or not."""
    for index, (name, tensor) in enumerate(new.items()):
        delta: EncodedDelta = encode(tensor, old[name])
        data = (delta.undo() if undo else delta).data
        bucket = Bucket.of(index, {name + DELTA: data})
        assert bucket.checksums == {name + DELTA: checksum(data)}
        yield flipped(bucket, sealed=damage) if damage is not None and index == 2 else bucket
