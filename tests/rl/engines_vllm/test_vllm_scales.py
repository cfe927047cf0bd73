"""A vLLM with its key-value cache in FP8: scales come with the weights."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from contract_base import ContractBase, buckets, next_update
from served import AVX512, ONE_PROCESS, faulty_server
from tiny import read_weights

from megatron_idempotent.rl.engines.vllm import VllmEngine
from megatron_idempotent.rl.weights import UpdateMismatch
from megatron_idempotent.rl.weights.transports import SharedMemorySender

PLACE = "model.layers.{}.self_attn.attn"


def scales(layers: int, *, k: float, v: float) -> dict[str, float]:
    places = [PLACE.format(layer).removesuffix(".attn") for layer in range(layers)]
    return {f"{place}.{name}_scale": s for place in places for name, s in (("k", k), ("v", v))}


class TestVllmWithAnFp8Cache(ContractBase):
    @pytest.mark.skipif(not AVX512, reason="vLLM has no FP8 cache on a CPU without AVX-512")
    def test_scales_take_effect_with_an_update_and_stay(self, old: Path, new: Path, shared) -> None:
        shared.server.stop()  # two engines would share two cores
        arguments = ("--dtype", "bfloat16", "--kv-cache-dtype", "fp8", "--enforce-eager")
        with faulty_server(old, *arguments, *ONE_PROCESS) as server:
            asyncio.run(asyncio.wait_for(self.scenario(server, old, new), 480))

    async def scenario(self, server, old, new):
        engine = VllmEngine(server.url, transport=SharedMemorySender)
        try:
            first = await self.in_use(engine)
            layers = len(first)
            assert set(first) == {PLACE.format(layer) for layer in range(layers)}
            assert first[PLACE.format(0)][:2] == [[1.0, 1.0], [1.0, 1.0]]
            told = await self.switched(engine, new, scales(layers, k=0.1, v=0.25))
            rounded = 0.10000000149011612  # as float32 holds it
            for found in told.values():
                assert found[:2] == [[rounded, rounded], [0.25, 0.25]]
            # What is not sent stays, though vLLM resets it with every reload.
            assert await self.switched(engine, old, None) == told
            plain = await self.logprobs(engine)
            # Keys that are divided by a large number keep few bits of their own in FP8. By 1e4 a
            # CPU with AMX makes values of them that are not finite.
            await self.switched(engine, old, scales(layers, k=100.0, v=100.0))
            assert await self.logprobs(engine) != plain
            await self.switched(engine, old, scales(layers, k=0.1, v=0.25))
            assert await self.logprobs(engine) == plain
            await self.refused(engine, new, scales(layers + 1, k=1.0, v=1.0), "no layer of the m")
            await self.refused(engine, new, scales(layers - 1, k=1.0, v=1.0), "kv_scales lack")
            assert await self.in_use(engine) == told
        finally:
            await engine.close()

    async def in_use(self, engine):
        asked = {"method": "scales_in_use"}
        answer = await engine._control.post("/collective_rpc", asked, limit="commit_s")
        (found,) = answer["results"]
        return {place: [list(pair) for pair in pairs] for place, pairs in found.items()}

    async def staged(self, engine, directory, kv_scales):
        update = dataclasses.replace(await next_update(engine), kv_scales=kv_scales)
        tensors = {name: each.bfloat16() for name, each in read_weights(directory).items()}
        await engine.stage(update, buckets(tensors))
        return update

    async def switched(self, engine, directory, kv_scales):
        before = await self.in_use(engine)
        update = await self.staged(engine, directory, kv_scales)
        assert await self.in_use(engine) == before
        await self.put_in(engine, update)
        return await self.in_use(engine)

    async def refused(self, engine, directory, kv_scales, message):
        with pytest.raises(UpdateMismatch, match=message):
            await self.staged(engine, directory, kv_scales)

    async def logprobs(self, engine):
        sample = await engine.generate(self.request(max_tokens=24, seed=3))
        return sample.tokens, sample.logprobs
