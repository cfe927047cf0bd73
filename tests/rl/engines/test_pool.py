"""Several engines as one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import pytest

from megatron_idempotent.rl.engines import (
    EngineDead,
    EngineError,
    EngineHealth,
    EnginePool,
    Request,
    Sample,
)
from megatron_idempotent.rl.simulator.clock import run


class Engine:
    """Answers in full once it is let; one that is to give a part first dies after it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.taken: list[str] = []
        self.let = asyncio.Event()
        self.gives_first = 0

    async def generate(self, request: Request) -> Sample:
        self.taken.append(request.id)
        await self.let.wait()
        if self.dead:
            raise EngineDead(f"{self.name} does not answer")
        count, reason = request.max_tokens, "length"
        if self.gives_first:
            count, reason, self.gives_first = self.gives_first, "abort", 0
            self.dead = True
        return Sample(
            request_id=request.id,
            tokens=(len(request.prompt),) * count,
            logprobs=(0.0,) * count,
            versions=(0,) * count,
            finish_reason=reason,  # type: ignore[arg-type]
        )

    async def health(self) -> EngineHealth:
        return EngineHealth(status="DEAD" if self.dead else "SERVING", version=None)


class Out:
    def __init__(self, quarantined: Mapping[str, str]) -> None:
        self.quarantined = quarantined


def request(name: str = "r") -> Request:
    return Request(id=name, prompt=(1, 2), max_tokens=3)


def test_requests_go_to_the_engine_that_has_the_fewest() -> None:
    async def scenario() -> None:
        engines = [Engine("a"), Engine("b"), Engine("c")]
        pool = EnginePool(engines)
        running = [asyncio.ensure_future(pool.generate(request(str(i)))) for i in range(7)]
        await asyncio.sleep(0)
        assert [len(engine.taken) for engine in engines] == [3, 2, 2]
        engines[1].let.set()
        await asyncio.wait([running[1], running[4]])
        running.append(asyncio.ensure_future(pool.generate(request("7"))))
        await asyncio.sleep(0)
        assert [len(engine.taken) for engine in engines] == [3, 3, 2]
        for engine in engines:
            engine.let.set()
        assert [len(sample.tokens) for sample in await asyncio.gather(*running)] == [3] * 8

    asyncio.run(scenario())


def test_what_an_engine_loses_the_others_take_from_where_it_was() -> None:
    async def scenario() -> None:
        first, second = Engine("a"), Engine("b")
        pool = EnginePool([first, second])
        first.gives_first = 1
        first.let.set()
        second.let.set()
        sample = await pool.generate(request())
        # One token after a prompt of two, and the other two after three.
        assert sample.tokens == (2, 3, 3)
        assert sample.finish_reason == "length"
        assert second.taken == ["r"]
        assert (await pool.generate(request("next"))).tokens == (2, 2, 2)
        assert first.taken == ["r", "r"], "it was lost, and nobody has asked whether it is back"
        first.dead = False
        await pool.reprobe()
        await pool.generate(request("again"))
        assert first.taken[-1] == "again"

    asyncio.run(scenario())


def test_an_engine_that_is_quarantined_gets_nothing() -> None:
    async def scenario() -> None:
        engines = [Engine("a"), Engine("b")]
        for engine in engines:
            engine.let.set()
        out = Out({"a": "half committed"})
        pool = EnginePool(engines, sync=out)
        await asyncio.gather(*(pool.generate(request(str(i))) for i in range(4)))
        assert [len(engine.taken) for engine in engines] == [0, 4]
        engines[1].dead = True
        with pytest.raises(EngineError, match="no engine is left: b: b does not answer; a: half"):
            await pool.generate(request())
        out.quarantined = {}
        assert (await pool.generate(request())).finish_reason == "length"

    asyncio.run(scenario())


def test_engines_that_come_back_are_given_as_much_as_the_others() -> None:
    async def scenario() -> None:
        engines = [Engine(str(i)) for i in range(6)]
        pool = EnginePool(engines)
        running = [asyncio.ensure_future(pool.generate(request(str(i)))) for i in range(18)]
        await asyncio.sleep(0)
        for lost in engines[:3]:
            lost.dead = True
            lost.let.set()
        while sum(len(engine.taken) for engine in engines[3:]) < 18:
            await asyncio.sleep(0.01)
        assert [len(engine.taken) for engine in engines[3:]] == [6, 6, 6]
        for engine in engines[:3]:
            engine.dead = False
            engine.let.clear()
            engine.taken.clear()
        await pool.reprobe()
        running += [asyncio.ensure_future(pool.generate(request(str(i)))) for i in range(18, 36)]
        await asyncio.sleep(0)
        assert [len(engine.taken) for engine in engines] == [6] * 6
        for engine in engines:
            engine.let.set()
        assert len(await asyncio.gather(*running)) == 36

    asyncio.run(scenario())


class Held:
    """Answers each request when it is told to; dead or not, it keeps the others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.answers: list[asyncio.Future[Sample]] = []

    async def generate(self, request: Request) -> Sample:
        answer = asyncio.get_running_loop().create_future()
        self.answers.append(answer)
        try:
            return await answer
        finally:
            self.answers.remove(answer)

    async def health(self) -> EngineHealth:
        return EngineHealth(status="DEAD" if self.dead else "SERVING", version=None)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_the_first_of_the_least_busy_engines_is_picked(seed: int) -> None:
    chance = random.Random(seed)

    async def scenario() -> None:
        engines = [Held(str(i)) for i in range(7)]
        out, lost = Out({}), set[str]()
        pool = EnginePool(engines, sync=out)  # type: ignore[arg-type]
        tasks = []
        for turn in range(400):
            what = chance.random()
            one = chance.choice(engines)
            if what < 0.55:
                usable = [
                    e for e in engines if e.name not in lost and e.name not in out.quarantined
                ]
                least = min(usable, key=lambda each: len(each.answers), default=None)
                before = {each.name: len(each.answers) for each in engines}
                tasks.append(asyncio.ensure_future(pool.generate(request(str(turn)))))
                await asyncio.sleep(0)
                taken = [e.name for e in engines if len(e.answers) > before[e.name]]
                assert taken == ([least.name] if least else [])
            elif what < 0.85 and one.answers:
                sample = Sample(
                    request_id="r",
                    tokens=(1, 1, 1),
                    logprobs=(0.0,) * 3,
                    versions=(0,) * 3,
                    finish_reason="length",
                )
                one.answers[0].set_result(sample)
            elif what < 0.9 and one.answers and one.name not in lost:
                one.dead = True
                lost.add(one.name)
                one.answers[0].set_exception(EngineDead("gone"))
            elif what < 0.95:
                for each in engines:
                    each.dead = False
                lost.clear()
                await pool.reprobe()
            else:
                count = chance.randrange(4)
                out.quarantined = {e.name: "half" for e in chance.sample(engines, count)}
            for _ in range(8):
                await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())  # where time stands still: what was lost is not sent again meanwhile


def test_requests_are_spread_evenly_over_many_engines() -> None:
    async def scenario() -> None:
        engines = [Held(str(i)) for i in range(100)]
        pool = EnginePool(engines, sync=Out({"7": "half", "8": "half"}))  # type: ignore[arg-type]
        tasks = [asyncio.ensure_future(pool.generate(request(str(i)))) for i in range(300)]
        await asyncio.sleep(0)
        assert sorted({len(engine.answers) for engine in engines}) == [0, 3, 4]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no engines; give at least one"):
        EnginePool([])
