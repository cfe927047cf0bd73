"""An engine in a Ray actor beside the contract: its faults, and the way in between."""

from __future__ import annotations

import asyncio
import sys

import pytest
from contract_base import ContractBase, cut, next_update, until
from local_cases import request, works
from one_actor import engine_in_it
from tiny import read_weights

from megatron_idempotent.rl.engines import EngineDead, EngineError
from megatron_idempotent.rl.engines.ray import RayEngine

contract = ContractBase()


def run(scenario):
    """Within a deadline that leaves room for actors to start."""
    asyncio.run(asyncio.wait_for(scenario(), 200))


@pytest.mark.usefixtures("one_actor")
class TestAlive:
    def on_engine(self, directory, scenario, **settings):
        async def whole():
            engine = engine_in_it(directory, **settings)
            await engine.start()
            await scenario(engine)
            await engine.close()

        run(whole)

    def test_errors_of_other_classes_are_engine_errors_with_their_traceback(self, old):
        async def scenario(engine):
            with pytest.raises(EngineError, match=r"(?s)remote raised LookupError: odd.*ray_cases"):
                await engine._remote.call("raise_oddly")
            with pytest.raises(EngineError, match=r"cannot pickle.*lock"):
                await engine._remote.call("answer_oddly")
            await works(engine, old, 0)

        self.on_engine(old, scenario)

    def test_two_buckets_are_on_their_way_and_no_more_are_made(self, old, new):
        async def scenario(engine):
            made = 0

            async def counted():
                nonlocal made
                for bucket in cut(read_weights(new), nbytes=1 << 12):
                    made += 1
                    yield bucket

            update = await next_update(engine)
            staging = asyncio.ensure_future(engine.stage(update, counted()))

            async def as_many():
                return made == 3

            await until(as_many)  # one is read, two are on their way
            for _ in range(20):
                await engine.health()
            assert made == 3
            await engine._remote.call("go_on")
            await staging
            assert made > 6
            await engine.pause()
            assert await engine.commit(update.id) == update.version
            await engine.resume()
            await works(engine, new, update.version)

        self.on_engine(old, scenario, reads=1)

    def test_requests_above_the_limit_wait_here(self, old):
        async def scenario():
            engine = engine_in_it(old)
            engine._room = asyncio.Semaphore(2)
            await engine.start()
            await engine.pause()
            calls = [asyncio.ensure_future(engine.generate(request(seed))) for seed in range(5)]

            async def two_wait():
                return (await engine.health()).running == 2

            await until(two_wait)
            for _ in range(20):
                assert (await engine.health()).running == 2
            await engine.resume()
            assert len(await asyncio.gather(*calls)) == 5
            await engine.close()

        run(scenario)

    def test_an_engine_of_a_cluster_that_was_left_is_lost(self, old, cluster, monkeypatch):
        async def scenario(engine):
            with monkeypatch.context() as left:
                left.setattr(cluster, "is_initialized", lambda: False)
                with pytest.raises(EngineDead, match="left the Ray cluster"):
                    await engine.generate(request())
            assert (await engine.health()).status == "DEAD"

        self.on_engine(old, scenario)


class TestDying:
    def test_a_lost_engine_fails_what_runs_at_once_and_comes_back(self, cluster, old, new):
        async def scenario():
            engine = RayEngine(
                "ray_cases:make_slowly",
                (str(old), {}),
                name="mortal",
                restarts=1,
                health_timeout_s=5.0,
            )
            await engine.start()
            closed = asyncio.Event()
            arrived = asyncio.Event()

            async def silent():
                try:
                    yield cut(read_weights(new))[0]
                    arrived.set()
                    await asyncio.Event().wait()
                finally:
                    closed.set()

            calls = [
                asyncio.ensure_future(engine.generate(request(seed, max_tokens=200)))
                for seed in range(4)
            ]
            calls.append(asyncio.ensure_future(engine.stage(await next_update(engine), silent())))
            await arrived.wait()
            calls.append(asyncio.ensure_future(engine._remote.call("die")))
            for found in await asyncio.gather(*calls, return_exceptions=True):
                # A request may have been answered before; none is left without an answer.
                if not hasattr(found, "tokens"):
                    assert type(found) is EngineDead, found
                    assert "mortal died" in str(found)
            assert closed.is_set()
            assert (await engine.health()).status == "DEAD"
            with pytest.raises(EngineDead, match=r"restart\(\)"):
                await engine.generate(request())

            async def serves():
                await asyncio.sleep(0.05)
                return (await engine.health()).status == "SERVING"

            await until(serves)  # `health` has restarted it, as it may once
            await works(engine, old, 0)
            contract_update = await contract.update(engine, new, above=7)
            await engine.pause()
            assert await engine.commit(contract_update.id) == 7
            await engine.resume()
            await works(engine, new, 7)

            hung = asyncio.ensure_future(engine._remote.call("hang"))
            engine._health_timeout_s = 0.2

            async def hangs():
                return (await engine.health()).status == "DEAD"

            await until(hangs)
            health = await engine.health()
            assert (health.status, health.version) == ("DEAD", None)
            assert "0.2 s" in health.detail
            running = asyncio.ensure_future(engine.generate(request()))
            await asyncio.sleep(0)
            await engine.restart()
            for call in (hung, running):
                with pytest.raises(EngineDead, match="mortal died"):
                    await call
            engine._health_timeout_s = 5.0
            await works(engine, old, 0)
            await engine.close()
            await engine.close()
            assert (await engine.health()).detail == "closed"
            with pytest.raises(EngineDead, match="closed"):
                await engine.start()

        run(scenario)

    def test_a_factory_that_raises_says_what(self, cluster):
        async def scenario():
            engine = RayEngine("ray_cases:refuse", "this", name="none")
            with pytest.raises(EngineDead, match="none was not started"):
                await engine.generate(request())
            with pytest.raises(ValueError, match="no engine for this"):
                await engine.start()
            assert (await engine.health()).status == "DEAD"
            await engine.close()

        run(scenario)

    def test_an_actor_that_finds_no_room_says_what_it_asks_for_and_what_there_is(self, cluster):
        async def scenario():
            engine = RayEngine(
                "ray_cases:refuse", None, name="big", num_cpus=1000, start_timeout_s=0.5
            )
            with pytest.raises(EngineError, match=r"num_cpus=1000.* 0\.5 s|0\.5 s.*num_cpus=1000"):
                await engine.start()
            with pytest.raises(EngineError, match="of 8 CPU"):
                await engine.start()
            await engine.close()

        run(scenario)


def test_without_ray_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    engine = RayEngine("ray_cases:refuse", None, name="none")
    with pytest.raises(ModuleNotFoundError, match=r"megatron-idempotent\[ray\]"):
        asyncio.run(engine.start())


def test_without_a_cluster_it_says_how_to_join_one(monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    engine = RayEngine("ray_cases:refuse", None, name="none")
    with pytest.raises(RuntimeError, match=r"ray.init\(\)"):
        asyncio.run(engine.start())


@pytest.mark.parametrize(
    "settings", [{"factory": "no_colon"}, {"max_running": 0}, {"restarts": -1}]
)
def test_settings_that_cannot_be_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        RayEngine(**{"factory": "a:b", "name": "x", **settings})
