"""Whatever goes wrong, in whatever order: a run comes to its end, and nothing counts twice."""

from __future__ import annotations

import dataclasses
import random

import pytest
from random_story import some_story, tell
from small_run import SMALL, check

from megatron_idempotent.rl.simulator.faults import Fault
from megatron_idempotent.rl.simulator.run import simulate

UPDATES = ("dies in stage", "dies in commit", "loses a bucket", "stays dirty")


def some_faults(chance: random.Random) -> tuple[Fault, ...]:
    """Up to six, of which no step meets more than it has attempts for."""
    found = []
    failures = 2
    for _ in range(chance.randrange(1, 7)):
        at_s, target = chance.uniform(0, 100), chance.choice(["engine", "policy", "prompt", "put"])
        if target == "engine":
            kinds = ["dies", "hangs", "slow", *UPDATES]
            found.append(
                Fault(
                    target="engine",
                    kind=chance.choice(kinds),
                    index=chance.randrange(4),
                    at_s=at_s,
                    for_s=chance.uniform(0.1, 60),
                    times=chance.choice([1, 2, 5]),
                )
            )
        elif target == "policy" and failures:
            times = chance.randint(1, failures)
            call = chance.choice(["begin", "logprobs", "microbatch", "finish", "abort"])
            kinds = ["raises", "ranks lost"]
            kinds += [] if call == "finish" else ["done, then raises"]
            kind = chance.choice(kinds)
            times = 1 if kind == "ranks lost" else times
            failures -= times
            found.append(Fault(target="policy", kind=kind, call=call, at_s=at_s, times=times))
        elif target == "prompt":
            kind = chance.choice(["poisoned", "fails", "hangs"])
            times = chance.choice([1, 2, 99])
            index = chance.randrange(80)
            found.append(Fault(target="prompt", kind=kind, index=index, times=times))
        elif target == "put" and not any(fault.target == "plane" for fault in found):
            fault = Fault(target="plane", kind="done, then raises", call="put", at_s=at_s, times=2)
            found.append(fault)
    return tuple(found)


@pytest.mark.parametrize("seed", range(15))
def test_a_run_survives_whatever_goes_wrong(seed: int) -> None:
    chance = random.Random(seed)
    sampler = chance.choice(["windowed", "strict", "first_ready", "in_order"])
    scenario = dataclasses.replace(
        SMALL,
        seed=seed,
        steps=20,
        sampler=sampler,
        faults=some_faults(chance),
        minibatches=chance.choice([1, 2]) if sampler != "strict" else 1,
        logprobs=chance.choice(["none", "policy"]),
        groups_per_call=chance.choice([1, 2]),
        capacity=chance.choice([0, 20]),
        filtered=chance.choice([0, 0.2]),
        sync=dataclasses.replace(SMALL.sync, pause_mode=chance.choice(["keep", "abort", "wait"])),
        limit_s=2e4,
    )
    check(simulate(scenario), scenario)


@pytest.mark.parametrize("seed", range(30))
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
