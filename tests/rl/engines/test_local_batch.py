"""The batch computes each request's rows, which join and leave between tokens, and draws tokens."""

import asyncio
import gc
import math
import weakref

import pytest
import torch
from local_cases import begun, contract, held, request, start

from megatron_idempotent.rl.engines.transformers import RequestSlot
from megatron_idempotent.rl.engines.transformers_batch import RowCache, draw


async def test_a_group_of_one_prompt_computes_it_once(watched, engine):
    prompts = [(5, 6, 7, 8), (9, 10, 11), (5, 6, 7, 8, 9)]
    requests = [
        request(seed, prompt=prompt, max_tokens=4) for prompt in prompts for seed in range(16)
    ]
    samples = await asyncio.gather(*start(engine, *requests))
    # All but each prompt's last token, which is fed with the draw.
    assert watched.prefills == [(3, 4)]
    assert watched.draws == [48] * 4
    assert len({sample.tokens for sample in samples[:16]}) > 1


async def test_requests_join_and_leave_without_computing_the_others_again(watched, engine):
    (long,) = start(engine, request(max_tokens=40))
    for turn in range(4):
        # Joins the running batch, is answered, and leaves.
        await engine.generate(request(turn, prompt=tuple(range(3, 9 + turn)), max_tokens=3))
    assert len((await long).tokens) == 40
    # The first two arrived together.
    assert watched.prefills == [(2, 5), *((1, 5 + turn) for turn in range(1, 4))]
    assert len(watched.draws) == 40
    assert sum(watched.draws) == 40 + 4 * 3


async def test_no_more_rows_run_than_there_is_room_for(watched, make_engine):
    engine = make_engine(max_running=4)
    requests = [request(prompt=(3 + place, 4), max_tokens=1 + place % 5) for place in range(19)]
    samples = await asyncio.gather(*start(engine, *requests))
    assert [len(sample.tokens) for sample in samples] == [1 + place % 5 for place in range(19)]
    assert max(watched.draws) == 4


async def test_a_forward_for_new_rows_is_no_longer_than_it_may_be(watched, make_engine):
    engine = make_engine(prefill_tokens=64)
    prompts = [tuple(range(3, 3 + n)) for n in (40, 3, 55, 17, 5, 30, 31, 2)] + [(7,) * 100]
    requests = [request(prompt=prompt, max_tokens=2) for prompt in prompts]
    await asyncio.gather(*start(engine, *requests))
    for rows, positions in watched.prefills:
        assert rows * positions <= 64 or rows == 1
    assert sum(rows for rows, _ in watched.prefills) == len(requests)
    assert watched.draws == [9, 9]  # all of them had joined by then


async def test_prompts_of_one_token_need_no_forward_of_their_own(watched, engine):
    await asyncio.gather(*start(engine, *(request(prompt=(n,), max_tokens=3) for n in range(3, 9))))
    assert (watched.prefills, watched.draws) == ([], [6] * 3)


async def test_a_commit_computes_the_cache_of_running_requests_again(new, watched, make_engine):
    engine = make_engine(max_running=4)
    calls = await begun(engine, *(request(n, max_tokens=60) for n in range(3)), tokens=5)
    update = await contract.update(engine, new)
    await engine.pause()
    calls += start(engine, *(request(prompt=(7,) * (100 + n), max_tokens=2) for n in range(3)))
    await asyncio.sleep(0)
    await contract.put_in(engine, update)
    await asyncio.gather(*calls)
    # First one prompt, of three; then all that had begun keep their rows, and one that waited.
    assert watched.prefills[0] == (2, 2)
    assert watched.prefills[1] == (4, 99)


async def test_the_loop_is_free_while_a_forward_computes(watched, engine):
    (call,) = await held(watched, engine, request(max_tokens=2))
    health = await engine.health()
    assert (health.status, health.running) == ("SERVING", 1)
    watched.release()
    await call


async def test_a_row_that_was_given_up_leaves_the_batch(watched, engine):
    calls = await begun(engine, *(request(seed, max_tokens=40) for seed in range(3)), tokens=2)
    calls[0].cancel()
    seen = len(watched.draws)
    await engine.generate(request(9, max_tokens=4))
    # The first of them may have begun before.
    assert max(watched.draws[seen + 1 :]) == 3
    await engine.pause()
    calls[1].cancel()  # while nothing is computed
    await asyncio.wait(calls[:2])
    assert (await engine.health()).running == 1
    await engine.resume()
    await calls[2]
    assert watched.draws[-1] == 1


def test_an_engine_serves_one_event_loop_after_another(watched, engine):
    async def left_behind():
        (call,) = await held(watched, engine, request(max_tokens=20))
        watched.release()
        assert not call.done()

    async def next_one():
        assert (await engine.health()).running == 0
        return await engine.generate(request(max_tokens=20))

    expected = asyncio.run(next_one())
    asyncio.run(left_behind())
    assert asyncio.run(next_one()).tokens == expected.tokens


def join(cache, positions, value):
    """A row of so many positions, all of one value, joins."""
    states = (torch.full((1, 1, positions, 2), float(value)),) * 2
    cache.join(
        [states] if positions else [],
        sequence_of_row=torch.tensor([0]),
        lengths=torch.tensor([positions]),
    )


def feed(cache, values):
    """One position per row, as a forward writes it; returns what the rows then attend to."""
    new = torch.tensor([float(value) for value in values]).view(-1, 1, 1, 1).expand(-1, 1, 1, 2)
    keys, _ = cache.update(new, new, 0)
    cache.advance()
    return [keys[row, 0, :length, 0].tolist() for row, length in enumerate(cache.lengths_B)]


def test_rows_move_into_the_gaps_with_all_that_they_hold():
    cache = RowCache(layers=1)
    for value in range(5):
        join(cache, value, value)
    assert cache.leave([1, 0, 3]) == [2, 4]
    assert feed(cache, [20, 40]) == [[2, 2, 20], [4, 4, 4, 4, 40]]
    assert cache.leave([]) == [0, 1]
    assert cache.leave([0, 1]) == []
    assert len(cache.lengths_B) == 0


def test_rows_grow_past_the_room_there_was():
    cache = RowCache(layers=1)
    join(cache, 2, 7)
    for place in range(150):
        found = feed(cache, [place])
    assert found == [[7, 7, *range(150)]]


@pytest.mark.parametrize("length", [0, 1])
def test_what_a_row_held_before_does_not_reach_the_next_one(length):
    cache = RowCache(layers=1)
    join(cache, 9, "nan")
    cache.leave([0])
    for place, positions in enumerate((length, 5)):
        join(cache, positions, place)
    # The first row's place held NaN; it is as wide as the second one now.
    keys, values = cache.update(torch.zeros(2, 1, 1, 2), torch.zeros(2, 1, 1, 2), 0)
    assert keys.shape == values.shape == (2, 1, 6, 2)
    assert bool(keys.isfinite().all())
    assert bool(values.isfinite().all())


def test_a_cache_is_freed_with_its_last_reference():
    cache = RowCache(layers=1)
    join(cache, 9, 1)
    keys = weakref.ref(cache.layers[0].keys)
    gc.disable()
    try:
        del cache
        assert keys() is None
    finally:
        gc.enable()


def uniform(seed, place):
    """The number that draws a request's token at that place."""
    slot = RequestSlot(order=0, request=request(), seed=seed, answer=None)
    slot.tokens += [0] * place
    return slot.turn()[1]


def test_uniforms_stay_what_they_are():
    """Samples of a run that is resumed on another release are the same, for any seed."""
    expected = {(0, 0): 0.3188110691860069, (1, 1): 0.7263894147021426}
    expected |= {(-1, 2): 0.9126028800247624, (2**64 - 1, 2): 0.9126028800247624}
    expected |= {(2**62, 3): 0.65209533825089}
    assert {key: uniform(*key) for key in expected} == expected


def test_uniforms_are_uniform_and_differ_in_seed_and_place():
    by_seed = torch.tensor(
        [[uniform(seed, place) for place in range(40)] for seed in range(400)],
        dtype=torch.float64,
    )
    assert 0 <= by_seed.min() <= by_seed.max() < 1
    assert len(by_seed.unique()) == by_seed.numel()
    # Standard error of a mean of 16,000: 1 / sqrt(12 x 16000) = 0.0023; five of them.
    assert float(by_seed.mean()) == pytest.approx(0.5, abs=0.012)
    for shifted in (by_seed[1:, :], by_seed[:, 1:]):
        base = by_seed[: len(shifted), : shifted.shape[1]]
        # Correlation of some 16,000 pairs: standard error 0.008; five of them.
        assert abs(float(torch.corrcoef(torch.stack([base.ravel(), shifted.ravel()]))[0, 1])) < 0.04


def drawn(logits, temperatures=None, uniforms=None):
    rows = len(logits)
    if uniforms is None:
        uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    temperatures = torch.ones(rows) if temperatures is None else temperatures
    return draw(logits, temperatures_B=temperatures, uniforms_B=uniforms)


def test_tokens_come_as_often_as_they_are_likely():
    logits = torch.tensor([0.0, 1.0, -1.0, -math.inf, 2.0])
    tokens, logprobs = drawn(logits.expand(20_000, -1))
    likely = torch.softmax(logits.double(), -1)
    found = torch.bincount(tokens, minlength=5) / 20_000
    # Five standard errors of each share.
    assert bool(((found - likely).abs() <= 5 * (likely * (1 - likely) / 20_000).sqrt()).all())
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[tokens], rtol=0, atol=0)


def test_each_row_has_its_own_temperature_in_one_piece_or_several(monkeypatch):
    logits = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    temperatures = torch.linspace(0.1, 3, 64)
    tokens, logprobs = drawn(logits, temperatures)
    expected = torch.log_softmax(logits / temperatures[:, None], -1).gather(1, tokens[:, None])
    torch.testing.assert_close(logprobs, expected[:, 0], rtol=0, atol=0)
    assert torch.equal(tokens[0], logits[0].argmax())  # cold
    monkeypatch.setattr("megatron_idempotent.rl.engines.transformers_batch._CHUNK", 48)
    for found, whole in zip(drawn(logits, temperatures), (tokens, logprobs), strict=True):
        assert torch.equal(found, whole)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_have_no_logprob(bad):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    assert drawn(logits)[1].isnan().tolist() == [False, True, False]


def test_the_last_uniform_stays_in_the_vocabulary():
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = drawn(logits, uniforms=torch.full((200,), 1 - 2.0**-53, dtype=torch.float64))
    assert int(tokens.max()) < 50
    assert bool(logprobs.isfinite().all())
