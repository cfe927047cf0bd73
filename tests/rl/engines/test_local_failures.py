"""A failure stays with the requests and updates that it belongs to."""

from __future__ import annotations

import asyncio

import pytest
import torch
from contract_base import buckets, next_update
from local_cases import contract, request, works
from tiny import read_weights

from megatron_idempotent.rl.engines import EngineError
from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.engines.transformers.scheduler import RequestSlot
from megatron_idempotent.rl.weights import UpdateDamaged, UpdateRefused


async def test_a_forward_that_fails_fails_the_requests_in_it(watched, old):
    engine = TransformersEngine(watched.model, name="e1")
    calls = [
        asyncio.ensure_future(engine.generate(request(seed, max_tokens=50))) for seed in (1, 2)
    ]
    await engine.generate(request(prompt=(8,), max_tokens=3))
    watched.failing = RuntimeError("out of memory")
    for call in calls:
        with pytest.raises(EngineError, match=r"e1.*2 requests.*RuntimeError: out of memory"):
            await call
    await works(engine, old, 0)
    await engine.close()


async def test_new_requests_that_fail_do_not_fail_the_running_ones(watched, old):
    engine = TransformersEngine(watched.model)
    running = asyncio.ensure_future(engine.generate(request(1, max_tokens=60)))
    await engine.generate(request(prompt=(8,), max_tokens=3))
    watched.failing_prefill = RuntimeError("poisoned prompt")
    with pytest.raises(EngineError, match=r"1 requests.*poisoned prompt"):
        await engine.generate(request(2, prompt=(9, 9, 9)))
    assert not running.done()
    contract.check_logprobs(request(1, max_tokens=60), await running, old)
    await works(engine, old, 0)
    await engine.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
async def test_logits_that_are_not_finite_are_an_error_and_not_a_token(watched, old, bad):
    engine = TransformersEngine(watched.model)
    with torch.no_grad():
        embedding = watched.model.base_model.embed_tokens.weight
        kept = embedding[13].clone()
        embedding[13] = bad
    good = asyncio.ensure_future(engine.generate(request(1, prompt=(5, 6), max_tokens=1)))
    with pytest.raises(EngineError, match=r"not finite after 0 tokens.*version 0"):
        await engine.generate(request(2, prompt=(5, 13, 6, 7, 8, 9, 10)))
    await good
    with torch.no_grad():
        embedding[13] = kept
    # Rows that take its place have none of its numbers.
    await works(engine, old, 0)
    await engine.close()


async def test_an_error_of_our_own_leaves_nobody_waiting(watched, old, monkeypatch):
    engine = TransformersEngine(watched.model)
    with monkeypatch.context() as patch:
        patch.setattr(RequestSlot, "take", lambda *_: 1 / 0)
        answers = await asyncio.gather(
            *(engine.generate(request(seed)) for seed in range(3)), return_exceptions=True
        )
    for answer in answers:
        assert isinstance(answer, EngineError)
        assert isinstance(answer.__cause__, ZeroDivisionError)
    await works(engine, old, 0)
    await engine.close()


async def test_what_fails_behind_a_commit_fails_the_requests_only(watched, new):
    engine = TransformersEngine(watched.model)
    call = asyncio.ensure_future(engine.generate(request(1, max_tokens=60)))
    await engine.generate(request(prompt=(8,), max_tokens=3))
    update = await contract.update(engine, new)
    await engine.pause()
    await engine.commit(update.id)
    watched.failing = RuntimeError("no memory for the cache")
    await engine.resume()
    with pytest.raises(EngineError, match="no memory for the cache"):
        await call
    await works(engine, new, 1)
    await engine.close()


async def test_a_rollback_gives_up_an_update_that_is_being_staged(watched, old, new):
    engine = TransformersEngine(watched.model)
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def silent():
        try:
            async for bucket in buckets(read_weights(new)):
                yield bucket
                arrived.set()
                await asyncio.Event().wait()
        finally:
            closed.set()

    update = await next_update(engine)
    staging = asyncio.ensure_future(engine.stage(update, silent()))
    await arrived.wait()
    await engine.rollback("another")
    assert not staging.done()
    await engine.rollback(update.id)
    with pytest.raises(UpdateRefused, match="rolled back"):
        await staging
    assert closed.is_set()
    await works(engine, old, 0)
    await works(engine, new, await contract.switch(engine, new))
    await engine.close()


@pytest.mark.parametrize("how", ["cancelled", "refused"])
async def test_a_stage_that_ends_early_closes_its_buckets(watched, new, how):
    engine = TransformersEngine(watched.model)
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def endless():
        try:
            async for bucket in buckets(read_weights(new)):
                yield bucket
                arrived.set()
                if how == "refused":
                    yield bucket  # a second time
                await asyncio.Event().wait()
        finally:
            closed.set()

    staging = asyncio.ensure_future(engine.stage(await next_update(engine), endless()))
    await arrived.wait()
    if how == "cancelled":
        staging.cancel()
    await asyncio.wait([staging])
    assert closed.is_set()
    if how == "refused":
        with pytest.raises(UpdateDamaged):
            await staging
    await engine.close()
