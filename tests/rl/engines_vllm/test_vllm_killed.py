"""A real vLLM that is killed: while it commits, while it serves and stages, and idle."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from contract_base import cut, next_update, served
from fault_base import Faults
from served import slow
from tiny import read_weights

from megatron_idempotent.rl.engines import EngineDead


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
        await slow(engine)
        calls = [asyncio.ensure_future(engine.generate(self.request(max_tokens=200)))]
        await engine.generate(self.request(max_tokens=6))
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
        await slow(engine)
        requests = self.ragged(4, max_tokens=200)
        calls = [asyncio.ensure_future(engine.generate(each)) for each in requests]
        await engine.generate(self.request(max_tokens=6))

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
