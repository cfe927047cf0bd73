"""A vLLM in this process: started once, so all that it does is one scenario."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from contract_base import ContractBase, buckets, cut, listed, next_update
from served import HERE
from tiny import read_weights

from megatron_idempotent.rl.engines import EngineDead, EngineError, EngineTimeout, EngineUnsupported
from megatron_idempotent.rl.engines.vllm import CPU_ENVIRONMENT, Timeouts, VllmLocalEngine
from megatron_idempotent.rl.weights import UpdateDamaged
from megatron_idempotent.rl.weights.transports import SharedMemorySender


# vLLM's imports warn.
@pytest.mark.filterwarnings("ignore")
class TestVllmLocalEngine(ContractBase):
    @pytest.fixture
    def settings(self, shared, monkeypatch):
        shared.server.stop()  # two engines would share two cores
        inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *inherited]))
        for name, value in CPU_ENVIRONMENT.items():
            monkeypatch.setenv(name, value)
        return {
            "dtype": "float32",
            "enforce_eager": True,
            "extension": "faults.FaultyWorker",
            "transport": SharedMemorySender,
            "initial_version": 4,
        }

    def test_it_serves_and_switches_as_a_server_does(self, old: Path, new: Path, settings) -> None:
        async def scenario() -> None:
            engine = VllmLocalEngine(old, **settings)
            try:
                await self.refuses(engine, new)
                update = await self.switches(engine, old, new)
                await self.is_mended(engine, old, new, update.version)
            finally:
                calls = [asyncio.ensure_future(engine.generate(self.request(max_tokens=200)))]
                await asyncio.sleep(0)
                await engine.close()
            (sample,) = await asyncio.gather(*calls)
            assert sample.finish_reason == "abort"
            assert (await engine.health()).status == "DEAD"
            for call in (engine.generate(self.request()), engine.pause(), engine.commit("u")):
                with pytest.raises(EngineDead, match="closed"):
                    await call

        asyncio.run(asyncio.wait_for(scenario(), 240))

    async def refuses(self, engine, new):
        for refused in (self.request((3, 64)), self.request((3, -1)), self.request((3,) * 253)):
            with pytest.raises(ValueError, match="request"):
                await engine.generate(refused)
        with pytest.raises(EngineUnsupported, match="no sleep mode"):
            await engine.sleep()
        with pytest.raises(EngineUnsupported, match="no sleep mode"):
            await engine.wake(("weights",))
        with pytest.raises(UpdateDamaged):
            await engine.stage(await next_update(engine), listed(cut(read_weights(new))[:-1]))
        await engine.pause()
        engine._timeouts = Timeouts(generate_s=0.2)
        with pytest.raises(EngineTimeout, match="generate"):
            await engine.generate(self.request())
        engine._timeouts = Timeouts()
        await engine.resume()

    async def switches(self, engine, old, new):
        requests = self.ragged(4, max_tokens=150, temperature=0.8)
        calls = [asyncio.ensure_future(engine.generate(each)) for each in requests]
        await engine.generate(self.request(max_tokens=6))
        await engine.pause()
        update = await self.update(engine, new)
        assert await engine.commit(update.id) == update.version == 5
        assert (await engine.health()).status == "PAUSED"
        await engine.resume()
        for request, sample in zip(requests, await asyncio.gather(*calls), strict=True):
            assert set(sample.versions) == {4, 5}
            self.check_logprobs(request, sample, {4: old, 5: new})
        return update

    async def is_mended(self, engine, old, new, version):
        update = await self.update(engine, old)
        await engine.pause("abort")
        await engine._control.rpc({"do": "fault", "at": "load", "after": 7})
        with pytest.raises(EngineError, match="update_weights failed"):
            await engine.commit(update.id)
        assert (await engine.health()).status == "DIRTY"
        await engine.rollback(update.id)
        await engine.resume()
        sample = await engine.generate(request := self.request())
        self.check_logprobs(request, sample, {version: new})
        await engine.stage(update, buckets(read_weights(old)))
        await engine.pause("wait")
        assert await engine.commit(update.id) == update.version
        await engine.resume()
