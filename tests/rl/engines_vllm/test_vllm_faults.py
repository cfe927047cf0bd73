"""Updates of a real vLLM that go wrong half-way, and clients that are gone or late."""

from __future__ import annotations

import asyncio

import pytest
from contract_base import buckets, cut, listed, next_update, served
from fault_base import Faults
from served import fast
from tiny import read_weights

from megatron_idempotent.rl.engines import EngineError, EngineTimeout
from megatron_idempotent.rl.engines.vllm import VllmEngine
from megatron_idempotent.rl.weights import UpdateRefused, WeightUpdate
from megatron_idempotent.rl.weights.transports import (
    DiskSender,
    ProcessGroupSender,
    SharedMemorySender,
)


class TestFaults(Faults):
    @served
    async def test_a_commit_that_broke_off_is_done_again(self, engine, old, new):
        version = (await engine.health()).version
        requests, calls, update = await self.broken(engine, new)
        assert await engine.commit(update.id) == update.version
        assert (await engine.health()).status == "PAUSED"
        await engine.resume()
        await self.finished(requests, calls, {version: old, update.version: new})
        await self.serves(engine, new, update.version)

    @served
    async def test_a_commit_that_broke_off_is_rolled_back(self, engine, old, new):
        await self.rolled_back(engine, old, new, await self.switch(engine, old))

    @served
    async def test_without_a_copy_it_stays_dirty_until_it_is_committed_again(
        self, engine, old, new
    ):
        await engine.close()
        async with self.shared.engine(old, keep_copy=False) as engine:
            await self.switch(engine, old)
            _, calls, update = await self.broken(engine, new)
            with pytest.raises(EngineError, match="keep_copy"):
                await engine.rollback(update.id)
            assert (await engine.health()).status == "DIRTY"
            update = WeightUpdate(id="again", version=update.version + 1)
            await engine.stage(update, buckets(read_weights(new)))
            assert await engine.commit(update.id) == update.version
            await engine.resume()
            await asyncio.gather(*calls)
            await self.serves(engine, new, update.version)

    @served
    async def test_a_new_client_goes_on_where_another_stopped(self, engine, old, new):
        _, calls, update = await self.broken(engine, new)
        other = VllmEngine(self.shared.server.url, name="other", timeouts=fast())
        assert (await other.health()).status == "DIRTY"
        with pytest.raises(EngineError, match="DIRTY"):
            await other.resume()
        assert await other.commit(update.id) == update.version
        await other.resume()
        await self.serves(other, new, update.version)
        await other.close()
        await asyncio.gather(*calls)

    @served
    async def test_an_update_that_was_begun_and_left_is_ended_by_the_next(self, engine, old, new):
        version = (await engine.health()).version
        update = await self.update(engine, new)
        await engine.pause()
        await engine._control.post("/start_weight_update", timeout_s=20.0)
        assert (await engine.health()).status == "DIRTY"
        assert await engine.commit(update.id) == update.version
        await engine._control.post("/start_weight_update", timeout_s=20.0)
        await engine.rollback("")
        health = await engine.health()
        assert (health.status, health.version) == ("PAUSED", update.version)
        await engine.resume()
        await self.serves(engine, new, update.version)
        assert version != update.version

    @served
    async def test_weights_with_a_stale_stamp_are_not_served(self, engine, old, new):
        version = (await engine.health()).version
        update = await self.update(engine, new)
        await engine.pause()
        await engine.commit(update.id)
        await engine._control.set_stamp(str(version))  # as if its last call had been lost
        health = await engine.health()
        assert (health.status, health.version) == ("DIRTY", None)
        assert f"stamps tokens with {version}" in health.detail
        with pytest.raises(EngineError, match="DIRTY"):
            await engine.resume()
        assert await engine.commit(update.id) == update.version
        await engine.resume()
        await self.serves(engine, new, update.version)

    @served
    async def test_an_update_whose_trainer_is_gone_makes_room_in_time(self, engine, old, new):
        left = await next_update(engine)
        sender = SharedMemorySender()
        opened = dict(await sender.open(left))
        update = {"id": left.id, "version": left.version, "base_version": None}
        (state,) = await engine._control.rpc(
            {"do": "open", "update": update, "opened": opened, "serving": 0}
            | {"keep": True, "silence_s": 2.0}
        )
        assert state["staging"] == left.id
        with pytest.raises(UpdateRefused, match=left.id):
            await self.update(engine, new)
        while (await engine._control.rpc({"do": "state"}))[0]["staging"]:
            await asyncio.sleep(0.05)
        await self.serves(engine, new, await self.switch(engine, new))
        await sender.close()

    @served
    async def test_a_bucket_that_never_comes_is_an_error_in_time(self, engine, old, new):
        class Silent(ProcessGroupSender):
            async def transmit(self, bucket):
                await asyncio.Event().wait()

        version = (await engine.health()).version
        await engine.close()
        silent = lambda: Silent(timeout_s=5.0)  # noqa: E731
        limits = fast(bucket_s=0.5)
        async with self.shared.engine(old, transport=silent, timeouts=limits) as engine:
            update = await next_update(engine)
            with pytest.raises(EngineTimeout, match=update.id):
                await engine.stage(update, listed(cut(read_weights(new))))
            await self.serves(engine, old, version)

    @pytest.mark.parametrize("kind", ["disk", "process_group"])
    @served
    async def test_weights_come_over_every_transport(self, engine, old, new, kind, tmp_path):
        made = {"disk": lambda: DiskSender(tmp_path), "process_group": ProcessGroupSender}
        await engine.close()
        async with self.shared.engine(old, transport=made[kind]) as engine:
            await self.serves(engine, new, await self.switch(engine, new))
            assert list(tmp_path.iterdir()) == []  # nothing is left of what was sent

    @served
    async def test_a_response_that_takes_too_long_is_an_error(self, engine, old):
        await engine.pause()
        engine._timeouts = fast(generate_s=0.3)
        with pytest.raises(EngineTimeout, match="generate"):
            await engine.generate(self.request())
        assert (await engine.health()).running == 0
        engine._timeouts = fast()
        await engine.resume()
        await engine.generate(self.request())

    @served
    async def test_an_engine_without_a_transport_serves_and_is_not_updated(self, engine, old, new):
        await engine.close()
        async with self.shared.engine(old, transport=None) as engine:
            update = await next_update(engine)
            with pytest.raises(ValueError, match="transport"):
                await engine.stage(update, buckets(read_weights(new)))
            await engine.generate(self.request())
