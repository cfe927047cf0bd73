"""The controller on the virtual clock, with every sampler."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from small_run import SMALL, run

from megatron_idempotent.rl.simulator.latency import Constant, LogNormal
from megatron_idempotent.rl.simulator.run import Simulation, simulate
from megatron_idempotent.rl.simulator.scenario import SyncCosts
from megatron_idempotent.rl.simulator.serving import EngineCosts
from megatron_idempotent.rl.simulator.trainer import TrainCosts


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": "strict"},
        {"sampler": "windowed", "staleness": 0},
        {"sampler": "windowed", "staleness": 3, "order": "oldest"},
        {"sampler": "windowed", "staleness": 3, "minibatches": 2},
        {"sampler": "first_ready", "capacity": 12},
        {"sampler": "in_order", "staleness": 0},
        {"sampler": "in_order", "staleness": 2},
        {"sampler": "windowed", "groups_per_call": 4, "logprobs": "both"},
        {"sampler": "windowed", "filtered": 0.3},
        {"sampler": "windowed", "gated": False, "capacity": 40},
        {"sampler": "windowed", "abort_stale": True, "staleness": 1},
        {"sampler": "strict", "gated": False, "capacity": 20, "abort_stale": True},
        {"sampler": "windowed", "groups_per_call": 4, "min_groups_per_call": 3},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_run_comes_to_its_end_and_loses_nothing(settings: dict[str, Any]) -> None:
    report, _ = run(**settings)
    window = dataclasses.replace(SMALL, **settings).make_sampler().max_staleness
    assert window is None or max(report.staleness) <= window
    assert report.lost_tokens >= 0
    assert 0 < report.overlap_efficiency <= 1
    assert 0 <= report.engine_idle < 1
    if settings.get("filtered"):
        share = report.counts["filtered"] / report.counts["submitted"]
        assert share == pytest.approx(0.3, abs=0.12)


def test_a_seed_is_a_run() -> None:
    first, second, other = run()[0], run()[0], run(seed=1)[0]
    assert dataclasses.replace(first, cpu_s=0) == dataclasses.replace(second, cpu_s=0)
    assert first.measured_s != other.measured_s


def test_tokens_are_accounted_for() -> None:
    report, simulation = run(length=Constant(value=160), capacity=12, sampler="first_ready")
    found = report.trained_tokens + report.evicted_tokens + report.filtered_tokens
    left = simulation.plane.entries * SMALL.tokens_per_entry
    assert found + left + report.lost_tokens == pytest.approx(report.generated_tokens)
    assert report.trained_tokens == 16 * 4 * 4 * 160


def test_evicted_tokens_are_those_of_groups_that_came_too_late() -> None:
    report, simulation = run(staleness=1, length=LogNormal(median=200, p99=3000))
    assert report.counts["evicted"] > 0
    assert 0 < report.wasted < 1
    in_order, _ = run(sampler="in_order", length=LogNormal(median=200, p99=3000))
    assert in_order.counts["evicted"] == in_order.wasted == 0
    assert simulation.plane.clears == report.counts["trained"] + report.counts["evicted"]


def test_a_trainer_that_is_the_bottleneck_is_never_idle_once_it_runs() -> None:
    train = TrainCosts(token_s=0.01, finish_s=0.5)
    report, _ = run(staleness=4, train=train)
    exposed = report.step_ends_s[0] + report.sync_s
    assert report.measured_s == pytest.approx(report.train_s + exposed, rel=0.05)
    assert report.overlap_efficiency > 0.9


def test_without_costs_but_generation_the_bound_is_met() -> None:
    """Equal lengths, all slots full, no pause: what is measured is what generation needs."""
    report, _ = run(
        engines=1,
        group_size=16,
        groups_per_step=1,
        sampler="first_ready",
        capacity=2,
        length=Constant(value=160),
        engine=EngineCosts(
            slots=16, step_s=0.02, request_s=0.001, bucket_s=0, pause_s=0, commit_s=0, resume_s=0
        ),
        train=TrainCosts(token_s=0, finish_s=0, save_s=0),
    )
    assert report.measured_s == pytest.approx(16 * 160 * 0.036)
    assert report.overlap_efficiency == pytest.approx(1.0, rel=0.01)
    assert report.engine_idle == pytest.approx(0.0, abs=1e-6)


def test_sync_seconds_are_virtual() -> None:
    report, _ = run()
    pause_s = 0.02 + 0.5 + 0.01
    assert report.pause_s == pytest.approx(17 * pause_s, rel=0.01)
    assert report.sync_s == pytest.approx(17 * (pause_s + 2 * 0.2), rel=0.01)


def test_an_abort_pause_keeps_the_tokens_that_were_drawn() -> None:
    keep, _ = run()
    abort, _ = run(sync=SyncCosts(buckets=2, pause_mode="abort"))
    assert keep.trained_tokens == pytest.approx(abort.trained_tokens, rel=0.2)
    # A part ends between two entries, so up to an entry per request and sync is drawn again.
    assert abort.generated_tokens < 1.4 * keep.generated_tokens


def test_an_error_of_what_runs_beside_ends_the_simulation() -> None:
    async def fails(simulation: Simulation) -> None:
        await asyncio.sleep(5)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        simulate(SMALL, beside=fails)
