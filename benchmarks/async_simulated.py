"""The asynchronous controller on a virtual clock: what it reaches, wastes and costs.

    python -m benchmarks.async_simulated [--steps 60] [--groups 1000,10000,100000]
                                         [--only overlap] [--json]

The real controller, pool and weight sync; engines and trainer take virtual time
(`docs/simulator.md` says how). Sections, each of ratios within one run:

- overlap: max(generation, training + pauses) ÷ measured with long-tailed responses, the tokens
  that each sampler throws away, and the staleness that it trains.
- async ÷ sync: tokens trained per second at equal resources, 16 devices that either all generate
  and then all train, or are split for good. Sync is charged nothing for the switch between the
  two, so async loses where the split does not fit the work.
- overhead: the controller's own processor time per group, with engines and trainer that cost
  next to nothing, as the run gets longer.
- recovery: virtual seconds that a fault costs, over the same run without it.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks._record import options, tell
from megatron_idempotent.rl.simulator.faults import Fault
from megatron_idempotent.rl.simulator.latency import LogNormal
from megatron_idempotent.rl.simulator.scenario import Limits, Scenario
from megatron_idempotent.rl.simulator.serving import EngineCosts
from megatron_idempotent.rl.simulator.trainer import TrainCosts

LONG_TAIL = LogNormal(median=1200, p99=12000)
SHORT_TAIL = LogNormal(median=2000, p99=3000)
BASE = Scenario(
    steps=60,
    engines=16,
    groups_per_step=64,
    length=LONG_TAIL,
    engine=EngineCosts(slots=64, prompt_tokens=10),
    train=TrainCosts(token_s=5e-5, finish_s=1.0),
)
#: What is trained ÷ what is generated, in device-seconds, where both have full batches.
TOKEN_DEVICE_S = 0.0005


def overlap(steps: int) -> dict[str, Any]:
    """Samplers and windows, for a trainer that is slower than the engines, and a faster one."""
    from megatron_idempotent.rl.simulator.run import simulate

    wide: dict[str, dict[str, Any]] = {
        "windowed 4": {"staleness": 4},
        "windowed 8, oldest": {"staleness": 8, "order": "oldest"},
        "first_ready, 4 steps held": {"sampler": "first_ready", "capacity": 256},
        "first_ready, 9 steps held": {"sampler": "first_ready", "capacity": 576},
    }
    narrow: dict[str, dict[str, Any]] = {
        "strict": {"sampler": "strict"},
        "windowed 1": {"staleness": 1},
        "windowed 2": {"staleness": 2},
        "in_order 2": {"sampler": "in_order", "staleness": 2},
    }
    found = {}
    for bound, token_s in (("training", 5e-5), ("generation", 2e-5)):
        for minibatches, settings in ((1, {**narrow, **wide}), (4, wide)):
            for name, chosen in settings.items():
                train = dataclasses.replace(BASE.train, token_s=token_s)
                scenario = dataclasses.replace(
                    BASE, steps=steps, train=train, minibatches=minibatches, **chosen
                )
                report = simulate(scenario)
                assert report.conserved
                found[f"{bound}-bound, sync every {minibatches}, {name}"] = {
                    "efficiency": report.overlap_efficiency,
                    "useful": report.useful_efficiency,
                    "wasted": report.wasted,
                    "staleness": report.mean_staleness,
                    "most": max(report.staleness),
                }
    return found


def against_sync(steps: int) -> dict[str, float]:
    """Tokens trained per second, async ÷ sync, on 16 devices."""
    from megatron_idempotent.rl.simulator.run import simulate

    found = {}
    for tail, length in (("short tail", SHORT_TAIL), ("long tail", LONG_TAIL)):
        for ratio in (8.0, 4.0, 2.0, 1.0, 0.5, 0.25):
            token_device_s = TOKEN_DEVICE_S / ratio
            base = dataclasses.replace(BASE, steps=steps, length=length)

            def speed(
                base: Scenario, engines: int, devices: int, work: float, **more: Any
            ) -> float:
                train = TrainCosts(token_s=work / devices, finish_s=8.0 / devices)
                scenario = dataclasses.replace(base, engines=engines, train=train, **more)
                report = simulate(scenario)
                assert report.conserved
                return report.tokens_per_s

            # All groups of a step are complete before the first of them trains.
            sync = speed(
                base,
                16,
                16,
                token_device_s,
                sampler="in_order",
                staleness=0,
                groups_per_call=base.groups_per_step,
            )
            for engines in (12, 8, 4):
                fast = speed(
                    base,
                    engines,
                    16 - engines,
                    token_device_s,
                    sampler="first_ready",
                    capacity=4 * base.groups_per_step,
                )
                found[f"{tail}, generation:training {ratio:g}, {engines}+{16 - engines}"] = (
                    fast / sync
                )
    return found


def overhead(counts: list[int]) -> dict[str, float]:
    """Milliseconds of processor time per group, for runs of so many groups."""
    from benchmarks._quick_groups import seconds_of_run

    seconds_of_run(200)  # imports, and code that is specialised as it runs
    return {str(count): 1e3 * seconds_of_run(count) / count for count in counts}


def recovery(steps: int) -> dict[str, float]:
    """Virtual seconds that a fault costs, medians over seeds."""
    from megatron_idempotent.rl.simulator.run import simulate

    base = dataclasses.replace(
        BASE,
        steps=min(steps, 60),
        engines=8,
        groups_per_step=32,
        sampler="first_ready",
        capacity=128,
        train=TrainCosts(token_s=5e-5, finish_s=1.0, restore_s=60.0, save_s=5.0),
        limits=Limits(group_timeout_s=1200.0, checkpoint_every=5),
    )
    at = {"at_s": 600.0}
    engine = {"target": "engine", "index": 1, "for_s": 120.0, **at}
    faults: dict[str, list[dict[str, Any]]] = {
        "an engine of 8 is away for 120 s": [{"kind": "dies", **engine}],
        "an engine dies in stage": [{"kind": "dies in stage", **engine}],
        "an engine dies in commit": [{"kind": "dies in commit", **engine}],
        "an engine loses a bucket": [{"kind": "loses a bucket", **engine}],
        "an engine hangs for 120 s": [{"kind": "hangs", **engine}],
        "all engines are away for 120 s": [
            {"kind": "dies", **engine, "index": index} for index in range(8)
        ],
        "a microbatch raises": [{"target": "policy", "call": "microbatch", "kind": "raises", **at}],
        "a finish raises twice": [
            {"target": "policy", "call": "finish", "kind": "raises", "times": 2, **at}
        ],
        "ranks are lost, 60 s to restart": [
            {"target": "policy", "call": "finish", "kind": "ranks lost", **at}
        ],
        "a rollout hangs": [{"target": "prompt", "kind": "hangs", "index": 500}],
    }
    found = {}
    usual = {seed: simulate(dataclasses.replace(base, seed=seed)) for seed in range(3)}
    for name, described in faults.items():
        more = []
        for seed, without in usual.items():
            scenario = dataclasses.replace(
                base, seed=seed, faults=tuple(Fault(**each) for each in described)
            )
            report = simulate(scenario)
            assert report.conserved
            assert report.steps == base.steps
            more.append(report.measured_s - without.measured_s)
        found[name] = statistics.median(more)
    return found


def main() -> None:
    """Print all sections, or one JSON object."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run")
    parser.add_argument("--groups", default="1000,10000,100000", help="of the overhead's runs")
    parser.add_argument("--only", help="one of overlap, ratios, overhead, recovery")
    asked = parser.parse_args()
    sections: dict[str, Callable[[], Any]] = {
        "overlap": lambda: overlap(asked.steps),
        "overhead": lambda: overhead(list(map(int, asked.groups.split(",")))),
        "recovery": lambda: recovery(asked.steps),
        "ratios": lambda: against_sync(max(asked.steps // 3, 8)),
    }
    results = {}
    for name, measure in sections.items():
        if asked.only in (None, name):
            results[name] = measure()
            if not asked.json:
                tell({name: results[name]})
    if asked.json:
        tell(results, True)


if __name__ == "__main__":
    main()
