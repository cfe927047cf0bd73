"""The controller with a fleet of engines, faults in all parts, and runs that are cut short."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")

from memory_engine import MemoryEngine
from story import BookedPolicy, Fault, Faults, Story, Weights, some_story, tell
from toy import run_virtually

from megatron_idempotent.rl.controller import EnginesLost, Fleet
from megatron_idempotent.rl.engines import Request

pytestmark = pytest.mark.full


def engine(kind: str, method: str = "", *, number: int = 1, **more: Any) -> Fault:
    part = f"engine {number} {method}".strip()
    return Fault(part=part, kind=kind, **{"at_s": 20.0, **more})


def fault(part: str, kind: str = "raises", **more: Any) -> Fault:
    return Fault(part=part, kind=kind, **{"at_s": 20.0, **more})


LONGER = {"steps": 30}
ALL_FOR_A_WHILE = [
    engine("dies", number=number, at_s=20.0 + number / 10, for_s=60.0) for number in range(4)
]
#: What goes wrong, settings of the run, and what its books have then. No run loses a group.
ENDURED: list[tuple[list[Fault], dict[str, Any], dict[str, Any]]] = [
    *(
        ([engine(kind, method, times=12)], LONGER, {"filtered": 0, "quarantined": {}})
        for kind, method in (("raises in the middle", "commit"), ("raises in the middle", "stage"))
    ),
    # An engine that is behind does not starve a strict run.
    ([engine("raises in the middle", "commit", times=3)], {"sampler": "strict"}, {}),
    *(
        ([engine("dies", method)], {**LONGER, "sampler": sampler}, {"filtered": 0, "back": True})
        for method in ("", "stage", "commit")
        for sampler in ("windowed", "in_order")
    ),
    (
        [engine("starts again", number=number, at_s=20.0 + number) for number in range(2)],
        {"group_size": 2, "sampler": "first_ready"},
        {"filtered": 0, "quarantined": {}, "back": True},
    ),
    ([engine("hangs", for_s=100.0)], LONGER, {"filtered": 0}),
    ([engine("slow")], LONGER, {"filtered": 0}),
    (ALL_FOR_A_WHILE, LONGER, {"filtered": 0, "over 60 s": True}),
    ([fault("finish", "done, then raises")], {}, {"aborted": 0}),
    ([fault("begin", "ranks lost"), fault("abort", "ranks lost")], LONGER, {"restored": 1}),
    # Before the first checkpoint.
    ([fault("finish", "ranks lost", at_s=0.0)], {}, {"restored": 1}),
    ([fault("finish", "hangs")], {}, {"restored": 1}),
    ([fault("microbatch"), fault("abort", "hangs")], {}, {"restored": 1}),
    ([fault("export", "ranks lost")], {}, {"restored": 1}),
    ([fault("export")], {}, {"restored": 0}),
    ([fault("prompt 9", "hangs", at_s=0.0)], {}, {"filtered": 0, "over 60 s": True}),
    ([fault("prompt 9", "poisoned", at_s=0.0)], {}, {"filtered": 1, "poisoned": True}),
    ([fault("prompt 9", "fails", at_s=0.0, times=3)], {}, {"filtered": 0}),
]


@pytest.mark.parametrize(("faults", "settings", "expected"), ENDURED)
def test_a_run_endures_what_goes_wrong_now_and_then(
    faults: list[Fault], settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    teller = tell(Story(faults=tuple(faults), **settings))
    assert teller.faults.happened
    assert teller.ends == ["there"]
    books = {
        "filtered": teller.status.counts["filtered"],
        "restored": teller.store.restored,
        "aborted": teller.policy.aborted,
        "quarantined": teller.fleet.quarantined,
        "back": teller.engines[1].starts == 2 and teller.engines[1].drawn > 0,
        "over 60 s": teller.ended_s > 60,
        "poisoned": teller.rows.last.get("rollouts/dropped/poisoned") == 1,
    }
    assert {name: books[name] for name in expected} == expected


@pytest.mark.parametrize("seed", range(45))
def test_runs_that_are_cut_short_and_go_on_keep_what_holds_for_one_run(seed: int) -> None:
    tell(some_story(random.Random(seed)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(1000, 6000, 100))
def test_a_hundred_more_of_them(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            tell(some_story(random.Random(seed)))
        except BaseException as error:
            error.add_note(f"of the story with seed {seed}")
            raise


def fleet_of(*engines: MemoryEngine) -> Fleet:
    async def score(*_: Any) -> list[float]:
        return [0.0]

    return Fleet(
        engines,
        source=Weights(BookedPolicy(Faults(())), Faults(())),
        requests=lambda group_id, prompt: [Request(id=f"{group_id}", prompt=(1,), max_tokens=9)],
        score=score,
    )


def test_looking_for_engines_leaves_them_as_a_publish_has_them() -> None:
    async def scenario() -> None:
        one = MemoryEngine("engine-0")
        fleet = fleet_of(one)
        await fleet.publish(0)
        fleet.quarantined = {"engine-0": "behind"}
        # As in the middle of a publish that is tried again.
        await one.pause()
        assert await fleet.recover()
        assert (await one.health()).status == "PAUSED"
        one.dead = True
        assert not await fleet.recover()

    run_virtually(scenario())


def test_an_engine_that_comes_with_a_higher_version_of_another_run_gets_the_weights() -> None:
    def two() -> tuple[MemoryEngine, MemoryEngine]:
        first, late = MemoryEngine("engine-0"), MemoryEngine("engine-1")
        late.version, late.dead = 70, True
        return first, late

    async def scenario() -> None:
        first, late = two()
        fleet = fleet_of(first, late)
        await fleet.publish(0)
        late.dead = False
        await fleet.publish(1)
        metrics = await fleet.publish(2)
        assert metrics["engines"] == 2
        assert fleet.quarantined == {}
        # And where it is the only one that is left.
        first, late = two()
        fleet = fleet_of(first, late)
        await fleet.publish(0)
        first.dead, late.dead = True, False
        with pytest.raises(EnginesLost):
            await fleet.publish(1)
        assert (await fleet.publish(1))["engines"] == 1

    run_virtually(scenario())
