"""Commits that fail half-way: everything is back, or nothing is served."""

from __future__ import annotations

import asyncio

import pytest
from contract_base import buckets, next_update
from local_cases import contract, request, works
from tiny import read_weights

from megatron_idempotent.rl.engines import EngineError
from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.engines.transformers.weights import ServedWeights
from megatron_idempotent.rl.weights import UpdateRefused, WeightUpdate


class Torn:
    """Lets the exchange of tensors fail at one of them."""

    def __init__(self, monkeypatch):
        self.calls, self.fail_from, self.fail_to = 0, None, None
        put = ServedWeights._put

        def counted(served, name, tensor):
            self.calls += 1
            if self.fail_from is not None and self.fail_from <= self.calls < self.fail_to:
                raise MemoryError(f"no room for {name}")
            put(served, name, tensor)

        monkeypatch.setattr(ServedWeights, "_put", counted)

    def at(self, first, last=None):
        self.calls, self.fail_from, self.fail_to = 0, first, last or first + 1

    def never(self):
        self.fail_from = None


@pytest.mark.parametrize("place", [1, 2, 11, 25])
@pytest.mark.parametrize("then", ["commit", "rollback"])
async def test_a_commit_that_fails_puts_everything_back(
    watched, old, new, monkeypatch, place, then
):
    engine = TransformersEngine(watched.model)
    torn = Torn(monkeypatch)
    await contract.switch(engine, new)
    update = await contract.update(engine, old)
    call = asyncio.ensure_future(engine.generate(request(1, max_tokens=30)))
    await engine.generate(request(prompt=(8,), max_tokens=3))
    await engine.pause()
    torn.at(place)
    with pytest.raises(EngineError, match=r"MemoryError: no room.*before is back"):
        await engine.commit(update.id)
    health = await engine.health()
    assert (health.status, health.version) == ("PAUSED", 1)
    if then == "rollback":
        await engine.rollback(update.id)
        with pytest.raises(EngineError, match="nothing staged"):
            await engine.commit(update.id)
    else:
        assert await engine.commit(update.id) == 2
    await engine.resume()
    contract.check_logprobs(request(1, max_tokens=30), await call, {1: new, 2: old})
    await works(engine, *((new, 1) if then == "rollback" else (old, 2)))
    await engine.close()


@pytest.mark.parametrize("then", ["commit", "rollback"])
async def test_a_second_commit_that_fails_puts_back_what_the_first_had_torn(
    watched, old, new, monkeypatch, then
):
    engine = TransformersEngine(watched.model)
    torn = Torn(monkeypatch)
    update = await contract.update(engine, new)
    await engine.pause()
    for place in (7, 9):
        torn.at(place, 1000)
        with pytest.raises(EngineError, match="in part"):
            await engine.commit(update.id)
    if then == "commit":
        torn.at(20)
        with pytest.raises(EngineError, match="before is back"):
            await engine.commit(update.id)
    else:
        torn.never()
        await engine.rollback(update.id)
    await engine.resume()
    await works(engine, old, 0)
    await engine.close()


async def test_weights_that_were_freed_cannot_be_rolled_back(watched, new, monkeypatch):
    engine = TransformersEngine(watched.model)
    torn = Torn(monkeypatch)
    update = await contract.update(engine, new)
    await engine.pause()
    torn.at(7, 1000)
    with pytest.raises(EngineError, match="in part"):
        await engine.commit(update.id)
    torn.never()
    await engine.sleep()
    await engine.wake(("weights", "kv_cache"))
    await engine.rollback(update.id)
    assert (await engine.health()).status == "DIRTY"
    await engine.close()


async def test_freed_weights_that_were_loaded_in_part_are_not_served(watched, new, monkeypatch):
    engine = TransformersEngine(watched.model)
    torn = Torn(monkeypatch)
    await engine.sleep()
    await engine.wake(("weights", "kv_cache"))
    update = WeightUpdate(id="awake", version=1)
    await engine.stage(update, buckets(read_weights(new)))
    for last in (8, 1000):
        torn.at(7, last)
        with pytest.raises(EngineError, match="no room"):
            await engine.commit(update.id)
        assert (await engine.health()).status == "DIRTY"
    torn.never()
    await engine.rollback(update.id)
    with pytest.raises(EngineError, match="freed"):
        await engine.resume()
    await engine.stage(update, buckets(read_weights(new)))
    await engine.commit(update.id)
    await engine.resume()
    await works(engine, new, 1)
    await engine.close()


@pytest.mark.parametrize("then", ["commit", "rollback", "other update"])
async def test_weights_of_two_versions_are_never_served(watched, old, new, monkeypatch, then):
    engine = TransformersEngine(watched.model)
    torn = Torn(monkeypatch)
    update = await contract.update(engine, new)
    call = asyncio.ensure_future(engine.generate(request(1, max_tokens=30)))
    await engine.generate(request(prompt=(8,), max_tokens=3))
    await engine.pause()
    torn.at(7, 1000)  # putting them back fails too
    with pytest.raises(EngineError, match="in part"):
        await engine.commit(update.id)
    health = await engine.health()
    assert (health.status, health.version) == ("DIRTY", None)
    assert update.id in health.detail
    with pytest.raises(EngineError, match=update.id):
        await engine.resume()
    with pytest.raises(EngineError, match="take back"):
        await engine.rollback(update.id)
    assert (await engine.health()).status == "DIRTY"
    based = await next_update(engine, above=5)
    with pytest.raises(UpdateRefused, match="no version"):
        await engine.stage(
            type(based)(id=based.id, version=based.version, base_version=1),
            buckets(read_weights(new)),
        )
    torn.never()
    if then == "rollback":
        await engine.rollback("another")
        assert (await engine.health()).status == "DIRTY"
        await engine.rollback(update.id)
        expected = (old, 0)
    elif then == "commit":
        expected = (new, await engine.commit(update.id))
        await engine.rollback(update.id)  # too late
    else:
        other = await contract.update(engine, old, above=5)
        expected = (old, await engine.commit(other.id))
    assert (await engine.health()).status == "PAUSED"
    await engine.resume()
    contract.check_logprobs(
        request(1, max_tokens=30), await call, {0: old, expected[1]: expected[0]}
    )
    await works(engine, *expected)
    await engine.close()
