"""SGLang servers that die, hang, sleep, and fall silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sglang_cases import ROUNDED, buckets_of, request, scenario, stage, true_logprobs, weights
from sglang_server import FakeSglang

from megatron_idempotent.rl.engines import (
    EngineDead,
    EngineError,
    EngineTimeout,
    EngineUnsupported,
    Sample,
)
from megatron_idempotent.rl.engines.sglang import SglangEngine
from megatron_idempotent.rl.weights import Bucket, WeightUpdate

LOAD = "/update_weights_from_disk"
BRIEF = {"health_timeout_s": 0.3, "timeout_s": 0.3}


def test_a_server_that_is_not_there_is_dead(tmp_path: Path) -> None:
    async def act() -> None:
        url = "http://127.0.0.1:9"
        engine = SglangEngine(url, checkpoint=tmp_path, directory=tmp_path)
        health = await engine.health()
        assert (health.status, health.version) == ("DEAD", None)
        assert url in health.detail
        with pytest.raises(EngineDead, match="does not answer"):
            await engine.generate(request())
        await engine.close()
        await engine.close()

    asyncio.run(act())


def test_a_server_that_dies_fails_its_requests_running_and_waiting(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        server.hold(4)
        calls = [asyncio.ensure_future(engine.generate(request(str(i)))) for i in range(2)]
        await server.held()
        await engine.pause()
        calls.append(asyncio.ensure_future(engine.generate(request("waits"))))
        while len(server.said("/generate")) < 4:
            await asyncio.sleep(0.01)
        server.kill()
        for call in calls:
            with pytest.raises(EngineDead):
                await call
        health = await engine.health()
        assert (health.status, health.running) == ("DEAD", 0)
        with pytest.raises(EngineDead):
            await engine.resume()

    scenario(run, tmp_path)


def test_a_server_that_dies_while_an_update_is_staged_is_dead(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, directory: Path) -> None:
        async def killing() -> AsyncIterator[Bucket]:
            async for bucket in buckets_of(weights(1)):
                yield bucket
                server.kill()

        await engine.stage(WeightUpdate(id="u", version=1), killing())
        assert (await engine.health()).status == "DEAD"
        with pytest.raises(EngineDead):
            await engine.pause()

    scenario(run, tmp_path)


def test_a_server_that_dies_in_a_commit_is_dead(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        server.hold(4)
        running = asyncio.ensure_future(engine.generate(request()))
        await server.held()
        update = await stage(engine, 1)
        await engine.pause()
        server.do(lambda: setattr(server.scheduler, "fail_load", "dies"))
        with pytest.raises(EngineDead):
            await engine.commit(update.id)
        with pytest.raises(EngineDead):
            await running
        assert (await engine.health()).status == "DEAD"
        with pytest.raises(EngineDead):
            await engine.commit(update.id)
        with pytest.raises(EngineDead):
            await engine.rollback(update.id)

    scenario(run, tmp_path)


def test_a_pause_that_hangs_ends_in_time_and_may_be_taken_back(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        await engine.generate(request())
        server.hangs.add("/pause_generation")
        with pytest.raises(EngineTimeout, match="/pause_generation"):
            await engine.pause()
        await stage(engine, 1)
        with pytest.raises(EngineError, match="not paused"):
            await engine.commit("run/1")
        server.release()  # the server takes the pause in after all
        while not server.do(lambda: server.scheduler.paused):
            await asyncio.sleep(0.01)
        await engine.resume()
        assert not server.do(lambda: server.scheduler.paused)
        assert len((await engine.generate(request())).tokens) == 20

    scenario(run, tmp_path, settings={"timeout_s": 0.5})


def test_a_pause_has_happened_when_it_comes_back(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        # A long step: what is said to the scheduler meanwhile is read after it.
        server.do(lambda: setattr(server.scheduler, "steps_per_read", 50))
        calls = [asyncio.ensure_future(engine.generate(request(max_tokens=250))) for _ in "123"]
        while server.do(lambda: server.scheduler.drawn) < 10:
            await asyncio.sleep(0.001)
        await engine.pause()
        drawn, paused = server.do(lambda: (server.scheduler.drawn, server.scheduler.paused))
        assert paused
        await asyncio.sleep(0.05)
        assert server.do(lambda: server.scheduler.drawn) == drawn
        await engine.resume()
        await asyncio.gather(*calls)

    scenario(run, tmp_path)


def test_a_silent_server_is_dead_and_its_requests_are_given_up(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        await engine.generate(request())
        for _ in range(10):  # what it had started ends
            await asyncio.sleep(0)
        tasks = len(asyncio.all_tasks())
        server.hold(4)
        running = asyncio.ensure_future(engine.generate(request()))
        await server.held()
        server.hangs.add("*")
        assert await asyncio.wait([running], timeout=20) == ({running}, set())
        with pytest.raises(EngineDead, match="silent"):
            running.result()
        while len(asyncio.all_tasks()) > tasks:  # the calls do not go on unseen
            await asyncio.sleep(0.01)
        assert (await engine.health()).status == "DEAD"

    scenario(run, tmp_path, settings=BRIEF)


def test_a_server_that_only_takes_its_time_is_not_dead(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> Sample:
        server.hold(4)
        running = asyncio.ensure_future(engine.generate(request()))
        await server.held()
        asked = len(server.said("/model_info"))
        while len(server.said("/model_info")) < asked + 3:  # it was looked after meanwhile
            await asyncio.sleep(0.01)
        assert not running.done()
        server.release()
        return await running

    assert len(scenario(run, tmp_path, settings={"health_timeout_s": 1.0}).tokens) == 20


def test_a_scheduler_that_hangs_is_dead_though_its_http_process_answers(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        assert (await engine.health()).status == "SERVING"
        server.hangs.add("/server_info")
        health = await engine.health()
        assert (health.status, health.version) == ("DEAD", None)

    scenario(run, tmp_path, settings={"health_timeout_s": 1.0})


def test_a_paused_server_is_not_asked_for_its_own_health(tmp_path: Path) -> None:
    """/health samples a token, so it fails while paused."""

    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        await engine.pause()
        assert (await engine.health()).status == "PAUSED"
        assert not server.said("/health")
        assert len(server.said("/generate")) == 1

    scenario(run, tmp_path)


def test_it_sleeps_and_serves_again_once_weights_are_loaded(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        server.hold(4)
        running = asyncio.ensure_future(engine.generate(request()))
        await server.held()
        update = await stage(engine, 1)
        await engine.sleep()
        server.release()
        assert (await running).finish_reason == "abort"
        await engine.sleep()
        assert len(server.said("/release_memory_occupation")) == 1
        with pytest.raises(EngineError, match="sleeps"):
            await engine.resume()
        with pytest.raises(EngineError, match="wake"):
            await engine.commit(update.id)
        with pytest.raises(ValueError, match="graphs"):
            await engine.wake(["graphs"])
        await engine.wake(["weights"])
        assert (await engine.health()).status == "DIRTY"
        await engine.sleep()
        assert server.said("/release_memory_occupation")[-1] == {"tags": ["weights"]}
        await engine.wake(["weights"])
        assert await engine.commit(update.id) == 1
        await engine.wake(["kv_cache", "weights"])
        assert server.said("/resume_memory_occupation")[-1] == {"tags": ["kv_cache"]}
        await engine.wake(["kv_cache"])
        await engine.resume()
        sample = await engine.generate(request())
        expected = true_logprobs(1, (5, 6, 7), sample.tokens)
        assert sample.logprobs == pytest.approx(expected, abs=ROUNDED)

    scenario(run, tmp_path)


def test_the_same_weights_are_loaded_again_behind_a_sleep(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        update = await stage(engine, 1)
        await engine.pause()
        await engine.commit(update.id)
        await engine.sleep()
        await engine.wake(["weights", "kv_cache"])
        with pytest.raises(EngineError, match="undefined"):
            await engine.resume()
        assert await engine.commit(update.id) == 1
        assert len(server.said(LOAD)) == 2
        await engine.resume()
        sample = await engine.generate(request())
        expected = true_logprobs(1, (5, 6, 7), sample.tokens)
        assert sample.logprobs == pytest.approx(expected, abs=ROUNDED)

    scenario(run, tmp_path)


def test_weights_with_a_backup_need_no_load_behind_a_sleep(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        await engine.sleep()
        assert (await engine.health()).status == "PAUSED"
        await engine.wake(["weights", "kv_cache"])
        await engine.resume()
        sample = await engine.generate(request())
        expected = true_logprobs(0, (5, 6, 7), sample.tokens)
        assert sample.logprobs == pytest.approx(expected, abs=ROUNDED)

    scenario(run, tmp_path, weights_backup=True)


def test_a_server_that_would_free_nothing_does_not_sleep(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        with pytest.raises(EngineUnsupported, match="--enable-memory-saver"):
            await engine.sleep()
        assert (await engine.health()).status == "SERVING"

    scenario(run, tmp_path, memory_saver=False)


def test_closing_while_paused_gives_back_what_was_not_let_in(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> Sample:
        await engine.pause()
        call = asyncio.ensure_future(engine.generate(request()))
        while len(server.said("/generate")) < 2:
            await asyncio.sleep(0.01)
        await engine.close()
        return await call

    sample = scenario(run, tmp_path)
    assert (sample.tokens, sample.finish_reason) == ((), "abort")


def test_a_waiting_pause_holds_new_requests_back(tmp_path: Path) -> None:
    async def run(engine: SglangEngine, server: FakeSglang, _: Path) -> None:
        server.hold(4)
        running = asyncio.ensure_future(engine.generate(request("running")))
        await server.held()
        pause = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(engine.generate(request("later")))
        server.release()
        await pause
        assert (await running).finish_reason == "length"
        assert not later.done()
        await engine.resume()
        assert len((await later).tokens) == 20

    scenario(run, tmp_path)
