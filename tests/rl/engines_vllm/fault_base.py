"""Shared by tests of faults: commits that break off, and checks of what follows them."""

from __future__ import annotations

import asyncio

import pytest
from contract_base import ContractBase
from served import fast, slow

from megatron_idempotent.rl.engines import EngineError

BREAK_OFF = {"do": "fault", "at": "load", "after": 7}


class Faults(ContractBase):
    """Tests on the shared server."""

    @pytest.fixture(autouse=True)
    def server(self, shared):
        self.shared = shared
        shared.start()

    def serving(self, directory):
        return self.shared.engine(directory, timeouts=fast())

    async def broken(self, engine, directory):
        """Running requests, and an update whose commit broke off at its eighth tensor."""
        await slow(engine)
        requests = self.ragged(4, max_tokens=150)
        calls = [asyncio.ensure_future(engine.generate(each)) for each in requests]
        await engine.generate(self.request(max_tokens=6))
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

    async def finished(self, requests, calls, weights):
        for request, sample in zip(requests, await asyncio.gather(*calls), strict=True):
            assert len(sample.tokens) == 150
            assert set(sample.versions) <= set(weights)
            self.check_logprobs(request, sample, weights)

    async def serves(self, engine, directory, version):
        health = await engine.health()
        assert (health.status, health.version) == ("SERVING", version)
        request = self.request(max_tokens=16)
        sample = await engine.generate(request)
        assert set(sample.versions) == {version}
        self.check_logprobs(request, sample, directory)

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
        await self.finished(requests, calls, {version: old})
        await self.serves(engine, old, version)
