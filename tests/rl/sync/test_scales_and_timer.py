"""Scales that an update carries beside weights, and timers that hear of its phases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from memory_engine import QUICK, MemoryEngine, Source, serves

from megatron_idempotent.rl.controller import Fleet
from megatron_idempotent.rl.sync import SyncFailed, SyncReport, WeightSync
from megatron_idempotent.rl.weights import WeightUpdate

FIRST = {"model.layers.0.self_attn.k_scale": 0.5, "model.layers.0.self_attn.v_scale": 0.25}
SECOND = {name: value * 3 for name, value in FIRST.items()}


def run(sync: WeightSync, version: int, **more: Any) -> SyncReport:
    return asyncio.run(sync.update(Source(version), version, **more))


def with_fp8_caches(*names: str) -> list[MemoryEngine]:
    engines = [MemoryEngine(name) for name in names]
    for engine in engines:
        engine.fp8_cache = True
    return engines


def test_scales_take_effect_with_the_weights_and_not_before() -> None:
    engines = with_fp8_caches("a", "b")
    seen = []

    def stamp(version: int, names: tuple[str, ...]) -> None:
        seen.append([engine.kv_scales for engine in engines])

    sync = WeightSync(engines, settings=QUICK, stamp=stamp)
    run(sync, 1, kv_scales=FIRST)
    assert seen == [[FIRST, FIRST]]
    engines[1].faults = {"stage": ["raises"]}
    run(sync, 2, kv_scales=SECOND)
    assert [engine.kv_scales for engine in engines] == [SECOND, FIRST]
    assert [serves(engine) for engine in engines] == [2, 1]


def test_an_engine_that_was_started_again_gets_the_scales_of_the_others() -> None:
    engines = with_fp8_caches("a", "b")
    sync = WeightSync(engines, settings=QUICK)
    run(sync, 1, kv_scales=FIRST)
    engines[1].kv_scales = {}
    run(sync, 2)
    run(sync, 3, changed_only=True)
    assert [engine.kv_scales for engine in engines] == [FIRST, FIRST]


def test_an_engine_without_such_a_cache_refuses_scales_and_serves_on() -> None:
    engines = [*with_fp8_caches("a"), MemoryEngine("b")]
    sync = WeightSync(engines, settings=QUICK)
    report = run(sync, 1, kv_scales=FIRST)
    assert report.named("committed") == ("a",)
    assert report.engines["b"].outcome == "behind"
    assert "brings 2 kv_scales, and it has no cache; leave kv_scales out" in report.describe()
    assert serves(engines[1]) == 0
    alone = WeightSync([MemoryEngine("c")], settings=QUICK)
    with pytest.raises(SyncFailed, match="leave kv_scales out"):
        run(alone, 1, kv_scales=FIRST)
    # Scales that no engine took are not sent again.
    assert run(alone, 2).named("committed") == ("c",)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, "give at least one"),
        ({"model.layers.0.self_attn.scale": 1.0}, "each ends in .k_scale, .v_scale, .q_scale"),
        ({"a.k_scale": 0.0}, "numbers above 0, and a.k_scale is 0.0"),
        ({"a.k_scale": float("nan")}, "a.k_scale is nan"),
        ({"a.k_scale": float("inf")}, "a.k_scale is inf"),
        ({"a.k_scale": True}, "a.k_scale is True"),
        ({"a.k_scale": "1"}, "a.k_scale is '1'; a tensor's is"),
    ],
)
def test_scales_that_are_none_are_refused_before_anything_begins(
    scales: dict[str, Any], message: str
) -> None:
    engines = with_fp8_caches("a")
    sync = WeightSync(engines, settings=QUICK)
    source = Source(1)
    with pytest.raises(ValueError, match=message):
        asyncio.run(sync.update(source, 1, kv_scales=scales))
    assert (source.made, engines[0].calls) == (0, [])
    assert run(sync, 1).named("committed") == ("a",)


def test_a_fleet_makes_the_scales_of_each_version_that_it_publishes() -> None:
    engines, timer, asked = with_fp8_caches("a", "b"), Timer(), []

    async def scales_of(version: int) -> dict[str, float] | None:
        asked.append(version)
        return FIRST if version == 7 else None

    async def score(*_: Any) -> list[float]:
        return [0.0]

    async def main() -> None:
        fleet = Fleet(
            engines,
            source=Source(1),
            requests=lambda group_id, prompt: [],
            score=score,
            settings=QUICK,
            kv_scales=scales_of,
            timer=timer,
        )
        assert (await fleet.publish(7))["engines"] == 2
        fleet._source = Source(2)
        await fleet.publish(8)

    asyncio.run(main())
    assert asked == [7, 8]
    assert [engine.kv_scales for engine in engines] == [FIRST, FIRST]
    assert [serves(engine) for engine in engines] == [2, 2]
    assert timer.phases == ["stage", "pause", "commit", "resume"] * 2


def test_updates_with_scales_can_be_compared_and_kept_in_sets() -> None:
    with_scales, without = (
        WeightUpdate(id="u", version=1, kv_scales=scales) for scales in (FIRST, None)
    )
    assert with_scales != without
    assert len({with_scales, without}) == 2


class Timer:
    """Keeps phases as NeMo-RL's does: a label at a time, and how it was left."""

    def __init__(self, fails_in: str = "") -> None:
        self.phases: list[str] = []
        self.left: list[str] = []
        self._fails_in = fails_in

    @contextlib.contextmanager
    def time(self, label: str) -> Iterator[None]:
        if label == self._fails_in:
            raise RuntimeError("its clock has stopped")
        assert self.phases[len(self.left) :] == [], "a phase within a phase"
        self.phases.append(label)
        yield
        self.left.append(label)
        if f"after {label}" == self._fails_in:
            raise RuntimeError("its clock has stopped")


def test_a_timer_is_told_of_every_phase_in_its_turn() -> None:
    timer = Timer()
    engines = [MemoryEngine("a"), MemoryEngine("b")]
    run(WeightSync(engines, settings=QUICK), 1, timer=timer)
    assert timer.phases == timer.left == ["stage", "pause", "commit", "resume"]
    timer = Timer()
    run(WeightSync(engines, settings=QUICK, stamp=lambda *_: None), 2, timer=timer)
    assert timer.phases == ["stage", "pause", "commit", "stamp", "resume"]
    timer = Timer()
    engines[1].faults = {"commit": ["raises"] * 9}
    run(WeightSync(engines, settings=QUICK), 3, timer=timer)
    assert timer.left == ["stage", "pause", "commit", "resume", "settle"]


def test_a_phase_that_raises_is_left_too() -> None:
    timer = Timer()
    sync = WeightSync([MemoryEngine("a")], settings=QUICK)
    with pytest.raises(OSError, match="is gone"):
        asyncio.run(sync.update(Source(1, fails_at=2), 1, timer=timer))
    assert timer.left == ["stage", "settle"]


@pytest.mark.parametrize("fails_in", ["stage", "pause", "commit", "after commit", "resume"])
def test_a_timer_that_raises_strands_no_engine_and_is_not_asked_again(fails_in: str) -> None:
    timer = Timer(fails_in)
    engines = [MemoryEngine("a"), MemoryEngine("b")]
    report = run(WeightSync(engines, settings=QUICK), 1, timer=timer)
    assert report.named("committed") == ("a", "b")
    assert [serves(engine) for engine in engines] == [1, 1]
    assert fails_in.removeprefix("after ") not in timer.phases[:-1]
