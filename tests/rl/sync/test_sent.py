"""Only what has changed is sent, and never on top of something else."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("torch")

from memory_engine import NAMES, QUICK, MemoryEngine, Source, serves, tensors_of

from megatron_idempotent.rl.sync import SyncReport, WeightSync, follow


def run(sync: WeightSync, version: int) -> SyncReport:
    return asyncio.run(sync.update(Source(version), version, changed_only=True))


def test_tensors_that_have_not_changed_are_left_out() -> None:
    engines = [MemoryEngine("a"), MemoryEngine("b")]
    sync = WeightSync(engines, settings=QUICK)
    first, second = run(sync, 1), run(sync, 2)
    assert (first.tensors_sent, first.tensors_unchanged) == (4, 0)
    assert (second.tensors_sent, second.tensors_unchanged) == (3, 1)
    assert second.bytes_sent == 3 * 8 * 4
    for engine in engines:
        assert all(engine.weights[name].equal(tensors_of(2)[name]) for name in NAMES)


def test_everything_is_sent_where_an_engine_does_not_have_the_last_update() -> None:
    engines = [MemoryEngine("a"), MemoryEngine("b")]
    sync = WeightSync(engines, settings=QUICK)
    run(sync, 1)
    engines[1].faults = {"stage": ["raises"]}
    run(sync, 2)
    third = run(sync, 3)
    assert third.tensors_unchanged == 0
    assert [serves(engine) for engine in engines] == [3, 3]


def test_everything_is_sent_where_an_engine_was_started_again() -> None:
    engines = [MemoryEngine("a"), MemoryEngine("b")]
    sync = WeightSync(engines, settings=QUICK)
    run(sync, 1)
    engines[1].version = None  # it does not know what it was started with
    engines[1].weights = tensors_of(7)
    assert run(sync, 2).tensors_unchanged == 0
    assert [serves(engine) for engine in engines] == [2, 2]


def test_everything_is_sent_behind_an_update_that_was_interrupted() -> None:
    engines = [MemoryEngine("a")]
    sync = WeightSync(engines, settings=QUICK)
    run(sync, 1)
    with pytest.raises(OSError, match="is gone"):
        asyncio.run(sync.update(Source(2, fails_at=3), 2, changed_only=True))
    assert run(sync, 3).tensors_unchanged == 0
    assert serves(engines[0]) == 3


def test_another_rank_takes_all_buckets() -> None:
    source = Source(1)
    follow(source)
    assert source.made == len(NAMES)


def test_settings_and_engines_that_cannot_be_are_refused() -> None:
    from megatron_idempotent.rl.sync import SyncSettings

    with pytest.raises(ValueError, match=r"pause_mode='stop': 'keep', 'abort' or 'wait'"):
        SyncSettings(pause_mode="stop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attempts=0: above 0"):
        SyncSettings(attempts=0)
    with pytest.raises(ValueError, match=r"\['a', 'a'\]; give each its own name"):
        WeightSync([MemoryEngine("a"), MemoryEngine("a")])
    with pytest.raises(ValueError, match="no engines"):
        WeightSync([])
