"""The order of a sync, and what becomes of engines that fail in it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

pytest.importorskip("torch")

from memory_engine import NAMES, QUICK, SIZE, MemoryEngine, Source, serves, sync, three, update

from benchmarks._virtual_clock import run
from megatron_idempotent.rl.engines import EngineHealth, EngineTimeout
from megatron_idempotent.rl.sync import SyncError, SyncFailed, SyncReport, SyncSettings, WeightSync
from megatron_idempotent.rl.sync.weight_sync import bounded

LIMITS = dataclasses.replace(QUICK, bucket_timeout_s=100.0, stage_timeout_s=1000.0)


def test_engines_are_switched_together_and_stamped_before_they_are_resumed() -> None:
    engines = [MemoryEngine("a"), MemoryEngine("b")]
    seen = []

    def stamp(version: int, names: tuple[str, ...]) -> None:
        seen.append((version, names))
        assert all(engine.paused and engine.version == 1 for engine in engines)

    report = update(sync(engines, stamp=stamp), 1)
    assert seen == [(1, ("a", "b"))]
    assert [engine.calls for engine in engines] == [["stage", "pause", "commit", "resume"]] * 2
    assert [serves(engine) for engine in engines] == [1, 1]
    assert report.named("committed") == ("a", "b")
    assert (report.tensors_sent, report.bytes_sent) == (4, 4 * SIZE * 4)


def test_no_engine_is_paused_before_all_have_the_weights() -> None:
    engines = three()

    async def slow(update: Any, buckets: Any) -> None:
        async for _ in buckets:
            await asyncio.sleep(0.01)
            assert not any(engine.paused for engine in engines)
        raise ValueError("and then it fails")

    engines[1].stage = slow  # type: ignore[method-assign]
    assert update(sync(engines), 1).named("committed") == ("a", "c")
    assert "pause" not in engines[1].calls


HALF = "raises in the middle"
GIVEN_UP = ("quarantined", None)
#: What the middle one of three engines does, its outcome and version, words of its detail, and
#: calls that it never gets, or gets so often.
FAILURES: list[tuple[dict[str, list[str]], str, int | None, str, dict[str, int]]] = [
    ({"stage": ["raises"]}, "behind", 0, "staging failed", {"pause": 0}),
    ({"stage": [HALF]}, "behind", 0, "staging failed", {"pause": 0}),
    ({"stage": ["hangs"]}, "behind", 0, "staging failed", {"pause": 0}),
    ({"stage": ["dies"]}, *GIVEN_UP, "staging failed", {"pause": 0}),
    ({"pause": ["raises"]}, "behind", 0, "pausing failed", {"commit": 0}),
    ({"pause": ["hangs"]}, "behind", 0, "pausing failed", {"commit": 0}),
    ({"pause": ["done, then raises"]}, "behind", 0, "pausing failed", {"commit": 0}),
    ({"pause": ["dies"]}, *GIVEN_UP, "pausing failed", {"commit": 0}),
    ({"commit": [HALF, "raises"]}, "committed", 1, "", {"commit": 3, "pause": 1}),
    ({"commit": ["done, then raises"]}, "committed", 1, "", {"commit": 1}),
    ({"commit": [HALF] * 3}, "behind", 0, HALF, {"commit": 3}),
    ({"commit": [HALF] * 3, "rollback": ["raises"] * 9}, *GIVEN_UP, "DIRTY", {"resume": 0}),
    ({"commit": ["dies"]}, *GIVEN_UP, "commit failed", {"commit": 1}),
    ({"resume": ["raises", "hangs"]}, "committed", 1, "", {"resume": 3}),
    ({"resume": ["raises"] * 9}, *GIVEN_UP, "resume failed", {"commit": 1}),
    ({"resume": ["dies"]}, *GIVEN_UP, "resume failed", {"resume": 1}),
]


@pytest.mark.parametrize(("faults", "outcome", "version", "detail", "calls"), FAILURES)
def test_an_engine_that_fails_is_brought_to_one_version_or_named_and_the_others_go_on(
    faults: dict[str, list[str]],
    outcome: str,
    version: int | None,
    detail: str,
    calls: dict[str, int],
) -> None:
    engines = three(**faults)
    one = sync(engines)
    found = update(one, 1, deltas=True).engines
    assert [found[name].outcome for name in "abc"] == ["committed", outcome, "committed"]
    assert (found["b"].version, detail in found["b"].detail) == (version, True)
    assert [engines[1].calls.count(method) for method in calls] == list(calls.values())
    assert list(one.quarantined) == (["b"] if outcome == "quarantined" else [])
    assert [serves(engine) for engine in engines[::2]] == [1, 1]
    if version is not None:
        assert serves(engines[1]) == version
    else:
        assert engines[1].paused or engines[1].dead or engines[1].calls[-1] != "resume"
    # The next update brings it back, and builds on nothing that it does not have.
    engines[1].dead, engines[1].faults = False, {}
    report = update(one, 2, deltas=True)
    assert report.named("committed") == ("a", "b", "c")
    assert (report.elements_changed < 4 * SIZE) == (outcome == "committed" or "resume" in faults)
    assert not one.quarantined
    assert serves(engines[1]) == 2


def test_a_dead_engine_is_left_out() -> None:
    engines = three()
    engines[1].dead = True
    assert update(sync(engines), 1).named("quarantined") == ("b",)
    assert engines[1].calls == []


def test_an_update_that_no_engine_takes_is_an_error_with_the_report() -> None:
    engines = [MemoryEngine("only", {"stage": ["raises"]}), MemoryEngine("b", {"stage": ["dies"]})]
    source = Source(1)
    told = "only is behind at version 0: staging failed"
    with pytest.raises(SyncFailed, match=told) as failed:
        asyncio.run(sync(engines).update(source, 1))
    assert failed.value.report.engines["only"].version == serves(engines[0]) == 0
    assert source.made == len(NAMES), "the trainer's other ranks take part in the export"


def test_a_stamp_that_raises_leaves_no_engine_paused() -> None:
    def stamp(version: int, names: tuple[str, ...]) -> None:
        raise KeyError("no such sample")

    engines = three()
    with pytest.raises(KeyError, match="no such sample"):
        update(sync(engines, stamp=stamp), 1)
    assert [serves(engine) for engine in engines] == [1, 1, 1]


def test_an_export_that_fails_changes_no_engine() -> None:
    engines = three()
    one = sync(engines)
    with pytest.raises(OSError, match="the other rank is gone"):
        asyncio.run(one.update(Source(1, fails_at=2), 1))
    assert [serves(engine) for engine in engines] == [0, 0, 0]
    assert not one.quarantined
    assert update(one, 1).named("committed") == ("a", "b", "c")


async def test_two_updates_at_once_are_refused() -> None:
    one = sync([MemoryEngine("a")])
    first = asyncio.ensure_future(one.update(Source(1), 1))
    await asyncio.sleep(0)
    with pytest.raises(SyncError, match=r"version 2.*version 1"):
        await one.update(Source(2), 2)
    assert (await first).named("committed") == ("a",)


@pytest.mark.parametrize(
    ("method", "limit"),
    [("pause", "pause"), ("commit", "commit"), ("rollback", "commit"), ("resume", "resume")],
)
async def test_a_call_that_takes_too_long_names_the_setting_that_limits_it(
    method: str, limit: str
) -> None:
    engine = MemoryEngine("a", {method: ["hangs"]})
    call = getattr(engine, method)(*(["x"] if limit == "commit" else []))
    told = f"engine a has not finished {method} in 0.2 s.* {limit}_timeout_s is the limit"
    with pytest.raises(EngineTimeout, match=told):
        await bounded(engine, method, call, QUICK)
    assert hasattr(QUICK, f"{limit}_timeout_s")


def test_a_late_version_is_refused_and_the_same_update_again_is_a_no_op() -> None:
    engines = three()
    one = sync(engines)
    update(one, 5)
    for late in (4, 5):
        with pytest.raises(SyncFailed, match="has version 5"):
            update(sync(engines), late)
    assert update(one, 5).named("committed") == ("a", "b", "c")
    assert [serves(engine) for engine in engines] == [5, 5, 5]


@pytest.mark.parametrize("at", range(1, 60))
def test_an_update_that_is_cancelled_anywhere_strands_no_engine(at: int) -> None:
    engines = three()
    source = Source(1)

    async def cancelled() -> bool:
        running = asyncio.ensure_future(sync(engines).update(source, 1))
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
    running = asyncio.ensure_future(sync(three()).update(source, 1))
    await asyncio.to_thread(source.being_made.wait, 20)
    running.cancel()
    await asyncio.sleep(0.01)
    assert not running.done()
    source.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert source.closed
    assert source.made == 1


@pytest.mark.parametrize("fault", ["raises", HALF, "hangs"])
def test_engines_that_fail_hold_the_others_up_once_however_many_they_are(fault: str) -> None:
    engines = [MemoryEngine(str(n), {"stage": [fault]} if n % 2 else None) for n in range(60)]

    async def scenario() -> tuple[SyncReport, float]:
        report = await WeightSync(engines, settings=LIMITS).update(Source(1), 1)
        return report, asyncio.get_running_loop().time()

    report, took_s = run(scenario())
    assert len(report.named("committed")) == 30
    assert len(report.named("behind")) == 30
    # One limit for the first bucket, for all of them, and a while to give each of them up.
    assert took_s < (2 * LIMITS.bucket_timeout_s if fault == "hangs" else 1.0)
    assert report.total_s == took_s
    assert report.stage_s <= took_s


def test_hundreds_of_engines_take_an_update_together_in_the_event_loops_seconds() -> None:
    class Slow(MemoryEngine):
        async def commit(self, update_id: str) -> int:
            await asyncio.sleep(0.1)
            return await super().commit(update_id)

    engines = [Slow(str(number)) for number in range(300)]

    async def scenario() -> SyncReport:
        one = WeightSync(engines, settings=LIMITS)
        await one.update(Source(1), 1)
        report = await one.update(Source(2), 2)
        assert one.quarantined is one.quarantined, "a pool asks for it with every request"
        return report

    report = run(scenario())
    assert len(report.named("committed")) == 300
    assert {engine.version for engine in engines} == {2}
    assert (report.pause_s, report.total_s) == (pytest.approx(0.1), pytest.approx(0.1))
    assert report.stage_s == 0


def test_a_staging_that_is_given_up_is_ended() -> None:
    engines = three()
    ended = []

    async def hangs(update: Any, buckets: Any) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(list(engines[0].calls))

    engines[1].stage = hangs  # type: ignore[method-assign]
    update(sync(engines), 1)
    assert ended == [["stage"]], "before anything was paused"


def test_an_engine_that_calls_itself_dirty_is_not_resumed_whatever_version_it_tells() -> None:
    engines = three(pause=["raises"])

    async def health() -> EngineHealth:
        status: Any = "DIRTY" if "stage" in engines[1].calls else "SERVING"
        return EngineHealth(status=status, version=0, detail="and yet a version")

    engines[1].health = health  # type: ignore[method-assign]
    assert update(sync(engines), 1).engines["b"].outcome == "quarantined"
    assert "resume" not in engines[1].calls


def test_recover_resumes_engines_that_a_dead_trainer_left_paused() -> None:
    engines = [*three(), MemoryEngine("d")]
    for engine in engines:
        engine.paused = True
    engines[1].dirty, engines[3].version = True, None
    healths = asyncio.run(sync(engines).recover()).values()
    assert [health.status for health in healths] == ["SERVING", "DIRTY", "SERVING", "PAUSED"]
    assert engines[1].paused
    assert "resume" not in engines[3].calls


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SyncSettings(pause_mode="stop"), "pause_mode='stop'"),  # type: ignore[arg-type]
        (lambda: SyncSettings(attempts=0), "attempts=0"),
        (lambda: sync([MemoryEngine("a")] * 2), r"\['a', 'a'\]"),
        (lambda: sync([]), "no engines"),
    ],
)
def test_settings_and_engines_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
