"""Runs that are drained, cancelled, and go on in the same controller or a fresh one, with faults.

What must hold is checked while they run and at the end, by the policy's books and not the
controller's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
import traceback
from collections.abc import Mapping
from typing import Any

from small_run import SMALL

from megatron_idempotent.rl.controller import Controller, PublishFailed, Stalled, Status, StepFailed
from megatron_idempotent.rl.metrics.loggers import Loggers
from megatron_idempotent.rl.simulator import clock
from megatron_idempotent.rl.simulator.faults import Fault, InjectedError
from megatron_idempotent.rl.simulator.latency import uniform
from megatron_idempotent.rl.simulator.run import MeasuredFleet, Simulation, sync_settings
from megatron_idempotent.rl.simulator.scenario import Scenario
from megatron_idempotent.rl.simulator.trainer import (
    _FLAT,
    BrokenRule,
    CountingPlane,
    SimulatedPrompts,
    SimulatedWeights,
)
from megatron_idempotent.rl.workers import RanksLost

#: What may end a run; a fresh controller, or the same one, then goes on.
ENDS = (StepFailed, PublishFailed, Stalled, RanksLost)
MOST_LEGS = 25


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leg:
    """One call of `run`, and what cuts it short: "", "drain", "cancel" or "cancel twice"."""

    steps: int
    cut: str = ""
    at_s: float = 0.0
    fresh: bool = True
    """True if a new controller goes on after it, from the newest checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
    scenario: Scenario
    legs: tuple[Leg, ...]
    evaluate: str = ""
    """Versions that are evaluated: "" none, "all", or "due" for every third."""
    evaluation_s: float = 1.0
    drain_s: float = 30.0
    abort_s: float = 20.0
    lost_in_export: tuple[float, ...] = ()
    """Times after which the ranks are lost in the next export of weights."""


def some_story(chance: random.Random) -> Story:
    """Any sampler and sizes, 0–6 faults, and up to four runs one after the other."""
    engines = chance.randint(1, 6)
    sampler = chance.choice(["windowed", "windowed", "strict", "first_ready", "in_order"])
    minibatches = chance.choice([1, 1, 2, 3]) if sampler != "strict" else 1
    groups = chance.choice([1, 2, 4])
    staleness = chance.randint(minibatches - 1, minibatches + 2)
    needed = max((staleness + 1) * groups, minibatches * groups)
    steps = chance.choice([8, 12, 18])
    scenario = dataclasses.replace(
        SMALL,
        seed=chance.randrange(1000),
        steps=steps,
        engines=engines,
        group_size=chance.choice([1, 2, 4]),
        groups_per_step=groups,
        minibatches=minibatches,
        sampler=sampler,
        staleness=staleness,
        order=chance.choice(["freshest", "oldest"]),
        capacity=chance.choice([0, 0, needed, needed + 3]),
        concurrency=chance.choice([0, 0, 1, groups]),
        logprobs=chance.choice(["none", "policy", "both"]),
        groups_per_call=chance.randint(1, groups),
        filtered=chance.choice([0, 0, 0.2]),
        faults=_survived([_fault(chance, engines) for _ in range(chance.randrange(7))]),
        sync=dataclasses.replace(SMALL.sync, pause_mode=chance.choice(["keep", "abort", "wait"])),
        limits=dataclasses.replace(SMALL.limits, checkpoint_every=chance.choice([0, 1, 3])),
        train=dataclasses.replace(SMALL.train, save_s=chance.choice([0.0, 1.0])),
        limit_s=3e5,
    )
    legs = []
    for _ in range(chance.randrange(4)):
        cut = chance.choice(["", "drain", "drain", "cancel", "cancel twice"])
        done = chance.randint(1, steps)
        leg = Leg(
            steps=done if not cut else steps,
            cut=cut,
            at_s=chance.choice([0.0, 0.3, chance.uniform(0, 100)]),
            fresh=chance.random() < 0.5,
        )
        legs.append(leg)
    lost = chance.choice([(), (), (chance.uniform(0, 60),)])
    evaluate, drain_s = chance.choice(["", "all", "due"]), chance.choice([0.2, 5.0, 30.0])
    scenario = dataclasses.replace(
        scenario,
        gated=chance.random() < 0.7,
        abort_stale=chance.random() < 0.5,
        min_groups_per_call=chance.randint(1, scenario.groups_per_call),
    )
    return Story(
        scenario=scenario, legs=tuple(legs), evaluate=evaluate, drain_s=drain_s, lost_in_export=lost
    )


def _survived(faults: list[Fault]) -> tuple[Fault, ...]:
    """The faults, of which reads fail less often than a checkpoint tries to read its groups.

    One that cannot read them, as often as it tries, ends the run as it should.
    """
    found, left = [], SMALL.limits.group_attempts - 1
    for fault in faults:
        if (fault.target, fault.call) == ("plane", "get"):
            if not left:
                continue
            fault = dataclasses.replace(fault, times=min(fault.times, left))
            left -= fault.times
        found.append(fault)
    return tuple(found)


def _fault(chance: random.Random, engines: int) -> Fault:
    # Half of them at the times of the first publishes and steps, the others anywhere.
    at_s = chance.choice([chance.uniform(0, 15), chance.uniform(0, 120)])
    target = chance.choice(["engine", "engine", "policy", "policy", "weights", "plane", "prompt"])
    times = chance.choice([1, 1, 2, 5])
    if target == "engine":
        kinds = ["dies", "dies in stage", "dies in commit", "stays dirty", "hangs", "slow"]
        return Fault(
            target="engine",
            kind=chance.choice([*kinds, "loses a bucket"]),
            index=chance.randrange(engines),
            at_s=at_s,
            for_s=chance.uniform(0.1, 60),
            times=times,
        )
    if target == "policy":
        call = chance.choice(["begin", "logprobs", "microbatch", "finish", "abort"])
        kind = chance.choice(["raises", "ranks lost", "done, then raises", "hangs"])
        times = times if kind == "raises" else 1
        return Fault(target="policy", kind=kind, call=call, at_s=at_s, times=times)
    if target == "plane":
        call = chance.choice(["put", "get", "clear"])
        kind = chance.choice(["raises", "done, then raises"]) if call != "get" else "raises"
        return Fault(target="plane", kind=kind, call=call, at_s=at_s, times=times)
    if target == "prompt":
        kind = chance.choice(["poisoned", "fails", "hangs"])
        index, times = chance.randrange(60), chance.choice([1, 2, 99])
        return Fault(target="prompt", kind=kind, index=index, times=times)
    return Fault(target="weights", kind="raises", at_s=at_s, times=times)


def tell(story: Story) -> Teller:
    """Run a story to its end; what does not hold raises."""
    teller = Teller(story)
    log = logging.getLogger("megatron_idempotent.rl.controller")
    log.setLevel(logging.CRITICAL)
    try:
        clock.run(teller.run(), limit_s=story.scenario.limit_s)
    finally:
        log.setLevel(logging.NOTSET)
    return teller


class _LosingWeights(SimulatedWeights):
    """An export that the ranks are lost in."""

    def __init__(self, simulation: Simulation, times: tuple[float, ...]) -> None:
        super().__init__(simulation.scenario.sync.buckets, simulation.faults)
        self._policy = simulation.policy
        self._lost_at = sorted(times)

    def buckets(self, *, bucket_bytes: int) -> Any:
        if self._policy.lost:
            raise RanksLost("the simulated ranks are gone")
        now = asyncio.get_running_loop().time()
        if self._lost_at and self._lost_at[0] <= now:
            del self._lost_at[0]
            self._policy.lose()
            raise RanksLost("an export: a simulated rank died")
        yield from super().buckets(bucket_bytes=bucket_bytes)


class _Rows:
    """A logger: versions, and how often there had been a restore."""

    def __init__(self, simulation: Simulation) -> None:
        self.rows: list[tuple[int, int]] = []
        self._store = simulation.store

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if step:
            self.rows.append((step, self._store.restored))

    def close(self) -> None:
        pass


class Teller:
    """Example: `tell(some_story(random.Random(3))).simulation.policy.updates`."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.simulation = Simulation(story.scenario)
        self.rows = _Rows(self.simulation)
        self.ends: list[str] = []
        self.dropped = False

    async def run(self) -> None:
        simulation, scenario = self.simulation, self.story.scenario
        weights = _LosingWeights(simulation, self.story.lost_in_export)
        faults = [
            asyncio.ensure_future(simulation._bring_about(fault))
            for fault in scenario.faults
            if fault.target == "engine" and fault.kind in ("dies", "hangs", "slow")
        ]
        self._ours = {asyncio.current_task(), *faults}
        legs = [*self.story.legs, *[Leg(steps=scenario.steps)] * MOST_LEGS]
        controller = await self._fresh(weights)
        for leg in legs:
            await self._leg(controller, leg)
            await self._nothing_is_left(controller)
            if not leg.cut and leg.steps == scenario.steps and self.ends[-1] == "there":
                break
            if leg.fresh or self.ends[-1] in ("Stalled", "StepFailed", "InjectedError"):
                controller = await self._fresh(weights, resume=True)
        else:
            raise AssertionError(f"not at its end after {len(legs)} runs: {self.ends}")
        for each in faults:
            each.cancel()
        await asyncio.gather(*faults, return_exceptions=True)
        self._check_end(await controller.ping())

    async def _fresh(self, weights: _LosingWeights, *, resume: bool = False) -> Controller:
        simulation, scenario, story = self.simulation, self.story.scenario, self.story
        self.plane = CountingPlane(simulation.policy, simulation.faults)
        self.fleet = MeasuredFleet(
            simulation.engines,
            source=weights,
            requests=simulation._requests,
            score=simulation._score,
            settings=sync_settings(scenario),
        )
        controller = Controller(
            settings=dataclasses.replace(
                scenario.settings(), drain_s=story.drain_s, abort_s=story.abort_s
            ),
            sampler=scenario.make_sampler(),
            prompts=SimulatedPrompts(),
            generator=self.fleet,
            policy=simulation.policy,
            recipe=simulation.recipe,
            plane=self.plane,
            store=simulation.store,
            loggers=Loggers([self.rows]),  # in the loop: they look at the store
            evaluate=_Evaluation(story) if story.evaluate else None,
        )
        for _ in range(5):
            if not resume:
                break
            try:
                await controller.resume()
                break
            except InjectedError:
                pass  # a put, as often as it is tried again
        return controller

    async def _leg(self, controller: Controller, leg: Leg) -> None:
        running = asyncio.ensure_future(controller.run(leg.steps))
        pinging = asyncio.ensure_future(self._ping(controller))
        cutting = asyncio.ensure_future(self._cut(controller, leg, running))
        self._ours |= {running, pinging, cutting}
        await asyncio.wait({running, pinging}, return_when=asyncio.FIRST_COMPLETED)
        if pinging.done():
            running.cancel()
            pinging.result()
        if leg.cut != "drain" or running.cancelled() or running.exception():
            cutting.cancel()
        pinging.cancel()
        await asyncio.wait({running, pinging, cutting})
        for each in (pinging, cutting):
            if not each.cancelled():
                each.result()
        if running.cancelled():
            self.ends.append("cancelled")
        elif (error := running.exception()) is not None:
            if not isinstance(error, ENDS) and not self._put_failed_in_a_restore(error):
                raise error
            cause: BaseException | None = error
            while cause is not None:
                assert not isinstance(cause, BrokenRule), cause
                assert "BrokenRule" not in str(cause), cause
                cause = cause.__cause__
            faults = self.story.scenario.faults
            hangs = any((each.target, each.kind) == ("policy", "hangs") for each in faults)
            assert hangs or not isinstance(error, Stalled), error
            self.ends.append(type(error).__name__)
        else:
            status = running.result()
            there = status.trainer_version >= leg.steps
            assert there or leg.cut == "drain", status
            assert status.trainer_version == self.simulation.policy.version
            self.ends.append("there" if there else "drained")

    def _put_failed_in_a_restore(self, error: BaseException) -> bool:
        """A checkpoint whose groups cannot be put back, as often as that is tried, ends the run."""
        places = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return isinstance(error, InjectedError) and {"restore", "put_back"} <= set(places)

    async def _cut(self, controller: Controller, leg: Leg, running: asyncio.Task[Status]) -> None:
        if not leg.cut:
            return
        await asyncio.sleep(leg.at_s)
        if leg.cut == "drain":
            await controller.drain()
            return
        running.cancel()
        if leg.cut == "cancel twice":
            await asyncio.sleep(0.05)
            running.cancel()

    async def _ping(self, controller: Controller) -> None:
        while True:
            self._check(await controller.ping())
            await asyncio.sleep(0.7)

    def _check(self, status: Status) -> None:
        counts = status.counts
        gone = counts["trained"] + counts["filtered"] + counts["evicted"]
        assert counts["submitted"] == gone + counts["running"], counts
        scenario = self.story.scenario
        capacity = scenario.settings().checked_capacity(scenario.make_sampler())
        assert min(counts.values()) >= 0
        assert counts["generating"] <= capacity
        assert not scenario.concurrency or counts["generating"] <= scenario.concurrency
        assert counts["leased"] <= scenario.groups_per_step
        window = scenario.make_sampler().max_staleness
        for update in self.simulation.policy.updates:
            assert len(update.group_ids) == scenario.groups_per_step, update
            assert min(update.lags) >= 0, update
            assert window is None or max(update.lags) <= window, update

    async def _nothing_is_left(self, controller: Controller) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        if "cancel twice" not in [leg.cut for leg in self.story.legs]:
            left = [
                task
                for task in asyncio.all_tasks() - self._ours
                if "UpdateAttempt" not in repr(task) and "SimulatedEngine" not in repr(task)
            ]
            assert not left, left
        status = await controller.ping()
        self._check(status)
        self.dropped |= bool(controller._shared.dropped)
        assert status.state == "ended"
        assert status.counts["generating"] == status.counts["leased"] == 0, status
        ready = {held.id for held in controller._shared.buffer.ready}
        owed = controller._stored._owed
        assert set(self.plane._groups) - ready <= owed, (set(self.plane._groups) - ready, owed)
        assert not owed & ready, (owed, ready)

    def _check_end(self, status: Status) -> None:
        simulation, scenario = self.simulation, self.story.scenario
        assert status.trainer_version == simulation.policy.version == scenario.steps
        updates = simulation.policy.updates
        trained = [i for update in updates for i in update.group_ids]
        assert len(set(trained)) == len(trained) == status.counts["trained"]
        rows = self.rows.rows
        for (before, restored), (after, then) in itertools.pairwise(rows):
            assert after == before + 1 or (after <= before + 1 and then > restored), rows
        if scenario.sampler == "in_order" and not self.dropped:
            wanted = (
                i
                for i in range(10**6)
                if not scenario.filtered or uniform(scenario.seed, _FLAT, i) >= scenario.filtered
            )
            assert trained == [next(wanted) for _ in trained], (trained, status.counts)


class _Evaluation:
    def __init__(self, story: Story) -> None:
        self._seconds = story.evaluation_s
        if story.evaluate == "due":
            self.due = lambda version: version % 3 == 0

    async def __call__(self, version: int) -> Mapping[str, float]:
        await asyncio.sleep(self._seconds)
        return {"evaluation/reward": 0.5}
