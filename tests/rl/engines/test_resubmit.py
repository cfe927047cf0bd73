"""Responses that come in parts."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from megatron_idempotent.rl.engines import EngineDead, EngineError, EngineTimeout, Request, Sample
from megatron_idempotent.rl.engines.pool import generate_whole

REQUEST = Request(
    id="r", prompt=(1, 2), max_tokens=6, stop_tokens=(9,), seed=3, temperature=0.5, continued=1
)


class Scripted:
    """An engine that answers what it is told to, and remembers what it was asked."""

    def __init__(self, *answers, name="scripted"):
        self.name = name
        self.asked = []
        self.answers = list(answers)

    async def generate(self, request):
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dataclasses.replace(answer, request_id=request.id)


def part(*tokens, reason="abort", version=0):
    return Sample(
        request_id="",
        tokens=tokens,
        logprobs=tuple(-token / 10 for token in tokens),
        versions=(version,) * len(tokens),
        finish_reason=reason,
    )


def whole(engine, request=REQUEST, **settings):
    return asyncio.run(generate_whole(engine, request, wait_s=0, **settings))


def test_a_whole_response_is_passed_on():
    engine = Scripted(part(4, 5, reason="length"))
    sample = whole(engine)
    assert sample == dataclasses.replace(part(4, 5, reason="length"), request_id="r")
    assert engine.asked == [REQUEST]


def test_parts_are_joined_and_the_rest_is_asked_for():
    engine = Scripted(part(4, 5), part(6, version=1), part(), part(7, 9, reason="stop", version=3))
    sample = whole(engine)
    assert sample == Sample(
        request_id="r",
        tokens=(4, 5, 6, 7, 9),
        logprobs=(-0.4, -0.5, -0.6, -0.7, -0.9),
        versions=(0, 0, 1, 3, 3),
        finish_reason="stop",
    )
    assert [(each.prompt, each.max_tokens, each.continued) for each in engine.asked] == [
        ((1, 2), 6, 1),
        ((1, 2, 4, 5), 4, 3),
        ((1, 2, 4, 5, 6), 3, 4),
        ((1, 2, 4, 5, 6), 3, 4),
    ]
    for each in engine.asked:
        assert (each.id, each.seed, each.temperature, each.stop_tokens) == ("r", 3, 0.5, (9,))


@pytest.mark.parametrize(("tokens", "reason"), [((4, 5, 6, 7, 8, 4), "length"), ((4, 9), "stop")])
def test_a_part_that_is_complete_is_not_continued(tokens, reason):
    sample = whole(Scripted(part(*tokens)))
    assert (sample.tokens, sample.finish_reason) == (tokens, reason)


def test_parts_without_tokens_are_not_taken_for_ever():
    engine = Scripted(part(), part(4), part(), part(), part(), name="e5")
    with pytest.raises(EngineError, match=r"e5 gave back request 'r' 3 times.*after 1 of them"):
        whole(engine, attempts=3)
    assert len(engine.asked) == 5


def test_parts_with_tokens_may_be_any_number():
    request = dataclasses.replace(REQUEST, max_tokens=50)
    sample = whole(Scripted(*[part(4)] * 50), request, attempts=1)
    assert (len(sample.tokens), sample.finish_reason) == (50, "length")


def test_an_engine_is_chosen_for_each_attempt():
    first, second = Scripted(part(4, 5)), Scripted(part(6, reason="length", version=2))
    rest = []

    def pick(request):
        rest.append(request.prompt)
        return (first, second)[len(rest) - 1]

    assert whole(pick).versions == (0, 0, 2)
    assert rest == [(1, 2), (1, 2, 4, 5)]


def test_the_choice_may_take_time():
    async def pick(request):
        await asyncio.sleep(0)
        return Scripted(part(4, reason="length"))

    assert whole(pick).tokens == (4,)


def test_another_engine_goes_on_for_one_that_died():
    engines = [
        Scripted(part(4, 5)),
        Scripted(EngineDead("gone")),
        Scripted(part(6, reason="length")),
    ]
    sample = whole(lambda _: engines.pop(0))
    assert sample.tokens == (4, 5, 6)


def test_a_dead_engine_is_not_asked_again():
    engine = Scripted(part(4), EngineDead("gone"))
    with pytest.raises(EngineDead, match="gone"):
        whole(engine)
    assert len(engine.asked) == 2
    dead = [Scripted(EngineDead("gone")) for _ in range(4)]
    with pytest.raises(EngineDead, match="gone"):
        whole(lambda _: dead.pop(), attempts=3)
    assert len(dead) == 1


@pytest.mark.parametrize("error", [EngineError("no"), EngineTimeout("late"), ValueError("bad")])
def test_other_errors_are_the_callers(error):
    engine = Scripted(error)
    with pytest.raises(type(error), match=str(error)):
        whole(lambda _: engine)
    assert len(engine.asked) == 1


def test_only_attempts_that_brought_nothing_are_waited_for_longer_each_time(monkeypatch):
    waits = []

    async def note(seconds):
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    engine = Scripted(*[part()] * 2, part(4), *[part()] * 5, part(5, reason="length"))
    asyncio.run(generate_whole(engine, REQUEST, wait_s=0.5))
    assert waits == [0.5, 1, 0.5, 1, 2, 4, 5]
