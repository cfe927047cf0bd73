"""An update sends changed tensors only, and scales with them; timers hear of its phases."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

from memory_engine import NAMES, QUICK, SIZE, MemoryEngine, Source, serves, sync, tensors_of, update

from megatron_idempotent.rl.controller import Fleet
from megatron_idempotent.rl.sync import SyncFailed, follow
from megatron_idempotent.rl.weights import WeightUpdate

FIRST = {"model.layers.0.self_attn.k_scale": 0.5, "model.layers.0.self_attn.v_scale": 0.25}
SECOND = {name: value * 3 for name, value in FIRST.items()}


def two(*, fp8: str = "") -> list[MemoryEngine]:
    """Engines "a" and "b", of which those named have a cache in FP8."""
    engines = [MemoryEngine(name) for name in "ab"]
    for engine in engines:
        engine.fp8_cache = engine.name in fp8
    return engines


def test_elements_that_have_not_changed_are_left_out() -> None:
    engines = two()
    one = sync(engines)
    reports = [update(one, version, deltas=True) for version in (1, 2)]
    whole = 4 * SIZE * 4
    assert [(each.tensors_sent, each.elements_changed) for each in reports] == [
        (4, 4 * SIZE),
        (3, 3 * 8),
    ]
    assert [(each.elements, each.bytes_whole) for each in reports] == [(4 * SIZE, whole)] * 2
    assert reports[0].bytes_sent == whole
    assert reports[1].bytes_sent < whole / 5
    assert reports[1].encode_s > 0 == reports[0].decode_s < reports[1].decode_s
    for engine in engines:
        assert all(engine.weights[name].equal(tensors_of(2)[name]) for name in NAMES)


def test_a_source_that_finds_changes_has_its_seconds_counted_as_encoding() -> None:
    source, engine = FindsChanges(1), MemoryEngine("a")
    one = sync([engine])
    asyncio.run(one.update(source, 1, deltas=True))
    report = asyncio.run(one.update(source, 2, deltas=True))
    assert source.encode_s <= report.encode_s <= report.stage_s
    assert (report.tensors_sent, report.elements, report.bytes_whole) == (0, 4 * SIZE, 16 * SIZE)


class FindsChanges(Source):
    """Finds after some seconds that nothing has changed."""

    finds_changes = True
    encode_s = 0.05

    def buckets(self, *, bucket_bytes: int, whole: bool = True) -> Iterator[Any]:
        if whole:
            yield from super().buckets(bucket_bytes=bucket_bytes)
        else:
            time.sleep(self.encode_s)


@pytest.mark.parametrize("why", ["not taken", "started again", "interrupted"])
def test_everything_is_sent_where_an_engine_may_not_have_the_last_update(why: str) -> None:
    engines = two()
    one = sync(engines)
    update(one, 1, deltas=True)
    if why == "not taken":
        engines[1].faults = {"stage": ["raises"]}
        update(one, 2, deltas=True)
    elif why == "started again":
        engines[1].version = None  # it does not know what it was started with
        engines[1].weights = tensors_of(7)
    else:
        with pytest.raises(OSError, match="is gone"):
            asyncio.run(one.update(Source(2, fails_at=3), 2, deltas=True))
    assert update(one, 3, deltas=True).elements_changed == 4 * SIZE
    assert [serves(engine) for engine in engines] == [3, 3]


def test_another_rank_takes_all_buckets() -> None:
    source = Source(1)
    follow(source)
    assert source.made == len(NAMES)


def test_scales_take_effect_with_the_weights_and_not_before() -> None:
    engines = two(fp8="ab")
    seen = []

    def stamp(version: int, names: tuple[str, ...]) -> None:
        seen.append([engine.kv_scales for engine in engines])

    one = sync(engines, stamp=stamp)
    update(one, 1, kv_scales=FIRST)
    assert seen == [[FIRST, FIRST]]
    engines[1].faults = {"stage": ["raises"]}
    update(one, 2, kv_scales=SECOND)
    assert [engine.kv_scales for engine in engines] == [SECOND, FIRST]
    assert [serves(engine) for engine in engines] == [2, 1]
    engines[1].kv_scales = {}  # it was started again, and gets those of the others
    update(one, 3)
    update(one, 4, deltas=True)
    assert [engine.kv_scales for engine in engines] == [SECOND, SECOND]


def test_an_engine_without_such_a_cache_refuses_scales_and_serves_on() -> None:
    engines = two(fp8="a")
    report = update(sync(engines), 1, kv_scales=FIRST)
    assert (report.named("committed"), report.named("behind")) == (("a",), ("b",))
    assert "2 kv_scales" in report.describe()
    assert serves(engines[1]) == 0
    alone = sync([MemoryEngine("c")])
    with pytest.raises(SyncFailed, match="kv_scales"):
        update(alone, 1, kv_scales=FIRST)
    # Scales that no engine took are not sent again.
    assert update(alone, 2).named("committed") == ("c",)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, "kv_scales"),
        ({"model.layers.0.self_attn.scale": 1.0}, r"model\.layers\.0\.self_attn\.scale"),
        *(
            ({"a.k_scale": value}, f"a.k_scale is {value!r}")
            for value in (0.0, float("nan"), float("inf"), True, "1")
        ),
    ],
)
def test_scales_that_are_none_are_refused_before_anything_begins(
    scales: dict[str, Any], message: str
) -> None:
    engines = two(fp8="ab")
    one = sync(engines)
    source = Source(1)
    with pytest.raises(ValueError, match=message):
        asyncio.run(one.update(source, 1, kv_scales=scales))
    assert (source.made, engines[0].calls) == (0, [])
    assert update(one, 1).named("committed") == ("a", "b")


def test_a_fleet_makes_the_scales_of_each_version_that_it_publishes() -> None:
    engines, timer, asked = two(fp8="ab"), Timer(), []

    async def scales_of(version: int) -> dict[str, float] | None:
        asked.append(version)
        return FIRST if version == 7 else None

    async def main() -> None:
        fleet = Fleet(
            engines,
            source=Source(1),
            requests=lambda group_id, prompt: [],
            score=None,  # type: ignore[arg-type]  # nothing is sampled
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
    updates = [WeightUpdate(id="u", version=1, kv_scales=scales) for scales in (FIRST, None)]
    assert updates[0] != updates[1]
    assert len(set(updates)) == 2


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


@pytest.mark.parametrize(
    ("more", "faults", "phases"),
    [
        ({}, {}, ["stage", "pause", "commit", "resume"]),
        ({"stamp": lambda *_: None}, {}, ["stage", "pause", "commit", "stamp", "resume"]),
        ({}, {"commit": ["raises"] * 9}, ["stage", "pause", "commit", "resume", "settle"]),
    ],
)
def test_a_timer_is_told_of_every_phase_in_its_turn(
    more: dict[str, Any], faults: dict[str, list[str]], phases: list[str]
) -> None:
    timer, engines = Timer(), two()
    engines[1].faults = faults
    update(sync(engines, **more), 1, timer=timer)
    assert timer.phases == timer.left == phases


def test_a_phase_that_raises_is_left_too() -> None:
    timer = Timer()
    with pytest.raises(OSError, match="is gone"):
        asyncio.run(sync(two()).update(Source(1, fails_at=2), 1, timer=timer))
    assert timer.left == ["stage", "settle"]


@pytest.mark.parametrize("fails_in", ["stage", "pause", "commit", "after commit", "resume"])
def test_a_timer_that_raises_strands_no_engine_and_is_not_asked_again(fails_in: str) -> None:
    timer, engines = Timer(fails_in), two()
    assert update(sync(engines), 1, timer=timer).named("committed") == ("a", "b")
    assert [serves(engine) for engine in engines] == [1, 1]
    assert fails_in.removeprefix("after ") not in timer.phases[:-1]
