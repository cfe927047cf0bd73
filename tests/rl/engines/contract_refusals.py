"""The contract of updates that are not taken: what is served does not change."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from contract_base import buckets, cut, listed, next_update, served
from contract_updates import UpdatesContract
from tiny import read_weights

from megatron_idempotent.rl.engines import EngineError, EngineUnsupported
from megatron_idempotent.rl.weights import Bucket, UpdateDamaged, UpdateMismatch, UpdateRefused


class RefusalsContract(UpdatesContract):
    """Updates that are late, damaged, of another model, or never end."""

    @served
    async def test_updates_out_of_turn_are_refused(self, engine, old, new):
        version = await self.switch(engine, old)
        late = dataclasses.replace(await next_update(engine), version=version)
        based = dataclasses.replace(await next_update(engine, above=2), base_version=version + 1)
        for update in (late, based):
            with pytest.raises(UpdateRefused, match=update.id):
                await engine.stage(update, buckets(read_weights(new)))
            await engine.pause()
            with pytest.raises(EngineError, match=update.id):
                await engine.commit(update.id)
            await engine.resume()
        await self.unchanged(engine, old, version)

    @served
    async def test_scales_of_a_cache_that_is_not_in_fp8_are_refused(self, engine, old, new):
        version = (await engine.health()).version
        scales = {"model.layers.0.self_attn.k_scale": 0.5}
        update = dataclasses.replace(await next_update(engine), kv_scales=scales)
        with pytest.raises(EngineUnsupported, match=r"kv_scales.*leave kv_scales out"):
            await engine.stage(update, buckets(read_weights(new)))
        await self.unchanged(engine, old, version)
        assert await self.switch(engine, new) > version

    @served
    async def test_one_update_is_staged_at_a_time(self, engine, old, new):
        other = await next_update(engine, above=2)

        async def between():
            for place, bucket in enumerate(cut(read_weights(new))):
                yield bucket
                if place == 0:
                    with pytest.raises(UpdateRefused, match=other.id):
                        await engine.stage(other, buckets(read_weights(old)))

        update = await next_update(engine)
        await engine.stage(update, between())
        await engine.pause()
        assert await engine.commit(update.id) == update.version
        await engine.resume()
        await self.unchanged(engine, new, update.version)

    @pytest.mark.parametrize("how", ["flipped", "cut short", "one left out", "twice", "unsigned"])
    def test_a_damaged_update_changes_nothing(self, old, new, how):
        given = cut(read_weights(new), nbytes=1 << 14)
        assert len(given) > 3
        name = next(iter(given[1].tensors))
        if how == "flipped":
            tensor = given[1].tensors[name].clone()
            tensor.view(-1)[0] += 1
            given[1] = dataclasses.replace(given[1], tensors={**given[1].tensors, name: tensor})
        elif how == "cut short":
            given.pop()
        elif how == "one left out":
            given.pop(1)
        elif how == "twice":
            given.append(Bucket.of(len(given), {name: given[1].tensors[name]}))
        else:
            given[1] = dataclasses.replace(given[1], checksums={})
        self.refused(old, new, given, UpdateDamaged)

    @served
    async def test_a_damaged_update_has_taken_the_place_of_the_one_before(self, engine, old, new):
        version = (await engine.health()).version
        update = await self.update(engine, new)
        with pytest.raises(UpdateDamaged):
            await engine.stage(
                await next_update(engine), listed(cut(read_weights(new), nbytes=1 << 14)[:-1])
            )
        await engine.pause()
        with pytest.raises(EngineError, match=update.id):
            await engine.commit(update.id)
        await engine.resume()
        await self.unchanged(engine, old, version)

    @pytest.mark.parametrize("how", ["shape", "type", "name"])
    def test_an_update_of_another_model_changes_nothing(self, old, new, how):
        tensors = read_weights(new)
        name = list(tensors)[2]
        if how == "shape":
            tensors[name] = tensors[name].reshape(-1)[1:]
        elif how == "type":
            tensors[name] = tensors[name].to(torch.bfloat16)
        else:
            tensors["model.layers.9.self_attn.q_proj.weight"] = tensors[name]
        self.refused(old, new, cut(tensors), UpdateMismatch)

    def refused(self, old, new, given, error):
        async def scenario(engine):
            version = (await engine.health()).version
            update = await next_update(engine)
            with pytest.raises(error, match=update.id):
                await engine.stage(update, listed(given))
            await engine.pause()
            with pytest.raises(EngineError, match=update.id):
                await engine.commit(update.id)
            await engine.resume()
            await self.unchanged(engine, old, version)
            await engine.stage(update, buckets(read_weights(new)))  # as it should have come
            await engine.pause()
            assert await engine.commit(update.id) == update.version
            await engine.resume()
            await self.unchanged(engine, new, update.version)

        self.run(old, scenario)

    @served
    async def test_a_trainer_that_fails_while_it_sends_changes_nothing(self, engine, old, new):
        async def failing():
            yield cut(read_weights(new))[0]
            raise OSError("the trainer is gone")

        version = (await engine.health()).version
        update = await next_update(engine)
        with pytest.raises((OSError, ValueError, EngineError)):
            await engine.stage(update, failing())
        await self.unchanged(engine, old, version)
        await self.unchanged(engine, new, await self.switch(engine, new))

    @served
    async def test_a_cancelled_stage_changes_nothing(self, engine, old, new):
        version = (await engine.health()).version
        arrived = asyncio.Event()

        async def silent():
            yield cut(read_weights(new))[0]
            arrived.set()
            await asyncio.Event().wait()

        staging = asyncio.ensure_future(engine.stage(await next_update(engine), silent()))
        await arrived.wait()
        staging.cancel()
        await asyncio.wait([staging])
        assert staging.cancelled()
        await self.unchanged(engine, old, version)
        await self.unchanged(engine, new, await self.switch(engine, new))
