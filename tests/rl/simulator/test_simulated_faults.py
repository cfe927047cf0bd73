"""Faults while the controller runs; each run comes to its end, and loses nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from small_run import SMALL, check, run

from megatron_idempotent.rl.controller import EnginesLost, Fleet
from megatron_idempotent.rl.controller.protocol import Stalled, StepFailed
from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.simulator.clock import run as run_virtually
from megatron_idempotent.rl.simulator.engine import SimulatedEngine
from megatron_idempotent.rl.simulator.faults import Fault, Faults
from megatron_idempotent.rl.simulator.run import Simulation, simulate
from megatron_idempotent.rl.simulator.scenario import Limits
from megatron_idempotent.rl.simulator.trainer import SimulatedWeights
from megatron_idempotent.rl.workers.protocol import RanksLost


def engine(kind: str, **more: Any) -> Fault:
    return Fault(target="engine", kind=kind, **{"index": 1, "at_s": 20.0, "for_s": 30.0, **more})


def policy(kind: str, call: str, **more: Any) -> Fault:
    return Fault(target="policy", kind=kind, call=call, **{"at_s": 20.0, **more})


def prompt(kind: str, times: int = 1) -> Fault:
    return Fault(target="prompt", kind=kind, index=9, times=times)


def plane(kind: str, call: str) -> Fault:
    return Fault(target="plane", kind=kind, call=call, at_s=10.0, times=2)


LONGER = {"steps": 30}
LOST_FOR_A_WHILE = [engine("dies", index=i, at_s=20.0 + i / 10, for_s=60.0) for i in range(4)]
#: What goes wrong, settings of the run, and what its report has then. No run loses a group.
ENDURED: list[tuple[list[Fault], dict[str, Any], dict[str, Any]]] = [
    *(
        ([engine(kind, times=12, for_s=0.0)], LONGER, {"faults": 12, "quarantined": {}})
        for kind in ("stays dirty", "loses a bucket")
    ),
    # An engine that is behind does not starve a strict run.
    (
        [engine("stays dirty", times=3, for_s=0.0)],
        {"sampler": "strict", "limit_s": 5e3},
        {"faults": 3},
    ),
    ([engine("hangs", for_s=100.0)], LONGER, {"filtered": 0}),
    (LOST_FOR_A_WHILE, LONGER, {"filtered": 0, "over 60 s": True}),
    # A step that fails is taken again; a finish is asked once more before its step is undone.
    *(
        (
            [policy(kind, call)],
            {"logprobs": "policy"},
            {"faults": 1, "filtered": 0, "aborted": undone},
        )
        for kind in ("raises", "done, then raises")
        for call, undone in (("logprobs", 0), ("begin", kind != "raises"), ("microbatch", 1))
    ),
    ([policy("done, then raises", "finish")], {}, {"faults": 1, "aborted": 0}),
    ([policy("raises", "finish", times=2)], {}, {"faults": 2, "filtered": 0, "aborted": 1}),
    *(
        ([policy("ranks lost", call)], {"steps": 20}, {"restores": 1})
        for call in ("begin", "microbatch", "finish")
    ),
    (
        [policy("ranks lost", "abort"), policy("raises", "microbatch")],
        {"steps": 20},
        {"restores": 1},
    ),
    # Before the first checkpoint.
    (
        [policy("ranks lost", "finish", at_s=0.0)],
        {"limits": Limits(stall_s=12000.0)},
        {"restores": 1},
    ),
    ([policy("hangs", "finish")], {}, {"restores": 1}),
    ([policy("raises", "microbatch"), policy("hangs", "abort")], {}, {"restores": 1}),
    ([prompt("hangs")], {}, {"filtered": 0, "over 60 s": True}),
    ([prompt("hangs", 999)], {"steps": 40}, {"filtered": 1, "trained": False}),
    ([prompt("poisoned", 999)], {}, {"filtered": 1, "trained": False, "poisoned": True}),
    ([prompt("fails", 3)], {}, {"filtered": 0, "trained": True}),
    *(
        ([plane(kind, call)], {}, {"faults": 2, "filtered": 0})
        for kind in ("raises", "done, then raises")
        for call in ("put", "clear")
    ),
    ([plane("raises", "get")], {}, {"faults": 2}),
    ([Fault(target="weights", kind="raises", at_s=20.0)], {}, {"faults": 1}),
]


@pytest.mark.parametrize(("faults", "settings", "expected"), ENDURED)
def test_a_run_endures_what_goes_wrong_now_and_then(
    faults: list[Fault], settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    report, simulation = run(*faults, **settings)
    found = {
        "faults": len(report.faults),
        "filtered": report.counts["filtered"],
        "restores": report.restores,
        "aborted": simulation.policy.aborted,
        "quarantined": simulation.fleet._sync.quarantined,
        "trained": simulation.policy.has(9),
        "over 60 s": report.measured_s > 60,
        "poisoned": any("poisoned" in name for name in report.dropped),
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("faults", "settings", "error", "said"),
    [
        (
            [engine("dies", index=i, for_s=0.0) for i in range(4)],
            *({}, Stalled, r"no progress in \d+ s.*groups are being generated"),
        ),
        (
            [policy("raises", "finish", times=99)],
            *({}, StepFailed, "failed 3 times with the same 4 groups"),
        ),
        ([policy("ranks lost", "microbatch", times=99)], {}, RanksLost, "a simulated rank died"),
        *(
            (
                [policy("hangs", call)],
                *({"logprobs": "policy"}, Stalled, "no progress in 600 s.*the train pump is at"),
            )
            for call in ("begin", "logprobs", "microbatch")
        ),
    ],
)
def test_what_does_not_end_ends_the_run(
    faults: list[Fault], settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        simulate(dataclasses.replace(SMALL, faults=tuple(faults), **settings))


@pytest.mark.parametrize("kind", ["dies", "dies in stage", "dies in commit"])
@pytest.mark.parametrize("sampler", ["windowed", "in_order"])
def test_an_engine_that_dies_and_comes_back_costs_time_alone(kind: str, sampler: str) -> None:
    report, simulation = run(engine(kind), sampler=sampler, steps=30)
    assert [name for _, name in report.faults] == [f"engine 1 {kind}"]
    assert simulation.engines[1].serving.tokens > 0
    # It serves again, with the newest weights.
    assert simulation.fleet._sync.quarantined == {}
    assert report.counts["filtered"] == 0


def test_an_engine_that_was_idle_when_it_died_is_left_out_and_taken_back() -> None:
    # One request at a time, for the first engine: the last one is idle until the others are gone.
    others = [engine("dies", index=i, at_s=60.0, for_s=0.0) for i in range(3)]
    report, simulation = run(
        engine("dies", index=3, at_s=10.0, for_s=20.0),
        *others,
        group_size=1,
        groups_per_step=1,
        staleness=0,
        steps=40,
    )
    assert report.counts["filtered"] == 0
    assert simulation.engines[3].serving.lost_tokens == 0
    assert simulation.engines[3].serving.tokens > 0
    assert sorted(simulation.fleet._sync.quarantined) == ["engine-0", "engine-1", "engine-2"]


def test_an_engine_that_is_started_anew_while_it_is_idle_costs_no_group() -> None:
    async def restart(simulation: Simulation) -> None:
        await asyncio.sleep(20)
        one = simulation.engines[0]
        while (await one.health()).running:
            await asyncio.sleep(0.05)
        one.die()
        one.come_back()
        restarted.append(one.serving.tokens)

    restarted: list[float] = []
    scenario = dataclasses.replace(SMALL, group_size=2, sampler="first_ready", steps=40)
    report = simulate(scenario, beside=restart)
    check(report, scenario)
    assert report.counts["filtered"] == 0
    # No token of weights that this run has not published is in the weights.
    assert max(report.staleness) < 10
    assert len(restarted) == 1


def test_a_slow_engine_slows_its_own_requests_alone() -> None:
    usual, _ = run(steps=30)
    report, _ = run(engine("slow", factor=0.2), steps=30)
    assert usual.measured_s < report.measured_s < 3 * usual.measured_s


def test_everything_at_once() -> None:
    faults = (
        engine("dies", index=0, at_s=10.0),
        engine("dies in stage", index=1, at_s=15.0),
        engine("dies in commit", index=2, at_s=20.0),
        engine("hangs", index=3, at_s=60.0),
        policy("raises", "finish", at_s=25.0, times=2),
        policy("ranks lost", "microbatch", at_s=50.0),
        policy("done, then raises", "microbatch", at_s=70.0),
        Fault(target="plane", kind="done, then raises", call="put", at_s=30.0, times=2),
        Fault(target="plane", kind="raises", call="clear", at_s=35.0, times=2),
        Fault(target="prompt", kind="poisoned", index=12, times=99),
        Fault(target="prompt", kind="hangs", index=17),
    )
    for seed in range(5):
        scenario = dataclasses.replace(SMALL, faults=faults, steps=40, seed=seed)
        check(simulate(scenario), scenario)


def one_fleet(*engines: SimulatedEngine) -> Fleet:
    async def score(*_: Any) -> list[float]:
        return [0.0]

    return Fleet(
        engines,
        source=SimulatedWeights(2, Faults(())),
        requests=lambda group_id, prompt: [Request(id=f"{group_id}", prompt=(1,), max_tokens=9)],
        score=score,
    )


def test_looking_for_engines_leaves_them_as_a_publish_has_them() -> None:
    async def scenario() -> None:
        engine = SimulatedEngine("engine-0")
        fleet = one_fleet(engine)
        await fleet.publish(0)
        fleet.quarantined = {"engine-0": "behind"}
        # As in the middle of a publish that is tried again.
        await engine.pause()
        assert await fleet.recover()
        assert (await engine.health()).status == "PAUSED"
        engine.die()
        assert not await fleet.recover()

    run_virtually(scenario())


def test_an_engine_that_comes_with_a_higher_version_of_another_run_gets_the_weights() -> None:
    async def scenario() -> None:
        first, late = SimulatedEngine("engine-0"), SimulatedEngine("engine-1", version=70)
        fleet = one_fleet(first, late)
        late.die()
        await fleet.publish(0)
        late.come_back()
        await fleet.publish(1)
        metrics = await fleet.publish(2)
        assert metrics["engines"] == 2
        assert fleet.quarantined == {}
        # And where it is the only one that is left.
        alone = one_fleet(SimulatedEngine("engine-0"), SimulatedEngine("engine-1", version=70))
        first, late = alone._engines.values()
        late.die()
        await alone.publish(0)
        first.die()
        late.come_back()
        with pytest.raises(EnginesLost):
            await alone.publish(1)
        assert (await alone.publish(1))["engines"] == 1

    run_virtually(scenario())
