"""Pauses that meet each other, resumes, new requests, and forwards that fail."""

import asyncio
import threading

import pytest
import torch
from local_cases import begun, contract, held, request, start, works

from megatron_idempotent.rl.engines import EngineDead, EngineError
from megatron_idempotent.rl.engines.transformers import RequestSlot, TransformersEngine


def later(call):
    return asyncio.ensure_future(call)


async def test_a_pause_returns_after_the_forward_that_runs(watched, engine):
    short, long = await held(watched, engine, *(request(n, max_tokens=n) for n in (1, 9)))
    pauses = [later(engine.pause(mode)) for mode in ("keep", "keep", "keep")]
    await asyncio.sleep(0)
    pauses[2].cancel()  # it pauses all the same
    assert (await engine.health()).status == "SERVING"
    with pytest.raises(EngineError, match="pause"):
        await engine.commit("any")
    watched.release()
    await asyncio.gather(*pauses[:2])
    forwards = len(watched.prefills) + len(watched.draws)
    health = await engine.health()
    assert (health.status, forwards) == ("PAUSED", 1)
    await engine.resume()
    assert [len((await call).tokens) for call in (short, long)] == [1, 9]


async def test_a_request_that_was_answered_while_it_paused_is_not_running(watched, engine):
    calls = await held(watched, engine, *(request(n, prompt=(5,), max_tokens=n) for n in (1, 9)))
    pausing = later(engine.pause())
    await asyncio.sleep(0)
    watched.release()
    await pausing
    assert len((await calls[0]).tokens) == 1
    assert (await engine.health()).running == 1
    await engine.resume()
    assert len((await calls[1]).tokens) == 9


async def test_requests_after_a_waiting_pause_wait_for_the_resume(watched, make_engine):
    engine = make_engine(max_running=2)
    early = start(engine, *(request(seed, max_tokens=6) for seed in range(5)))
    await asyncio.sleep(0)
    pause = later(engine.pause("wait"))
    await asyncio.sleep(0)
    (late,) = start(engine, request(9))
    await pause
    assert all(call.done() for call in early)
    assert not late.done()
    assert sum(watched.draws) == 5 * 6
    await engine.resume()
    await late


async def test_an_idle_engine_pauses_at_once_in_every_mode(engine):
    for mode in ("wait", "keep", "abort"):
        await engine.pause(mode)
        assert (await engine.health()).status == "PAUSED"
        await engine.resume()


@pytest.mark.parametrize("by", ["keep", "abort", "resume"])
async def test_a_waiting_pause_is_cut_short_by_another_and_overtaken_by_a_resume(engine, by):
    (call,) = await begun(engine, request(max_tokens=200))
    waiting = later(engine.pause("wait"))
    await asyncio.sleep(0)
    if by == "resume":
        await engine.resume()
        with pytest.raises(EngineError, match="resumed"):
            await waiting
        await engine.generate(request(3))
    else:
        await engine.pause(by)
        await waiting
        assert (await engine.health()).status == "PAUSED"
    if by == "abort":
        assert (await call).finish_reason == "abort"
    else:
        assert not call.done()
        await engine.resume()
        assert len((await call).tokens) == 200


async def test_an_abort_gives_back_requests_that_have_no_row_yet(watched, make_engine):
    engine = make_engine(max_running=1)
    calls = await held(watched, engine, *(request(seed, max_tokens=100) for seed in range(3)))
    pausing = later(engine.pause("abort"))
    await asyncio.sleep(0)
    watched.release()
    await pausing
    samples = await asyncio.gather(*calls)
    assert [sample.finish_reason for sample in samples] == ["abort"] * 3
    assert samples[2].tokens == ()
    assert (await engine.health()).running == 0


async def test_closing_waits_for_the_forward_that_runs(watched, engine, old):
    calls = await held(watched, engine, *(request(seed, max_tokens=9) for seed in range(2)))
    closing = later(engine.close())
    await asyncio.sleep(0)
    with pytest.raises(EngineDead, match="e1"):
        await engine.generate(request())
    watched.release()
    await closing
    assert [call.result().finish_reason for call in calls] == ["abort"] * 2
    for call in (
        engine.pause(),
        engine.resume(),
        engine.sleep(),
        engine.wake(("weights",)),
        engine.commit("u"),
        engine.rollback("u"),
        contract.update(engine, old),
    ):
        with pytest.raises(EngineDead, match="e1"):
            await call
    assert sum(tensor.nbytes for tensor in watched.model.parameters()) == 0
    for thread in threading.enumerate():
        if thread.name.startswith("engine-e1"):
            thread.join(30)
            assert not thread.is_alive()


def test_an_engine_that_cannot_serve_a_model_says_so(old):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(old)
    config.layer_types = ["full_attention", "sliding_attention"]
    config.sliding_window = 8
    with pytest.raises(ValueError, match="sliding_attention"):
        TransformersEngine(AutoModelForCausalLM.from_config(config))
    for settings in ({"max_running": 0}, {"prefill_tokens": 0}):
        with pytest.raises(ValueError, match="max_running"):
            TransformersEngine(old, **settings)


async def test_a_model_in_training_is_served_without_dropout(old, make_engine):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(old, attention_dropout=0.5).train()
    await works(make_engine(model), old, 0)


async def test_a_forward_that_fails_fails_the_requests_in_it(watched, engine, old):
    calls = await begun(engine, *(request(seed, max_tokens=50) for seed in (1, 2)))
    watched.failing = RuntimeError("out of memory")
    for call in calls:
        with pytest.raises(EngineError, match=r"e1.*2 requests.*RuntimeError: out of memory"):
            await call
    await works(engine, old, 0)


async def test_new_requests_that_fail_do_not_fail_the_running_ones(watched, engine, old):
    (running,) = await begun(engine, request(1, max_tokens=60))
    watched.failing_prefill = RuntimeError("poisoned prompt")
    with pytest.raises(EngineError, match=r"1 requests.*poisoned prompt"):
        await engine.generate(request(2, prompt=(9, 9, 9)))
    assert not running.done()
    contract.check_logprobs(request(1, max_tokens=60), await running, old)
    await works(engine, old, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
async def test_logits_that_are_not_finite_are_an_error_and_not_a_token(watched, engine, old, bad):
    with torch.no_grad():
        embedding = watched.model.base_model.embed_tokens.weight
        kept = embedding[13].clone()
        embedding[13] = bad
    (good,) = start(engine, request(1, prompt=(5, 6), max_tokens=1))
    with pytest.raises(EngineError, match=r"not finite after 0 tokens.*version 0"):
        await engine.generate(request(2, prompt=(5, 13, 6, 7, 8, 9, 10)))
    await good
    with torch.no_grad():
        embedding[13] = kept
    # Rows that take its place have none of its numbers.
    await works(engine, old, 0)


async def test_an_error_of_our_own_leaves_nobody_waiting(engine, old, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RequestSlot, "take", lambda *_: 1 / 0)
        calls = start(engine, *(request(seed) for seed in range(3)))
        answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        assert isinstance(answer, EngineError)
        assert isinstance(answer.__cause__, ZeroDivisionError)
    await works(engine, old, 0)


async def test_what_fails_after_a_commit_fails_the_requests_only(watched, engine, new):
    (call,) = await begun(engine, request(1, max_tokens=60))
    update = await contract.update(engine, new)
    await engine.pause()
    await engine.commit(update.id)
    watched.failing = RuntimeError("no memory for the cache")
    await engine.resume()
    with pytest.raises(EngineError, match="no memory for the cache"):
        await call
    await works(engine, new, 1)
