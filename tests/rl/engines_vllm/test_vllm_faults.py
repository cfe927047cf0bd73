"""Updates of a real vLLM that go wrong half-way, servers that are killed, and clients that left."""

import asyncio
import os
import signal

import pytest
from contract_base import buckets, cut, listed, next_update, served
from served import OnServer, fast
from tiny import read_weights

from megatron_idempotent.rl.engines import EngineDead, EngineError, EngineTimeout
from megatron_idempotent.rl.engines.vllm import VllmEngine
from megatron_idempotent.rl.weights import UpdateRefused, WeightUpdate
from megatron_idempotent.rl.weights.transports import (
    DiskSender,
    ProcessGroupSender,
    SharedMemorySender,
)

BREAK_OFF = {"do": "fault", "at": "load", "after": 7}


class Faults(OnServer):
    """Commits that break off, and checks of what follows them."""

    limits = fast()

    async def broken(self, engine, directory):
        """Running requests, and an update whose commit broke off at its eighth tensor."""
        requests = self.ragged(4, max_tokens=150)
        calls = await self.start(engine, requests)
        update = await self.update(engine, directory)
        await engine.pause()
        await engine._control.rpc(BREAK_OFF)
        with pytest.raises(EngineError, match="a fault for a test"):
            await engine.commit(update.id)
        health = await engine.health()
        assert (health.status, health.version) == ("DIRTY", None)
        assert "a fault for a test" in health.detail
        with pytest.raises(EngineError, match="DIRTY"):
            await engine.resume()
        assert await engine._control.is_paused()
        return requests, calls, update

    async def rolled_back(self, engine, old, new, version):
        requests, calls, update = await self.broken(engine, new)
        await engine.rollback("another")
        assert (await engine.health()).status == "DIRTY"
        await engine.rollback(update.id)
        health = await engine.health()
        assert (health.status, health.version) == ("PAUSED", version)
        with pytest.raises(EngineError, match=update.id):
            await engine.commit(update.id)
        await engine.resume()
        await self.ended(requests, calls, old, tokens=150)
        await self.serves(engine, old, version)


class TestFaults(Faults):
    @served
    async def test_a_commit_that_broke_off_is_done_again(self, engine, old, new):
        version = (await engine.health()).version
        requests, calls, update = await self.broken(engine, new)
        assert await engine.commit(update.id) == update.version
        assert (await engine.health()).status == "PAUSED"
        await engine.resume()
        await self.ended(requests, calls, {version: old, update.version: new}, tokens=150)
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
            await self.put_in(engine, update)
            await asyncio.gather(*calls)
            await self.serves(engine, new, update.version)

    @served
    async def test_a_new_client_goes_on_where_another_stopped(self, engine, old, new):
        _, calls, update = await self.broken(engine, new)
        other = VllmEngine(self.shared.server.url, name="other", timeouts=self.limits)
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
        await engine._control.post("/start_weight_update")
        assert (await engine.health()).status == "DIRTY"
        assert await engine.commit(update.id) == update.version
        await engine._control.post("/start_weight_update")
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
        stale = {"new_version": str(version)}  # as if its last call had been lost
        await engine._control.post("/update_weight_version", stale)
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


class TestKilled(Faults):
    async def is_dead(self, engine):
        health = await engine.health()
        assert (health.status, health.version, health.running) == ("DEAD", None, 0)
        assert health.detail
        for call in (engine.generate(self.request()), engine.resume(), engine.commit("u")):
            with pytest.raises(EngineDead, match="shared"):
                await call

    @served
    async def test_a_worker_that_dies_in_a_commit(self, engine, old, new):
        calls = await self.start(engine, [self.request(max_tokens=200)])
        update = await self.update(engine, new)
        await engine.pause()
        await engine._control.rpc({"do": "fault", "at": "kill", "after": 7})
        with pytest.raises(EngineDead):
            await engine.commit(update.id)
        for call in calls:
            with pytest.raises(EngineDead):
                await call
        await self.is_dead(engine)
        self.shared.server.stop()

    @served
    async def test_a_commit_that_broke_off_is_rolled_back_to_the_checkpoint(self, engine, old, new):
        assert (await engine.health()).version == 0  # started again, and never updated
        await self.rolled_back(engine, old, new, 0)

    @served
    async def test_a_server_that_dies_while_it_serves_and_stages(self, engine, old, new):
        calls = await self.start(engine, self.ragged(4, max_tokens=200))

        async def cut_off():
            given = cut(read_weights(new))
            yield given[0]
            os.killpg(self.shared.server.pid, signal.SIGKILL)
            yield given[1]

        with pytest.raises(EngineDead):
            await engine.stage(await next_update(engine), cut_off())
        for call in calls:
            with pytest.raises(EngineDead):
                await call
        await self.is_dead(engine)

    @served
    async def test_a_server_that_dies_idle(self, engine, old):
        os.killpg(self.shared.server.pid, signal.SIGKILL)
        await self.is_dead(engine)
        await engine.close()
