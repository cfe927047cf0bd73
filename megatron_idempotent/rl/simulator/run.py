"""Runs one scenario on the virtual clock, with the same controller that trains real models."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.rl.controller import Controller, Fleet
from megatron_idempotent.rl.controller.protocol import Status
from megatron_idempotent.rl.engines import Request, Sample
from megatron_idempotent.rl.metrics.loggers import Loggers
from megatron_idempotent.rl.sync import SyncSettings

from . import clock
from .engine import SimulatedEngine
from .faults import Fault, Faults
from .latency import uniform
from .report import SimulationReport
from .scenario import Scenario
from .trainer import (
    CountingPlane,
    MemoryStore,
    Recorder,
    SimulatedPolicy,
    SimulatedPrompts,
    SimulatedRecipe,
    SimulatedStep,
    SimulatedWeights,
)


class MeasuredFleet(Fleet):
    """Measures the seconds of publishes and of pauses. Example: `fleet.pause_s / fleet.sync_s`."""

    pause_s = 0.0
    """Virtual seconds in which engines were paused."""
    sync_s = 0.0
    """Virtual seconds of all publishes, failed ones included."""

    async def publish(self, version: int) -> Mapping[str, float]:
        """Publish weights and add up the seconds; see `Generator.publish`."""
        started = asyncio.get_running_loop().time()
        try:
            metrics = await super().publish(version)
        finally:
            self.sync_s += asyncio.get_running_loop().time() - started
        self.pause_s += metrics["pause_s"]
        return metrics


def sync_settings(scenario: Scenario) -> SyncSettings:
    """Return a scenario's settings of weight syncs; those that it lacks keep their defaults."""
    costs = dataclasses.asdict(scenario.sync)
    del costs["buckets"]
    return SyncSettings(**costs)


#: Streams of random numbers.
_LENGTH, _HARDNESS, _REWARD = 1, 2, 3

Hook = Callable[["Simulation"], Any]
"""A coroutine function that gets the simulation and runs beside its controller."""


def simulate(scenario: Scenario, *, beside: Hook | None = None) -> SimulationReport:
    """Run a scenario to its end on a virtual clock; return the results.

    Args:
        scenario: what is simulated.
        beside: runs with the controller, such as to ping it; its errors end the simulation.

    Errors: what the controller raises; `clock.Deadlock`; `clock.TooLong`.
    """
    simulation = Simulation(scenario)
    started = time.process_time()
    # Thousands of warnings about faults that were asked for are of no use.
    logging.getLogger("megatron_idempotent.rl.controller").setLevel(logging.CRITICAL)
    try:
        clock.run(simulation.run(beside), limit_s=scenario.limit_s)
    finally:
        logging.getLogger("megatron_idempotent.rl.controller").setLevel(logging.NOTSET)
    return simulation.report(time.process_time() - started)


class Simulation:
    """Holds all parts of a simulated run, to look at them; `simulate` is enough for results.

    Example: `simulation = Simulation(scenario); clock.run(simulation.run())`.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.faults = Faults(scenario.faults)
        self.policy = SimulatedPolicy(
            scenario.train, tokens_per_entry=scenario.tokens_per_entry, faults=self.faults
        )
        self.engines = [
            SimulatedEngine(
                f"engine-{index}",
                costs=scenario.engine,
                length=self._length,
                tokens_per_entry=scenario.tokens_per_entry,
                faults=self.faults,
                index=index,
            )
            for index in range(scenario.engines)
        ]
        self.recipe = SimulatedRecipe(seed=scenario.seed, filtered=scenario.filtered)
        self.plane = CountingPlane(self.policy, self.faults)
        self.store = MemoryStore(self.policy)
        self.recorder = Recorder()
        self.fleet = MeasuredFleet(
            self.engines,
            source=SimulatedWeights(scenario.sync.buckets, self.faults),
            requests=self._requests,
            score=self._score,
            settings=sync_settings(scenario),
        )
        self.controller = Controller(
            settings=scenario.settings(),
            sampler=scenario.make_sampler(),
            prompts=SimulatedPrompts(scenario.prompts),
            generator=self.fleet,
            policy=self.policy,
            recipe=self.recipe,
            plane=self.plane,
            store=self.store,
            # In the loop: it looks at its clock, and a thread would come at any time of it.
            loggers=Loggers([self.recorder]),
        )
        self.status: Status | None = None
        self.ended_s = 0.0

    async def run(self, beside: Hook | None = None) -> None:
        """Run the scenario to its end; it must be called in a `VirtualLoop`.

        `beside` runs with the controller. Errors: those of `beside` and of the controller.
        """
        loop = asyncio.get_running_loop()
        others: list[asyncio.Task[Any]] = [
            asyncio.ensure_future(self._bring_about(fault))
            for fault in self.scenario.faults
            if fault.target == "engine" and fault.kind in ("dies", "hangs", "slow")
        ]
        if beside is not None:
            others.append(asyncio.ensure_future(beside(self)))
        main = asyncio.ensure_future(self.controller.run(self.scenario.steps))
        try:
            while not main.done():
                for ended in [each for each in others if each.done()]:
                    others.remove(ended)
                    ended.result()
                await asyncio.wait({main, *others}, return_when=asyncio.FIRST_COMPLETED)
            self.status = await main
        finally:
            self.ended_s = loop.time()
            for each in (main, *others):
                each.cancel()
            await asyncio.gather(main, *others, return_exceptions=True)
            # What is under way on engines is theirs.
            await self.fleet.close()

    def report(self, cpu_s: float) -> SimulationReport:
        """Return the results of a run that has ended; `cpu_s` are its processor seconds."""
        assert self.status is not None, "run() has not come to its end"
        scenario, per_entry = self.scenario, self.scenario.tokens_per_entry
        tokens = sum(engine.serving.sharing.tokens for engine in self.engines)
        share = scenario.most_requests() / scenario.engines
        rate = scenario.engines * scenario.engine.tokens_per_s(share)
        busy_s = sum(engine.serving.sharing.busy_s for engine in self.engines)
        dropped = {
            name: value
            for name, value in self.recorder.last.items()
            if ("dropped" in name or "retries" in name) and value
        }
        lags = Counter(lag for update in self.policy.updates for lag in update.lags)
        return SimulationReport(
            steps=self.policy.version,
            measured_s=self.ended_s,
            generate_s=tokens / rate,
            train_s=self.policy.busy_s,
            pause_s=self.fleet.pause_s,
            sync_s=self.fleet.sync_s,
            generated_tokens=tokens,
            trained_tokens=sum(each.entries for each in self.policy.updates) * per_entry,
            evicted_tokens=self.plane.evicted_entries * per_entry,
            filtered_tokens=self.recipe.filtered_entries * per_entry,
            lost_tokens=sum(engine.serving.lost_tokens for engine in self.engines),
            engine_idle=1 - busy_s / (scenario.engines * self.ended_s),
            trainer_idle=1 - self.policy.busy_s / self.ended_s,
            staleness=dict(sorted(lags.items())),
            counts=dict(self.status.counts),
            conserved=_conserved(self.status.counts, self.policy.updates),
            left_over=len(self.plane) - self.status.counts["ready"],
            dropped=dropped,
            restores=self.store.restored,
            faults=tuple((at, fault.described()) for at, fault in self.faults.happened),
            step_ends_s=tuple(self.recorder.ends_s),
            cpu_s=cpu_s,
        )

    def _requests(self, group_id: int, prompt: Any) -> Sequence[Request]:
        size = self.scenario.group_size
        return [
            Request(
                id=f"{group_id}/{place}",
                prompt=(1,),
                max_tokens=self.scenario.most_entries(),
                seed=group_id * size + place,
            )
            for place in range(size)
        ]

    def _length(self, request: Request) -> float:
        scenario = self.scenario
        assert request.seed is not None
        group_id = request.seed // scenario.group_size
        if scenario.faults and not request.continued:
            fault = self.faults.due("prompt", asyncio.get_running_loop().time(), index=group_id)
            if fault is not None and fault.kind == "poisoned":
                raise ValueError(f"prompt {group_id} is poisoned by a fault of the scenario")
            if fault is not None and fault.kind == "fails":
                raise RuntimeError(f"prompt {group_id} fails by a fault of the scenario")
            if fault is not None:
                return math.inf
        length = scenario.length.quantile(uniform(scenario.seed, _LENGTH, request.seed))
        factor = scenario.hardness.quantile(uniform(scenario.seed, _HARDNESS, group_id))
        return min(length * factor, scenario.most_tokens)

    async def _score(
        self, group_id: int, prompt: Any, samples: Sequence[Sample]
    ) -> Sequence[float]:
        return [
            float(uniform(self.scenario.seed, _REWARD, group_id, place) < 0.5)
            for place in range(len(samples))
        ]

    async def _bring_about(self, fault: Fault) -> None:
        engine, loop = self.engines[fault.index], asyncio.get_running_loop()
        await asyncio.sleep(fault.at_s - loop.time())
        self.faults.happened.append((loop.time(), fault))
        if fault.kind == "dies":
            engine.die()
        else:
            engine.run_at(0.0 if fault.kind == "hangs" else fault.factor)
        if fault.for_s:
            await asyncio.sleep(fault.for_s)
            engine.come_back()
            engine.run_at(1.0)


def _conserved(counts: Mapping[str, int], updates: Sequence[SimulatedStep]) -> bool:
    gone = counts["trained"] + counts["filtered"] + counts["evicted"]
    trained = [group_id for update in updates for group_id in update.group_ids]
    once = len(set(trained)) == len(trained) == counts["trained"]
    return once and counts["submitted"] == gone + counts["running"]
