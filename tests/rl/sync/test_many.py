"""Hundreds of engines, and the clock that a sync is timed by."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

pytest.importorskip("torch")

from memory_engine import QUICK, MemoryEngine, Source

from megatron_idempotent.rl.simulator.clock import run
from megatron_idempotent.rl.sync import SyncReport, WeightSync

LIMITS = dataclasses.replace(QUICK, bucket_timeout_s=100.0, stage_timeout_s=1000.0)


def test_engines_that_hang_hold_the_others_up_once_however_many_they_are() -> None:
    engines = [
        MemoryEngine(str(number), {"stage": ["hangs"]} if number % 2 else None)
        for number in range(60)
    ]

    async def scenario() -> tuple[SyncReport, float]:
        report = await WeightSync(engines, settings=LIMITS).update(Source(1), 1)
        return report, asyncio.get_running_loop().time()

    report, took_s = run(scenario())
    assert len(report.named("committed")) == 30
    assert len(report.named("behind")) == 30
    # One limit for the first bucket, for all of them, and a while to give each of them up.
    assert took_s < 2 * LIMITS.bucket_timeout_s
    assert report.total_s == took_s
    assert report.stage_s <= took_s


def test_hundreds_of_engines_take_an_update_together() -> None:
    engines = [MemoryEngine(str(number)) for number in range(300)]

    async def scenario() -> SyncReport:
        sync = WeightSync(engines, settings=LIMITS)
        await sync.update(Source(1), 1)
        report = await sync.update(Source(2), 2)
        assert sync.quarantined is sync.quarantined, "a pool asks for it with every request"
        return report

    report = run(scenario())
    assert len(report.named("committed")) == 300
    assert {engine.version for engine in engines} == {2}


def test_a_syncs_seconds_are_the_event_loops() -> None:
    class Slow(MemoryEngine):
        async def commit(self, update_id: str) -> int:
            await asyncio.sleep(0.1)
            return await super().commit(update_id)

    async def scenario() -> SyncReport:
        return await WeightSync([Slow("a"), Slow("b")], settings=LIMITS).update(Source(1), 1)

    report = run(scenario())
    assert (report.pause_s, report.total_s) == (pytest.approx(0.1), pytest.approx(0.1))
    assert report.stage_s == 0
