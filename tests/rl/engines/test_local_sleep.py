"""An engine that shares its device with the trainer."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from contract_base import buckets, next_update
from local_cases import contract, request
from tiny import read_weights
from watched import Watched

from megatron_idempotent.rl.engines import EngineError
from megatron_idempotent.rl.engines.pool import generate_whole
from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.weights import UpdateRefused, WeightUpdate


def bytes_of(model):
    return sum(tensor.nbytes for tensor in model.parameters())


@pytest.mark.parametrize("paused", [False, True])
async def test_asleep_it_holds_no_weights_and_no_cache(old, paused):
    watched = Watched(old)
    engine = TransformersEngine(watched.model)
    calls = [
        asyncio.ensure_future(engine.generate(request(seed, max_tokens=100))) for seed in range(3)
    ]
    await engine.generate(request(7, max_tokens=4))
    if paused:
        await engine.pause("keep")
    await engine.sleep()
    for seed, sample in enumerate(await asyncio.gather(*calls)):
        assert sample.finish_reason == "abort"
        assert 0 < len(sample.tokens) < 100
        contract.check_logprobs(request(seed), sample, old)
    assert bytes_of(watched.model) == 0
    health = await engine.health()
    assert (health.status, health.version, health.running) == ("DIRTY", None, 0)
    assert "wake" in health.detail
    await engine.sleep()
    await engine.close()


@pytest.mark.parametrize("paused", [False, True])
async def test_it_serves_again_with_the_weights_it_is_given(old, new, paused):
    watched = Watched(old)
    whole = bytes_of(watched.model)
    engine = TransformersEngine(watched.model)
    waiting = asyncio.ensure_future(generate_whole(engine, request(1, max_tokens=60)))
    await engine.generate(request(7, max_tokens=4))
    if paused:
        await engine.pause("keep")
    await engine.sleep()
    await engine.wake(("weights",))
    # Resuming now would serve nothing at all.
    with pytest.raises(EngineError, match="stage and commit"):
        await engine.resume()
    update = WeightUpdate(id="awake", version=3)
    await engine.stage(update, buckets(read_weights(new)))
    assert await engine.commit(update.id) == 3
    assert (await engine.health()).status == "PAUSED"
    with pytest.raises(EngineError, match="kv_cache"):
        await engine.resume()
    await engine.wake(("kv_cache",))
    assert not waiting.done()
    await engine.resume()
    sample = await waiting
    assert len(sample.tokens) == 60
    assert set(sample.versions) == {0, 3}
    contract.check_logprobs(request(1, max_tokens=60), sample, {0: old, 3: new})
    assert bytes_of(watched.model) == whole
    await engine.close()


async def test_the_same_update_is_loaded_again_behind_a_sleep(old, new):
    engine = TransformersEngine(old)
    update = await contract.update(engine, new)
    await engine.pause()
    await engine.commit(update.id)
    for above in (0, 1):
        await engine.sleep()
        await engine.wake(("weights", "kv_cache"))
        late = dataclasses.replace(update, id="late", version=0)
        with pytest.raises(UpdateRefused, match="late"):
            await engine.stage(late, buckets(read_weights(old)))
        based = WeightUpdate(id="based", version=9, base_version=1)
        with pytest.raises(UpdateRefused, match="no version"):
            await engine.stage(based, buckets(read_weights(old)))
        with pytest.raises(EngineError, match="staged"):
            await engine.commit(update.id)
        again = dataclasses.replace(update, version=update.version + above)
        await engine.stage(again, buckets(read_weights(new)))
        assert await engine.commit(again.id) == again.version
    await engine.resume()
    contract.check_logprobs(request(2), await engine.generate(request(2)), new)
    await engine.close()


async def test_what_was_staged_is_given_up_too(old, new):
    engine = TransformersEngine(old)
    update = await contract.update(engine, new)
    await engine.sleep()
    await engine.wake(("weights", "kv_cache"))
    with pytest.raises(EngineError, match="staged"):
        await engine.commit(update.id)
    await engine.close()


async def test_weights_wake_before_the_cache(old, new):
    engine = TransformersEngine(old)
    await engine.wake(("kv_cache",))  # awake already
    await engine.sleep()
    with pytest.raises(EngineError, match="weights"):
        await engine.wake(("kv_cache",))
    with pytest.raises(ValueError, match="graphs"):
        await engine.wake(("weights", "graphs"))
    with pytest.raises(EngineError, match="asleep"):
        await contract.update(engine, new)
    await engine.wake(("weights",))
    await engine.wake(("weights",))
    await engine.wake(("kv_cache",))
    await contract.switch(engine, new)
    contract.check_logprobs(request(2), await engine.generate(request(2)), new)
    await engine.close()


@pytest.mark.parametrize("how", ["sleep", "close"])
async def test_an_update_that_is_being_staged_is_given_up(old, new, how):
    engine = TransformersEngine(old)
    arrived = asyncio.Event()

    async def silent():
        async for bucket in buckets(read_weights(new)):
            yield bucket
            arrived.set()
            await asyncio.Event().wait()

    staging = asyncio.ensure_future(engine.stage(await next_update(engine), silent()))
    await arrived.wait()
    await getattr(engine, how)()
    with pytest.raises(UpdateRefused, match="freed"):
        await staging
    if how == "sleep":
        await engine.wake(("weights", "kv_cache"))
        await contract.switch(engine, new)
        contract.check_logprobs(request(2), await engine.generate(request(2)), new)
        await engine.close()
