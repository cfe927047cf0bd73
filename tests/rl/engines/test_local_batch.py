"""The batch computes each request's rows; rows join and leave between tokens."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import torch
from contract_base import ContractBase
from watched import Watched

from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.engines.transformers.batch import RowCache


def request(prompt, *, seed=0, **settings):
    return Request(id=f"{prompt}/{seed}", prompt=tuple(prompt), seed=seed, **settings)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.fixture
def watched(make_model):
    return Watched(make_model(family="qwen3"))


async def test_a_group_of_one_prompt_computes_it_once(watched):
    engine = TransformersEngine(watched.model)
    prompts = [(5, 6, 7, 8), (9, 10, 11), (5, 6, 7, 8, 9)]
    requests = [
        request(prompt, seed=seed, max_tokens=4) for prompt in prompts for seed in range(16)
    ]
    samples = await asyncio.gather(*(engine.generate(each) for each in requests))
    # All but each prompt's last token, which is fed with the draw.
    assert watched.prefills == [(3, 4)]
    assert watched.draws == [48] * 4
    assert len({sample.tokens for sample in samples[:16]}) > 1
    await engine.close()


async def test_requests_join_and_leave_without_computing_the_others_again(watched):
    engine = TransformersEngine(watched.model)
    long = asyncio.ensure_future(engine.generate(request((5, 6, 7), max_tokens=40)))
    for turn in range(4):
        # Joins the running batch, is answered, and leaves.
        await engine.generate(request(range(3, 9 + turn), seed=turn, max_tokens=3))
    assert len((await long).tokens) == 40
    # The first two arrived together.
    assert watched.prefills == [(2, 5), *((1, 5 + turn) for turn in range(1, 4))]
    assert len(watched.draws) == 40
    assert sum(watched.draws) == 40 + 4 * 3
    await engine.close()


async def test_no_more_rows_run_than_there_is_room_for(watched):
    engine = TransformersEngine(watched.model, max_running=4)
    requests = [request((3 + place, 4), max_tokens=1 + place % 5) for place in range(19)]
    samples = await asyncio.gather(*(engine.generate(each) for each in requests))
    assert [len(sample.tokens) for sample in samples] == [1 + place % 5 for place in range(19)]
    assert max(watched.draws) == 4
    await engine.close()


async def test_a_forward_for_new_rows_is_no_longer_than_it_may_be(watched):
    engine = TransformersEngine(watched.model, prefill_tokens=64)
    lengths = (40, 3, 55, 17, 5, 30, 31, 2)
    requests = [request(range(3, 3 + n), max_tokens=2) for n in lengths]
    requests.append(request([7] * 100, max_tokens=2))
    await asyncio.gather(*(engine.generate(each) for each in requests))
    for rows, positions in watched.prefills:
        assert rows * positions <= 64 or rows == 1
    assert sum(rows for rows, _ in watched.prefills) == len(requests)
    assert watched.draws == [9, 9]  # all of them had joined by then
    await engine.close()


async def test_prompts_of_one_token_need_no_forward_of_their_own(watched):
    engine = TransformersEngine(watched.model)
    await asyncio.gather(*(engine.generate(request((n,), max_tokens=3)) for n in range(3, 9)))
    assert watched.prefills == []
    assert watched.draws == [6] * 3
    await engine.close()


async def test_a_commit_computes_the_cache_of_running_requests_anew(make_model, watched):
    contract = ContractBase()
    engine = TransformersEngine(watched.model)
    calls = [
        asyncio.ensure_future(engine.generate(request((5, 6, 7), seed=seed, max_tokens=90)))
        for seed in range(3)
    ]
    await engine.generate(request((9, 8), max_tokens=5))
    await contract.switch(engine, make_model(family="qwen3", seed=1))
    await asyncio.gather(*calls)
    # First the two prompts; then three prompts with the tokens that each has by then.
    assert [rows for rows, _ in watched.prefills] == [2, 3]
    assert watched.prefills[1][1] >= 3 + 5 - 1
    await engine.close()


async def test_running_requests_keep_their_rows_behind_a_commit(make_model, watched):
    contract = ContractBase()
    engine = TransformersEngine(watched.model, max_running=3)
    calls = [
        asyncio.ensure_future(engine.generate(request((5, 6), seed=seed, max_tokens=60)))
        for seed in range(2)
    ]
    await engine.generate(request((9, 8), max_tokens=5))
    update = await contract.update(engine, make_model(family="qwen3", seed=1))
    await engine.pause()
    calls += [
        asyncio.ensure_future(engine.generate(request([7] * (100 + n), max_tokens=2)))
        for n in range(3)
    ]
    await asyncio.sleep(0)
    await engine.commit(update.id)
    await engine.resume()
    await asyncio.gather(*calls)
    # Both of them, and the first that waited.
    assert watched.prefills[1] == (3, 99)
    await engine.close()


async def test_the_loop_is_free_while_a_forward_computes(watched):
    engine = TransformersEngine(watched.model)
    watched.hold()
    call = asyncio.ensure_future(engine.generate(request((5, 6), max_tokens=2)))
    await watched.held()
    health = await engine.health()
    assert (health.status, health.running) == ("SERVING", 1)
    watched.release()
    await call
    await engine.close()


async def test_a_row_that_was_given_up_leaves_the_batch(watched):
    engine = TransformersEngine(watched.model)
    calls = [
        asyncio.ensure_future(engine.generate(request((5, 6), seed=seed, max_tokens=40)))
        for seed in range(3)
    ]
    await engine.generate(request((9, 8), max_tokens=2))
    calls[0].cancel()
    seen = len(watched.draws)
    await engine.generate(request((9, 8), max_tokens=4))
    # The first of them may have begun before.
    assert max(watched.draws[seen + 1 :]) == 3
    await engine.pause()
    calls[1].cancel()  # while nothing is computed
    await asyncio.wait(calls[:2])
    assert (await engine.health()).running == 1
    await engine.resume()
    await calls[2]
    assert watched.draws[-1] == 1
    await engine.close()


def test_an_engine_serves_one_event_loop_after_another(watched):
    engine = TransformersEngine(watched.model)

    async def left_behind():
        watched.hold()
        call = asyncio.ensure_future(engine.generate(request((5, 6), max_tokens=20)))
        await watched.held()
        watched.release()
        assert not call.done()

    async def next_one():
        assert (await engine.health()).running == 0
        return await engine.generate(request((5, 6), max_tokens=20))

    expected = asyncio.run(next_one())
    asyncio.run(left_behind())
    assert asyncio.run(next_one()).tokens == expected.tokens
    asyncio.run(engine.close())


def states(rows, positions, value):
    return [(torch.full((rows, 1, positions, 2), float(value)),) * 2]


def feed(cache, values):
    """One position per row, as a forward writes it; returns what the rows then attend to."""
    new = torch.tensor([float(value) for value in values]).view(-1, 1, 1, 1).expand(-1, 1, 1, 2)
    keys, _ = cache.update(new, new, 0)
    cache.advance()
    return [keys[row, 0, :length, 0].tolist() for row, length in enumerate(cache.lengths_B)]


def test_rows_move_into_the_gaps_with_all_that_they_hold():
    cache = RowCache(layers=1)
    for value in range(5):
        cache.join(
            states(1, value, value) if value else [],
            sequence_of_row=torch.tensor([0]),
            lengths=torch.tensor([value]),
        )
    assert cache.leave([1, 0, 3]) == [2, 4]
    assert feed(cache, [20, 40]) == [[2, 2, 20], [4, 4, 4, 4, 40]]
    assert cache.leave([]) == [0, 1]
    assert cache.leave([0, 1]) == []
    assert cache.rows == 0


def test_rows_grow_past_the_room_there_was():
    cache = RowCache(layers=1)
    cache.join(states(1, 2, 7), sequence_of_row=torch.tensor([0]), lengths=torch.tensor([2]))
    for place in range(150):
        found = feed(cache, [place])
    assert found == [[7, 7, *range(150)]]


@pytest.mark.parametrize("length", [0, 1])
def test_what_a_row_held_before_does_not_reach_the_next_one(length):
    cache = RowCache(layers=1)
    cache.join(states(1, 9, "nan"), sequence_of_row=torch.tensor([0]), lengths=torch.tensor([9]))
    cache.leave([0])
    for place, positions in enumerate((length, 5)):
        cache.join(
            states(1, positions, place) if positions else [],
            sequence_of_row=torch.tensor([0]),
            lengths=torch.tensor([positions]),
        )
    # The first row's place held NaN; it is as wide as the second one now.
    keys, values = cache.update(torch.zeros(2, 1, 1, 2), torch.zeros(2, 1, 1, 2), 0)
    assert keys.shape == values.shape == (2, 1, 6, 2)
    assert bool(keys.isfinite().all())
    assert bool(values.isfinite().all())


def test_a_cache_is_freed_with_its_last_reference():
    cache = RowCache(layers=1)
    cache.join(states(1, 9, 1), sequence_of_row=torch.tensor([0]), lengths=torch.tensor([9]))
    keys = weakref.ref(cache.layers[0].keys)
    gc.disable()
    try:
        del cache
        assert keys() is None
    finally:
        gc.enable()
