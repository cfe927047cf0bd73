"""Several engines as one, and responses that come in parts."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest

from benchmarks._virtual_clock import run
from megatron_idempotent.rl.engines import (
    EngineDead,
    EngineError,
    EngineHealth,
    EnginePool,
    EngineTimeout,
    Request,
    Sample,
    generate_whole,
)
from megatron_idempotent.rl.engines import pool as engines_pool

REQUEST = Request(
    id="r", prompt=(1, 2), max_tokens=6, stop_tokens=(9,), seed=3, temperature=0.5, continued=1
)


def part(*tokens: int, reason: Any = "abort", version: int = 0) -> Sample:
    return Sample(
        request_id="r",
        tokens=tokens,
        logprobs=tuple(-token / 10 for token in tokens),
        versions=(version,) * len(tokens),
        finish_reason=reason,
    )


class Engine:
    """Gives its answers, if it was given any; else it answers each request when it is told to."""

    def __init__(self, name: str, *answers: Sample | Exception) -> None:
        self.name = name
        self.dead = False
        self.asked: list[Request] = []
        self.answers = list(answers)
        self.open: list[asyncio.Future[Sample]] = []

    async def generate(self, request: Request) -> Sample:
        self.asked.append(request)
        if self.answers:
            answer = self.answers.pop(0)
            self.dead = isinstance(answer, EngineDead)
            if isinstance(answer, Exception):
                raise answer
            return answer
        waiting: asyncio.Future[Sample] = asyncio.get_running_loop().create_future()
        self.open.append(waiting)
        try:
            return await waiting
        finally:
            self.open.remove(waiting)

    async def health(self) -> EngineHealth:
        return EngineHealth(status="DEAD" if self.dead else "SERVING", version=None)


class Out:
    quarantined: dict[str, str] = {}  # noqa: RUF012 (a new one each time)


def whole(engine: Any, request: Request = REQUEST, *, attempts: int = 8) -> Sample:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engines_pool, "_WAIT_S", 0.0)
        patched.setattr(engines_pool, "_ATTEMPTS", attempts)
        return asyncio.run(generate_whole(engine, request))


def test_a_whole_response_is_passed_on() -> None:
    engine = Engine("a", part(4, 5, reason="length"))
    assert whole(engine) == part(4, 5, reason="length")
    assert engine.asked == [REQUEST]


def test_parts_are_joined_and_the_rest_is_asked_for() -> None:
    engine = Engine(
        "a", part(4, 5), part(6, version=1), part(), part(7, 9, reason="stop", version=3)
    )
    assert whole(engine) == Sample(
        request_id="r",
        tokens=(4, 5, 6, 7, 9),
        logprobs=(-0.4, -0.5, -0.6, -0.7, -0.9),
        versions=(0, 0, 1, 3, 3),
        finish_reason="stop",
    )
    rest = [((1, 2), 6, 1), ((1, 2, 4, 5), 4, 3), *[((1, 2, 4, 5, 6), 3, 4)] * 2]
    assert engine.asked == [
        dataclasses.replace(REQUEST, prompt=prompt, max_tokens=longest, continued=continued)
        for prompt, longest, continued in rest
    ]


@pytest.mark.parametrize(("tokens", "reason"), [((4, 5, 6, 7, 8, 4), "length"), ((4, 9), "stop")])
def test_a_part_that_is_complete_is_not_continued(tokens: tuple[int, ...], reason: str) -> None:
    sample = whole(Engine("a", part(*tokens)))
    assert (sample.tokens, sample.finish_reason) == (tokens, reason)


def test_parts_without_tokens_are_not_taken_for_ever_and_others_may_be_any_number() -> None:
    engine = Engine("e5", part(), part(4), part(), part(), part())
    with pytest.raises(EngineError, match=r"e5 gave back request 'r' 3 times.*after 1 of them"):
        whole(engine, attempts=3)
    assert len(engine.asked) == 5
    request = dataclasses.replace(REQUEST, max_tokens=50)
    sample = whole(Engine("a", *[part(4)] * 50), request, attempts=1)
    assert (len(sample.tokens), sample.finish_reason) == (50, "length")


@pytest.mark.parametrize(
    "error", [EngineDead("gone"), EngineError("no"), EngineTimeout("late"), ValueError("bad")]
)
def test_errors_are_the_callers(error: Exception) -> None:
    engine = Engine("a", part(4), error)
    with pytest.raises(type(error), match=str(error)):
        whole(engine)
    assert len(engine.asked) == 2


def test_only_attempts_that_brought_nothing_are_waited_for_longer_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = []

    async def note(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", note)
    monkeypatch.setattr(engines_pool, "_WAIT_S", 0.5)
    engine = Engine("a", *[part()] * 2, part(4), *[part()] * 5, part(5, reason="length"))
    asyncio.run(generate_whole(engine, REQUEST))  # type: ignore[arg-type]
    assert waits == [0.5, 1, 0.5, 1, 2, 4, 5]


def pool(engines: list[Engine], **settings: Any) -> EnginePool:
    return EnginePool(engines, **settings)  # type: ignore[arg-type]


def sent(one: EnginePool, number: int) -> list[asyncio.Future[Sample]]:
    return [asyncio.ensure_future(one.generate(REQUEST)) for _ in range(number)]


def test_what_an_engine_loses_the_others_take_from_where_it_was() -> None:
    async def scenario() -> None:
        ends = part(6, reason="length", version=2)
        first = Engine("a", part(4, 5), EngineDead("gone"), ends)
        second = Engine("b", ends, ends, ends)
        one = pool([first, second])
        assert await one.generate(REQUEST) == dataclasses.replace(
            ends, tokens=(4, 5, 6), logprobs=(-0.4, -0.5, -0.6), versions=(0, 0, 2)
        )
        assert [each.prompt for each in second.asked] == [(1, 2, 4, 5)]
        await one.generate(REQUEST)
        assert len(first.asked) == 2, "it was lost, and nobody has asked whether it is back"
        await one.reprobe()
        await one.generate(REQUEST)
        assert len(first.asked) == 2, "it is not"
        first.dead = False
        await one.reprobe()
        await one.generate(REQUEST)
        assert len(first.asked) == 3

    run(scenario())


def test_engines_that_are_quarantined_or_dead_get_nothing_until_they_are_back() -> None:
    async def scenario() -> None:
        ends = part(6, reason="length")
        engines = [Engine("a", *[ends] * 9), Engine("b", ends, ends, EngineDead("b is gone"))]
        out = Out()
        out.quarantined = {"a": "half committed"}
        one = pool(engines, sync=out)
        await asyncio.gather(*sent(one, 2))
        assert ([len(engine.asked) for engine in engines], one.usable) == ([0, 2], True)
        with pytest.raises(EngineError, match="no engine is left: b: b is gone; a: half"):
            await one.generate(REQUEST)
        assert not one.usable
        out.quarantined = {}
        assert (await one.generate(REQUEST)).finish_reason == "length"

    run(scenario())


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_the_first_of_the_least_busy_engines_is_picked(seed: int) -> None:
    chance = random.Random(seed)

    async def scenario() -> None:
        engines = [Engine(str(i)) for i in range(7)]
        out, lost = Out(), set[str]()
        one = pool(engines, sync=out)
        tasks = []
        for _ in range(400):
            what = chance.random()
            engine = chance.choice(engines)
            if what < 0.55:
                usable = [
                    e for e in engines if e.name not in lost and e.name not in out.quarantined
                ]
                least = min(usable, key=lambda each: len(each.open), default=None)
                before = {each.name: len(each.open) for each in engines}
                tasks += sent(one, 1)
                await asyncio.sleep(0)
                taken = [e.name for e in engines if len(e.open) > before[e.name]]
                assert taken == ([least.name] if least else [])
            elif what < 0.85 and engine.open:
                engine.open[0].set_result(part(1, 1, reason="length"))
            elif what < 0.9 and engine.open and engine.name not in lost:
                engine.dead = True
                lost.add(engine.name)
                engine.open[0].set_exception(EngineDead("gone"))
            elif what < 0.95:
                for each in engines:
                    each.dead = False
                lost.clear()
                await one.reprobe()
            else:
                count = chance.randrange(4)
                out.quarantined = {e.name: "half" for e in chance.sample(engines, count)}
            for _ in range(8):
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())  # where time stands still: what was lost is not sent again meanwhile


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no engines; give at least one"):
        EnginePool([])
