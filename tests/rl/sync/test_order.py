"""The order of a sync, and what becomes of engines that fail in it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

pytest.importorskip("torch")

from memory_engine import NAMES, QUICK, MemoryEngine, Source, serves

from megatron_idempotent.rl.engines import EngineHealth, EngineTimeout
from megatron_idempotent.rl.sync import SyncError, SyncFailed, SyncReport, WeightSync
from megatron_idempotent.rl.sync.recovery import bounded


def update(engines: list[MemoryEngine], version: int = 1, **more: Any) -> SyncReport:
    """One update of all engines."""
    sync = WeightSync(engines, settings=QUICK, **more)
    return asyncio.run(sync.update(Source(version), version))


def three(**faults: list[str]) -> list[MemoryEngine]:
    """Three engines, of which the middle one fails."""
    return [MemoryEngine("a"), MemoryEngine("b", faults), MemoryEngine("c")]


def test_engines_are_switched_together_and_stamped_before_they_are_resumed() -> None:
    engines = [MemoryEngine("a"), MemoryEngine("b")]
    seen = []

    def stamp(version: int, names: tuple[str, ...]) -> None:
        seen.append((version, names))
        assert all(engine.paused and engine.version == 1 for engine in engines)

    report = update(engines, stamp=stamp)
    assert seen == [(1, ("a", "b"))]
    assert [engine.calls for engine in engines] == [["stage", "pause", "commit", "resume"]] * 2
    assert [serves(engine) for engine in engines] == [1, 1]
    assert report.named("committed") == ("a", "b")
    assert (report.tensors_sent, report.bytes_sent) == (4, 4 * 8 * 4)


def test_no_engine_is_paused_before_all_have_the_weights() -> None:
    engines = three()

    async def slow(update: Any, buckets: Any) -> None:
        async for _ in buckets:
            await asyncio.sleep(0.01)
            assert not any(engine.paused for engine in engines)
        raise ValueError("and then it fails")

    engines[1].stage = slow  # type: ignore[method-assign]
    report = update(engines)
    assert report.named("committed") == ("a", "c")
    assert "pause" not in engines[1].calls


@pytest.mark.parametrize("fault", ["raises", "raises in the middle", "hangs"])
def test_an_engine_that_cannot_stage_goes_on_with_the_weights_that_it_has(fault: str) -> None:
    engines = three(stage=[fault])
    report = update(engines)
    assert report.named("committed") == ("a", "c")
    assert report.engines["b"].outcome == "behind"
    assert report.engines["b"].version == serves(engines[1]) == 0
    assert "staging failed" in report.describe()
    assert "pause" not in engines[1].calls


def test_a_commit_that_fails_half_way_is_tried_again_while_the_engine_is_paused() -> None:
    engines = three(commit=["raises in the middle", "raises"])
    report = update(engines)
    assert report.named("committed") == ("a", "b", "c")
    assert engines[1].calls == ["stage", "pause", "commit", "commit", "commit", "resume"]
    assert serves(engines[1]) == 1


def test_a_commit_that_was_carried_out_and_reported_as_failed_counts() -> None:
    engines = three(commit=["done, then raises"])
    report = update(engines)
    assert report.named("committed") == ("a", "b", "c")
    assert engines[1].calls.count("commit") == 1


def test_past_the_budget_a_half_written_engine_is_rolled_back_and_serves_the_old_weights() -> None:
    engines = three(commit=["raises in the middle"] * 3)
    report = update(engines)
    assert report.engines["b"].outcome == "behind"
    assert serves(engines[1]) == 0
    assert "raises in the middle" in report.engines["b"].detail


def test_an_engine_that_cannot_be_rolled_back_is_quarantined_and_never_resumed() -> None:
    engines = three(commit=["raises in the middle"] * 3, rollback=["raises"] * 9)
    sync = WeightSync(engines, settings=QUICK)
    report = asyncio.run(sync.update(Source(1), 1))
    assert report.engines["b"].outcome == "quarantined"
    assert "DIRTY" in sync.quarantined["b"]
    assert engines[1].paused
    assert "resume" not in engines[1].calls
    assert [serves(engines[0]), serves(engines[2])] == [1, 1]


def test_the_next_update_brings_a_quarantined_engine_back() -> None:
    engines = three(commit=["raises in the middle"] * 3, rollback=["raises"] * 9)
    sync = WeightSync(engines, settings=QUICK)
    asyncio.run(sync.update(Source(1), 1, changed_only=True))
    report = asyncio.run(sync.update(Source(2), 2, changed_only=True))
    assert report.named("committed") == ("a", "b", "c")
    assert report.tensors_unchanged == 0, "not all engines had the same weights to build on"
    assert not sync.quarantined
    assert serves(engines[1]) == 2


@pytest.mark.parametrize("method", ["stage", "pause", "commit", "resume"])
def test_an_engine_that_dies_is_quarantined_and_the_others_go_on(method: str) -> None:
    engines = three(**{method: ["dies"]})
    report = update(engines)
    assert report.named("committed") == ("a", "c")
    assert report.engines["b"].outcome == "quarantined"
    assert [serves(engines[0]), serves(engines[2])] == [1, 1]


def test_a_dead_engine_is_left_out_and_takes_part_again_when_it_is_back() -> None:
    engines = three()
    engines[1].dead = True
    sync = WeightSync(engines, settings=QUICK)
    report = asyncio.run(sync.update(Source(1), 1))
    assert report.named("quarantined") == ("b",)
    assert engines[1].calls == []
    engines[1] = sync._engines[1]  # type: ignore[assignment]
    engines[1].dead = False
    assert asyncio.run(sync.update(Source(2), 2)).named("committed") == ("a", "b", "c")


@pytest.mark.parametrize("fault", ["raises", "hangs", "done, then raises"])
def test_an_engine_whose_pause_fails_is_not_switched_and_not_left_paused(fault: str) -> None:
    engines = three(pause=[fault])
    report = update(engines)
    assert report.engines["b"].outcome == "behind"
    assert serves(engines[1]) == 0
    assert "commit" not in engines[1].calls


def test_a_resume_that_fails_is_tried_again() -> None:
    engines = three(resume=["raises", "hangs"])
    assert update(engines).named("committed") == ("a", "b", "c")
    assert serves(engines[1]) == 1


def test_an_engine_that_cannot_be_resumed_is_named() -> None:
    engines = three(resume=["raises"] * 9)
    report = update(engines)
    assert report.named("committed") == ("a", "c")
    assert "resume failed" in report.engines["b"].detail
    assert report.engines["b"].outcome == "quarantined"


def test_an_update_that_no_engine_takes_is_an_error_with_the_report() -> None:
    engine = MemoryEngine("only", {"stage": ["raises"]})
    with pytest.raises(SyncFailed, match="only is behind at version 0: staging failed") as failed:
        update([engine])
    assert failed.value.report.engines["only"].version == 0
    assert serves(engine) == 0


def test_a_stamp_that_raises_leaves_no_engine_paused() -> None:
    def stamp(version: int, names: tuple[str, ...]) -> None:
        raise KeyError("no such sample")

    engines = three()
    with pytest.raises(KeyError, match="no such sample"):
        update(engines, stamp=stamp)
    assert [serves(engine) for engine in engines] == [1, 1, 1]


def test_an_export_that_fails_changes_no_engine() -> None:
    engines = three()
    source = Source(1, fails_at=2)
    sync = WeightSync(engines, settings=QUICK)
    with pytest.raises(OSError, match="the other rank is gone"):
        asyncio.run(sync.update(source, 1))
    assert [serves(engine) for engine in engines] == [0, 0, 0]
    assert not sync.quarantined
    assert asyncio.run(sync.update(Source(1), 1)).named("committed") == ("a", "b", "c")


def test_the_export_runs_to_its_end_where_no_engine_wants_it() -> None:
    engines = [MemoryEngine("a", {"stage": ["raises"]}), MemoryEngine("b", {"stage": ["dies"]})]
    source = Source(1)
    with pytest.raises(SyncFailed):
        asyncio.run(WeightSync(engines, settings=QUICK).update(source, 1))
    assert source.made == len(NAMES)


async def test_two_updates_at_once_are_refused() -> None:
    sync = WeightSync([MemoryEngine("a")], settings=QUICK)
    first = asyncio.ensure_future(sync.update(Source(1), 1))
    await asyncio.sleep(0)
    with pytest.raises(SyncError, match="update to version 2 while that to version 1"):
        await sync.update(Source(2), 2)
    assert (await first).named("committed") == ("a",)


@pytest.mark.parametrize(
    ("method", "limit"),
    [("pause", "pause"), ("commit", "commit"), ("rollback", "commit"), ("resume", "resume")],
)
def test_a_call_that_takes_too_long_names_the_setting_that_limits_it(
    method: str, limit: str
) -> None:
    engine = MemoryEngine("a", {method: ["hangs"]})
    call = {"pause": engine.pause, "commit": lambda: engine.commit("x"), "resume": engine.resume}
    slow = call.get(method, lambda: engine.rollback("x"))

    async def scenario() -> None:
        await bounded(engine, method, slow(), QUICK)

    told = f"engine a has not finished {method} in 0.2 s.* {limit}_timeout_s is the limit"
    with pytest.raises(EngineTimeout, match=told):
        asyncio.run(scenario())
    assert hasattr(QUICK, f"{limit}_timeout_s")


def test_a_late_version_is_refused_and_a_version_twice_too() -> None:
    engines = three()
    sync = WeightSync(engines, settings=QUICK)
    asyncio.run(sync.update(Source(5), 5))
    for late in (4, 5):
        with pytest.raises(SyncFailed, match="has version 5"):
            asyncio.run(WeightSync(engines, settings=QUICK).update(Source(late), late))
    assert [serves(engine) for engine in engines] == [5, 5, 5]


def test_the_same_update_again_is_a_no_op() -> None:
    engines = three()
    sync = WeightSync(engines, settings=QUICK)
    asyncio.run(sync.update(Source(5), 5))
    assert asyncio.run(sync.update(Source(5), 5)).named("committed") == ("a", "b", "c")
    assert [serves(engine) for engine in engines] == [5, 5, 5]


@pytest.mark.parametrize("at", range(1, 60))
def test_an_update_that_is_cancelled_anywhere_strands_no_engine(at: int) -> None:
    engines = three()
    source = Source(1)

    async def cancelled() -> bool:
        sync = WeightSync(engines, settings=QUICK)
        running = asyncio.ensure_future(sync.update(source, 1))
        for _ in range(at):
            await asyncio.sleep(0)
        running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            return True
        return False

    was = asyncio.run(cancelled())
    assert {serves(engine) for engine in engines} <= {0, 1}
    if was and source.made:
        assert source.closed
    if not was:
        assert [engine.version for engine in engines] == [1, 1, 1]


async def test_a_cancelled_update_lets_the_export_come_out_of_its_collective() -> None:
    source = Source(1)
    source.may_go_on.clear()
    sync = WeightSync(three(), settings=QUICK)
    running = asyncio.ensure_future(sync.update(source, 1))
    await asyncio.to_thread(source.being_made.wait, 20)
    running.cancel()
    await asyncio.sleep(0.01)
    assert not running.done()
    source.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert source.closed
    assert source.made == 1


@pytest.mark.parametrize("fault", ["raises", "raises in the middle", "hangs"])
def test_an_engine_that_has_failed_does_not_hold_the_others_up(fault: str) -> None:
    limits = {"raises": "bucket_timeout_s", "hangs": "stage_timeout_s"}
    patient = dataclasses.replace(QUICK, **{limits.get(fault, "bucket_timeout_s"): 3600.0})
    engines = three(stage=[fault])

    async def scenario() -> SyncReport:
        return await asyncio.wait_for(
            WeightSync(engines, settings=patient).update(Source(1), 1), 20
        )

    assert asyncio.run(scenario()).named("committed") == ("a", "c")


def test_a_staging_that_is_given_up_is_ended() -> None:
    engines = three()
    ended = []

    async def hangs(update: Any, buckets: Any) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(list(engines[0].calls))

    engines[1].stage = hangs  # type: ignore[method-assign]
    update(engines)
    assert ended == [["stage"]], "before anything was paused"


def test_a_dead_engine_is_not_asked_again() -> None:
    engines = three(commit=["dies"])
    update(engines)
    assert engines[1].calls.count("commit") == 1


def test_an_engine_that_calls_itself_dirty_is_not_resumed_whatever_version_it_tells() -> None:
    engines = three(pause=["raises"])

    async def health() -> EngineHealth:
        return EngineHealth(status="DIRTY", version=0, detail="and yet a version")

    async def healthy() -> EngineHealth:
        engines[1].health = health  # type: ignore[method-assign]
        return EngineHealth(status="SERVING", version=0)

    engines[1].health = healthy  # type: ignore[method-assign]
    assert update(engines).engines["b"].outcome == "quarantined"
    assert "resume" not in engines[1].calls


def test_recover_resumes_engines_that_a_dead_trainer_left_paused() -> None:
    engines = three()
    for engine in engines:
        engine.paused = True
    engines[1].dirty = True
    engines.append(MemoryEngine("d"))
    engines[3].paused, engines[3].version = True, None
    healths = asyncio.run(WeightSync(engines, settings=QUICK).recover())
    assert [health.status for health in healths.values()] == [
        "SERVING",
        "DIRTY",
        "SERVING",
        "PAUSED",
    ]
    assert engines[1].paused
    assert "resume" not in engines[3].calls
