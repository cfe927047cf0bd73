"""The controller on the virtual clock, with every sampler."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from small_run import SMALL, check, run

from megatron_idempotent.rl.metrics.loggers import SettingsError
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


def test_groups_that_are_aborted_give_their_slots_back_to_those_that_can_train() -> None:
    tail = {"staleness": 1, "length": LogNormal(median=200, p99=3000)}
    kept, _ = run(**tail)
    report, simulation = run(**tail, abort_stale=True)
    assert report.counts["aborted"] > 0 == kept.counts["aborted"]
    assert report.counts["evicted"] >= report.counts["aborted"]
    # Their tokens are not drawn to the end, and what is not drawn leaves time to others.
    assert report.generated_tokens < kept.generated_tokens
    assert report.measured_s < kept.measured_s
    assert max(report.staleness) <= 1
    assert simulation.recorder.last["rollouts/aborted"] == report.counts["aborted"]


def test_without_a_gate_engines_are_never_short_of_work() -> None:
    slow = {"train": TrainCosts(token_s=5e-3, finish_s=0.5), "capacity": 48}
    gated, _ = run(**slow)
    report, _ = run(**slow, gated=False)
    assert report.counts["submitted"] > gated.counts["submitted"]
    assert report.engine_idle < gated.engine_idle
    assert report.wasted > gated.wasted
    assert max(report.staleness) <= 2


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


def test_ping_answers_while_it_trains() -> None:
    versions = []

    async def ping(simulation: Simulation) -> None:
        while True:
            status = await simulation.controller.ping()
            versions.append(status.trainer_version)
            await asyncio.sleep(1)

    check(simulate(SMALL, beside=ping), SMALL)
    assert versions == sorted(versions)
    assert set(versions) >= set(range(15))


def test_an_error_of_what_runs_beside_ends_the_simulation() -> None:
    async def fails(simulation: Simulation) -> None:
        await asyncio.sleep(5)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        simulate(SMALL, beside=fails)


def test_a_run_without_prompts_enough_ends_early_and_loses_nothing() -> None:
    report = simulate(dataclasses.replace(SMALL, prompts=30))
    assert report.conserved
    assert 5 <= report.steps <= 7
    assert report.counts["submitted"] == 30


def test_settings_that_would_deadlock_are_refused_before_anything_runs() -> None:
    with pytest.raises(SettingsError, match="capacity is 5"):
        simulate(dataclasses.replace(SMALL, capacity=5))


def test_two_hundred_engines_train_five_hundred_groups() -> None:
    report, _ = run(
        engines=200,
        groups_per_step=250,
        steps=2,
        group_size=2,
        tokens_per_entry=256,
        engine=EngineCosts(slots=4),
        train=TrainCosts(token_s=1e-5),
    )
    assert report.counts["trained"] == 500
