"""The contract of `stage`, `commit` and `rollback`."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from contract_base import buckets, cut, next_update, served
from contract_pause import PauseContract
from tiny import read_weights

from megatron_idempotent.rl.engines import EngineError


class UpdatesContract(PauseContract):
    """New weights while the engine serves."""

    async def unchanged(self, engine, weights, version):
        """It serves those weights still, and can be updated."""
        health = await engine.health()
        assert (health.status, health.version) == ("SERVING", version)
        request = self.request(max_tokens=16, seed=3)
        sample = await engine.generate(request)
        assert set(sample.versions) == {version}
        self.check_logprobs(request, sample, weights)

    @served
    async def test_an_update_is_served_behind_its_commit(self, engine, old, new):
        before = (await engine.health()).version
        update = await self.update(engine, new, above=3)
        await self.unchanged(engine, old, before)
        await engine.pause()
        assert await engine.commit(update.id) == update.version == before + 3
        health = await engine.health()
        assert (health.status, health.version) == ("PAUSED", update.version)
        await engine.resume()
        await self.unchanged(engine, new, update.version)

    @served
    async def test_it_serves_while_an_update_is_staged(self, engine, old, new):
        version = (await engine.health()).version

        async def between():
            for bucket in cut(read_weights(new), nbytes=1 << 16):
                yield bucket
                await self.unchanged(engine, old, version)

        await engine.stage(await next_update(engine), between())

    @served
    async def test_tokens_keep_the_version_they_were_drawn_with(self, engine, old, new):
        first = (await engine.health()).version
        weights = {first: old}
        requests = self.ragged(4, max_tokens=150)
        calls = await self.start(engine, requests)
        for turn in range(4):
            target = old if turn % 2 else new
            weights[await self.switch(engine, target)] = target
            await engine.generate(self.request(max_tokens=8))
        switched = 0
        for request, sample in zip(requests, await asyncio.gather(*calls), strict=True):
            assert len(sample.tokens) == 150
            assert list(sample.versions) == sorted(sample.versions)
            assert sample.versions[0] == first
            switched += len(set(sample.versions)) > 2
            # After a switch tokens attend to a cache of the new weights, in full.
            self.check_logprobs(request, sample, weights)
        assert switched == len(requests)

    @served
    async def test_parts_of_two_versions_are_joined(self, engine, old, new):
        first = (await engine.health()).version
        requests = self.ragged(4, max_tokens=200)
        calls = await self.start(engine, requests)
        update = await self.update(engine, new)
        await engine.pause("abort")
        parts = await asyncio.gather(*calls)
        assert await engine.commit(update.id) == update.version
        await engine.resume()
        for request, part in zip(requests, parts, strict=True):
            rest = dataclasses.replace(
                request,
                prompt=request.prompt + part.tokens,
                max_tokens=10,
                continued=len(part.tokens),
            )
            sample = await engine.generate(rest)
            assert set(sample.versions) == {update.version} != {first}
            self.check_logprobs(rest, sample, new)

    @served
    async def test_a_commit_twice_is_one(self, engine, old, new):
        update = await self.update(engine, new)
        await engine.pause()
        assert await engine.commit(update.id) == update.version
        assert await engine.commit(update.id) == update.version
        await engine.resume()
        assert await engine.commit(update.id) == update.version
        await self.unchanged(engine, new, update.version)

    @served
    async def test_a_committed_update_is_not_read_again(self, engine, old, new):
        async def unreadable():
            raise AssertionError("the buckets were read")
            yield

        update = await self.update(engine, new)
        await engine.pause()
        await engine.commit(update.id)
        await engine.stage(update, unreadable())
        await engine.resume()
        await self.unchanged(engine, new, update.version)

    @served
    async def test_a_commit_needs_a_pause_and_a_staged_update(self, engine, old, new):
        version = (await engine.health()).version
        update = await self.update(engine, new)
        with pytest.raises(EngineError, match="paus"):
            await engine.commit(update.id)
        await engine.pause()
        with pytest.raises(EngineError, match="unknown"):
            await engine.commit("unknown")
        await engine.resume()
        await self.unchanged(engine, old, version)

    @served
    async def test_a_second_update_takes_the_place_of_the_first(self, engine, old, new):
        first = await self.update(engine, old)
        second = await self.update(engine, new)
        await engine.pause()
        with pytest.raises(EngineError, match=first.id):
            await engine.commit(first.id)
        assert await engine.commit(second.id) == second.version
        await engine.resume()
        await self.unchanged(engine, new, second.version)

    @served
    async def test_a_rollback_forgets_what_is_staged_and_nothing_else(self, engine, old, new):
        version = (await engine.health()).version
        await engine.rollback("unknown")
        update = await self.update(engine, new)
        await engine.rollback(update.id)
        await engine.pause()
        with pytest.raises(EngineError, match=update.id):
            await engine.commit(update.id)
        await engine.rollback(update.id)
        await engine.resume()
        await self.unchanged(engine, old, version)
        committed = await self.switch(engine, new)
        await engine.rollback(update.id)
        await self.unchanged(engine, new, committed)

    @served
    async def test_a_committed_update_is_not_rolled_back(self, engine, old, new):
        update = await self.update(engine, new)
        await engine.pause()
        await engine.commit(update.id)
        await engine.rollback(update.id)
        await engine.resume()
        await self.unchanged(engine, new, update.version)

    @served
    async def test_an_update_may_leave_out_what_has_not_changed(self, engine, old, new, tmp_path):
        if not self.deltas:
            pytest.skip("this engine wants all tensors")
        changed = {name: tensor for name, tensor in read_weights(new).items() if "layers.1" in name}
        update = await next_update(engine)
        update = dataclasses.replace(update, base_version=update.version - 1)
        await engine.stage(update, buckets(changed))
        await engine.pause()
        assert await engine.commit(update.id) == update.version
        await engine.resume()
        await self.unchanged(engine, merged(old, changed, tmp_path), update.version)


def merged(directory, changed, into):
    """A copy of a checkpoint with some tensors in the place of its own."""
    from safetensors.torch import save_file

    for file in directory.iterdir():
        if file.suffix == ".json":
            (into / file.name).write_bytes(file.read_bytes())
    metadata = {"format": "pt"}
    save_file({**read_weights(directory), **changed}, into / "model.safetensors", metadata)
    return into
