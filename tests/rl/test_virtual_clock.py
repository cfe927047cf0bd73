"""An event loop with a clock of its own."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from benchmarks._virtual_clock import Deadlock, TooLong, VirtualLoop, run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_hours_pass_without_waiting() -> None:
    async def scenario() -> tuple[float, float]:
        started = now()
        await asyncio.sleep(36_000)
        return started, now()

    before = time.monotonic()
    assert run(scenario()) == (0.0, 36_000.0)
    assert time.monotonic() - before < 3600


def test_timers_fire_in_order_and_equal_times_in_the_order_they_were_made() -> None:
    async def scenario() -> list[tuple[float, int]]:
        loop, fired = asyncio.get_running_loop(), []
        for number in range(200):
            when = float(number * 7919 % 5)
            loop.call_at(when, lambda when=when, number=number: fired.append((when, number)))
        await asyncio.sleep(10)
        return fired

    fired = run(scenario())
    assert fired == sorted(fired)
    assert len(fired) == 200


def test_the_clock_does_not_drift() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        seen = []
        for number in range(1, 2000):
            loop.call_at(number / 10, lambda: seen.append(loop.time()))
        await asyncio.sleep(300)
        assert seen == [number / 10 for number in range(1, 2000)]

    run(scenario())


def test_a_clock_far_away_still_fires_every_timer() -> None:
    async def scenario() -> float:
        await asyncio.sleep(1e12)
        for _ in range(10):
            await asyncio.sleep(1e-6)  # less than the clock can tell apart there
        await asyncio.sleep(1)
        return now()

    assert run(scenario()) == 1e12 + 1


def test_timeouts_and_cancelled_timers_take_virtual_time() -> None:
    async def scenario() -> float:
        assert await asyncio.wait_for(asyncio.sleep(5, "slept"), 10) == "slept"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 7)
        return now()

    assert run(scenario()) == 12.0


def test_a_function_for_a_thread_runs_and_takes_no_time() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        assert await loop.run_in_executor(None, divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, divmod, 7, 0)
        assert now() == 0

    run(scenario())


def test_a_deadlock_is_an_error_that_names_who_waits_and_where() -> None:
    async def waits_for_ever() -> None:
        try:
            await asyncio.get_running_loop().create_future()  # nobody will
        finally:
            ended.append(True)

    async def scenario() -> None:
        await asyncio.sleep(3)
        tasks = [asyncio.create_task(waits_for_ever()) for _ in range(3)]
        await asyncio.wait(tasks)

    ended: list[bool] = []
    with pytest.raises(Deadlock, match="at 3 s nothing can happen") as caught:
        run(scenario())
    assert "3 tasks in test_a_deadlock_is" in str(caught.value)
    assert "waits_for_ever (test_virtual_clock.py:" in str(caught.value)
    assert "# nobody will" in str(caught.value)
    assert ended == [True] * 3


def test_past_its_limit_a_run_ends_with_an_error() -> None:
    async def polls() -> None:
        while True:
            await asyncio.sleep(1)

    with pytest.raises(TooLong, match=r"passed 50 s(.|\n)*polls \(test_virtual_clock.py"):
        run(polls(), limit_s=50)


def test_tasks_that_are_left_are_cancelled_and_generators_closed() -> None:
    ended = []

    async def left() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(1)
            ended.append("task")

    async def numbers():  # type: ignore[no-untyped-def]
        try:
            yield 1
        finally:
            ended.append("generator")

    async def scenario() -> str:
        task = asyncio.create_task(left())
        iterator = numbers()
        assert await iterator.__anext__() == 1
        await asyncio.sleep(0)
        assert not task.done()
        kept.append(iterator)
        return "result"

    kept: list[object] = []
    assert run(scenario()) == "result"
    assert sorted(ended) == ["generator", "task"]


def test_a_loop_that_was_closed_takes_no_timers() -> None:
    loop = VirtualLoop()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_later(1, print)
