"""A run of seconds of virtual time, and what must hold at the end of every run."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_idempotent.rl.simulator.faults import Fault
from megatron_idempotent.rl.simulator.latency import LogNormal
from megatron_idempotent.rl.simulator.run import Simulation, SimulationReport, simulate
from megatron_idempotent.rl.simulator.scenario import Limits, Scenario, SyncCosts
from megatron_idempotent.rl.simulator.serving import EngineCosts
from megatron_idempotent.rl.simulator.trainer import TrainCosts

SMALL = Scenario(
    steps=16,
    engines=4,
    group_size=4,
    groups_per_step=4,
    staleness=2,
    length=LogNormal(median=200, p99=1000),
    tokens_per_entry=16,
    most_tokens=4000,
    engine=EngineCosts(slots=16, step_s=0.02, request_s=0.001, bucket_s=0.2),
    train=TrainCosts(token_s=1e-3, finish_s=0.5, restore_s=10.0, save_s=1.0),
    sync=SyncCosts(buckets=2, bucket_timeout_s=20.0, commit_timeout_s=20.0),
    limits=Limits(group_timeout_s=60.0, stall_s=600.0, checkpoint_every=3),
    limit_s=1e6,
)


def run(*faults: Fault, **more: Any) -> tuple[SimulationReport, Simulation]:
    """The small scenario with faults; what holds in every run is checked."""
    scenario = dataclasses.replace(SMALL, faults=faults, **more)
    seen: list[Simulation] = []

    async def look(simulation: Simulation) -> None:
        seen.append(simulation)

    report = simulate(scenario, beside=look)
    check(report, scenario)
    return report, seen[0]


def check(report: SimulationReport, scenario: Scenario) -> None:
    """It has come to its end, no group is lost, and none has counted twice."""
    assert report.steps == scenario.steps
    assert report.conserved, report.counts
    assert report.counts["trained"] == scenario.steps * scenario.groups_per_step
    assert report.counts["leased"] == 0
    assert report.left_over == 0
