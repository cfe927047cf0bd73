"""Pauses that meet each other, resumes, and new requests."""

from __future__ import annotations

import asyncio
import threading

import pytest
from local_cases import contract, request

from megatron_idempotent.rl.engines import EngineDead, EngineError
from megatron_idempotent.rl.engines.transformers import TransformersEngine


def start(call):
    return asyncio.ensure_future(call)


async def test_a_pause_returns_behind_the_forward_that_runs(watched):
    engine = TransformersEngine(watched.model)
    watched.hold()
    call = start(engine.generate(request(max_tokens=3)))
    await watched.held()
    pauses = [start(engine.pause(mode)) for mode in ("keep", "keep")]
    await asyncio.sleep(0)
    assert (await engine.health()).status == "SERVING"
    with pytest.raises(EngineError, match="pause"):
        await engine.commit("any")
    watched.release()
    await asyncio.gather(*pauses)
    forwards = len(watched.prefills) + len(watched.draws)
    assert (await engine.health()).status == "PAUSED"
    assert forwards == 1
    await engine.resume()
    await call
    await engine.close()


async def test_a_request_that_was_answered_while_it_paused_is_not_running(watched, old):
    engine = TransformersEngine(watched.model)
    watched.hold()
    short, long = (start(engine.generate(request(n, prompt=(5,), max_tokens=n))) for n in (1, 9))
    await watched.held()
    pausing = start(engine.pause())
    await asyncio.sleep(0)
    watched.release()
    await pausing
    assert len((await short).tokens) == 1
    assert (await engine.health()).running == 1
    await engine.resume()
    assert len((await long).tokens) == 9
    await engine.close()


async def test_requests_behind_a_waiting_pause_wait_for_the_resume(watched):
    engine = TransformersEngine(watched.model, max_running=2)
    early = [start(engine.generate(request(seed, max_tokens=6))) for seed in range(5)]
    await asyncio.sleep(0)
    pause = start(engine.pause("wait"))
    await asyncio.sleep(0)
    late = start(engine.generate(request(9)))
    await pause
    assert all(call.done() for call in early)
    assert not late.done()
    assert sum(watched.draws) == 5 * 6
    await engine.resume()
    await late
    await engine.close()


async def test_an_idle_engine_pauses_at_once_in_every_mode(watched):
    engine = TransformersEngine(watched.model)
    for mode in ("wait", "keep", "abort"):
        await engine.pause(mode)
        assert (await engine.health()).status == "PAUSED"
        await engine.resume()
    await engine.close()


@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_waiting_pause_can_be_cut_short(watched, mode):
    engine = TransformersEngine(watched.model)
    call = start(engine.generate(request(max_tokens=200)))
    await engine.generate(request(2, max_tokens=3))
    waiting = start(engine.pause("wait"))
    await asyncio.sleep(0)
    await engine.pause(mode)
    await waiting
    assert (await engine.health()).status == "PAUSED"
    if mode == "abort":
        assert (await call).finish_reason == "abort"
    else:
        assert not call.done()
        await engine.resume()
        assert len((await call).tokens) == 200
    await engine.close()


async def test_a_pause_that_was_overtaken_by_a_resume_says_so(watched):
    engine = TransformersEngine(watched.model)
    call = start(engine.generate(request(max_tokens=200)))
    await engine.generate(request(2, max_tokens=3))
    waiting = start(engine.pause("wait"))
    await asyncio.sleep(0)
    await engine.resume()
    with pytest.raises(EngineError, match="resumed"):
        await waiting
    assert not call.done()
    late = start(engine.generate(request(3)))
    assert len((await call).tokens) == 200
    await late
    await engine.close()


async def test_a_pause_that_was_given_up_pauses_all_the_same(watched):
    engine = TransformersEngine(watched.model)
    watched.hold()
    call = start(engine.generate(request(max_tokens=6)))
    await watched.held()
    pausing = start(engine.pause())
    await asyncio.sleep(0)
    pausing.cancel()
    await asyncio.wait([pausing])
    watched.release()
    await engine.pause()
    assert (await engine.health()).status == "PAUSED"
    await engine.resume()
    await call
    await engine.close()


async def test_an_abort_gives_back_requests_that_have_no_row_yet(watched):
    engine = TransformersEngine(watched.model, max_running=1)
    calls = [start(engine.generate(request(seed, max_tokens=100))) for seed in range(3)]
    watched.hold()
    await watched.held()
    pausing = start(engine.pause("abort"))
    await asyncio.sleep(0)
    watched.release()
    await pausing
    samples = await asyncio.gather(*calls)
    assert [sample.finish_reason for sample in samples] == ["abort"] * 3
    assert samples[2].tokens == ()
    assert (await engine.health()).running == 0
    await engine.close()


async def test_closing_waits_for_the_forward_that_runs(watched, old):
    engine = TransformersEngine(watched.model, name="e7")
    watched.hold()
    calls = [start(engine.generate(request(seed, max_tokens=9))) for seed in range(2)]
    await watched.held()
    closing = start(engine.close())
    await asyncio.sleep(0)
    with pytest.raises(EngineDead, match="e7"):
        await engine.generate(request())
    watched.release()
    await closing
    assert [call.result().finish_reason for call in calls] == ["abort"] * 2
    for call in (engine.pause, engine.resume, engine.sleep):
        with pytest.raises(EngineDead, match="e7"):
            await call()
    with pytest.raises(EngineDead, match="e7"):
        await contract.update(engine, old)
    assert sum(tensor.nbytes for tensor in watched.model.parameters()) == 0
    for thread in threading.enumerate():
        if thread.name.startswith("engine-e7"):
            thread.join(30)
            assert not thread.is_alive()


def test_an_engine_that_cannot_serve_a_model_says_so(make_model):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(make_model(family="qwen3"))
    config.layer_types = ["full_attention", "sliding_attention"]
    config.sliding_window = 8
    with pytest.raises(ValueError, match="sliding_attention"):
        TransformersEngine(AutoModelForCausalLM.from_config(config))
    for settings in ({"max_running": 0}, {"prefill_tokens": 0}):
        with pytest.raises(ValueError, match="max_running"):
            TransformersEngine(make_model(family="qwen3"), **settings)


async def test_a_model_in_training_is_served_without_dropout(make_model):
    from transformers import AutoModelForCausalLM

    directory = make_model(family="qwen3")
    model = AutoModelForCausalLM.from_pretrained(directory, attention_dropout=0.5).train()

    engine = TransformersEngine(model)
    asked = request(max_tokens=20)
    contract.check_logprobs(asked, await engine.generate(asked), directory)
    await engine.close()
