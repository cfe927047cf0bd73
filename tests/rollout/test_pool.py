"""Several engines as one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from megatron_idempotent.rollout import (
    EngineDead,
    EngineError,
    EngineHealth,
    EnginePool,
    Request,
    Sample,
)


class Engine:
    """Answers in full once it is let; one that is to give a part first dies behind it."""

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
        # One token behind a prompt of two, and the other two behind three.
        assert sample.tokens == (2, 3, 3)
        assert sample.finish_reason == "length"
        assert second.taken == ["r"]
        assert (await pool.generate(request("next"))).tokens == (2, 2, 2)
        assert first.taken == ["r", "r"], "it was lost, and nobody has asked whether it is back"
        first.dead = False
        await pool.look_again()
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


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no engines; give at least one"):
        EnginePool([])
