"""An engine in a Ray actor takes an update by a transport; tests/rl/ray has the actor itself."""

from __future__ import annotations

import asyncio
import functools

import pytest

pytest.importorskip("transformers")

from contract_base import cut, next_update
from tiny import read_weights

from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.engines.ray import EngineActor
from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.weights import UpdateDamaged, UpdateRefused
from megatron_idempotent.rl.weights.transports import DiskSender

pytestmark = pytest.mark.full


@pytest.fixture
def actor(make_model):
    make = functools.partial(TransformersEngine, make_model(vocabulary=64), name="engine-0")
    return EngineActor(make)


@pytest.fixture
def sent(make_model, tmp_path):
    """Send an update of a model to an actor; `spoil` gets each announcement."""

    async def sent(actor, update, spoil=lambda announced: announced):
        sender = DiskSender(tmp_path / "sync")
        try:
            if not await actor.open(update, await sender.open(update)):
                return "has it"
            for bucket in cut(read_weights(make_model(vocabulary=64, seed=1)), nbytes=1 << 14):
                await actor.receive(spoil(dict(await sender.announce(bucket))))
                await sender.release(bucket)
            await actor.complete()
        finally:
            await actor.drop()
            await sender.close()
        return "staged"

    return sent


async def test_an_update_comes_by_a_transport_and_once(actor, sent):
    update = await next_update(actor._engine)
    assert await sent(actor, update) == "staged"
    await actor.call("pause", "keep")
    assert await actor.call("commit", update.id) == update.version
    await actor.call("resume")
    assert (await actor.call("health")).version == update.version
    assert await sent(actor, update) == "has it"


async def test_what_the_engine_refuses_is_raised_and_nothing_is_staged(actor, sent):
    update = await next_update(actor._engine)

    def flipped(announced):
        first = next(iter(announced["tensors"]))
        first["checksum"] = f"{int(first['checksum'], 16) ^ 1:016x}"
        return announced

    with pytest.raises(UpdateDamaged):
        await asyncio.wait_for(sent(actor, update, flipped), 60)
    late = await next_update(actor._engine)
    assert await sent(actor, late) == "staged"
    await actor.call("pause", "keep")
    await actor.call("commit", late.id)
    with pytest.raises(UpdateRefused):
        await sent(actor, update)


async def test_requests_are_answered_by_their_ticket_in_any_order_and_given_up(actor):
    def request(name):
        return Request(id=name, prompt=(7, 3, 21), max_tokens=8, seed=5)

    early = asyncio.ensure_future(actor.answer(1))  # before it was taken
    gone = asyncio.ensure_future(actor.answer(2))
    await asyncio.sleep(0)
    gone.cancel()
    await actor.take([(0, request("a")), (1, request("b")), (2, request("c"))])
    late = await actor.answer(0)
    assert (late.request_id, (await early).request_id) == ("a", "b")
    assert late.tokens == (await early).tokens
    long = Request(id="d", prompt=(7, 3), max_tokens=200, temperature=50.0)
    await actor.take([(3, long)])
    waiting = asyncio.ensure_future(actor.answer(3))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    while (await actor.call("health")).running:  # what it held is freed
        await asyncio.sleep(0.01)
    assert not actor._answers
