"""Runs one scenario on the virtual clock, with the same controller that trains real models.

Its results are a `SimulationReport`, and a table shows several.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_idempotent.patching.table import render
from megatron_idempotent.rl.controller import Controller, Fleet
from megatron_idempotent.rl.controller.protocol import Status
from megatron_idempotent.rl.engines import Request, Sample
from megatron_idempotent.rl.metrics.loggers import Loggers
from megatron_idempotent.rl.sync import SyncSettings

from . import clock
from .engine import SimulatedEngine
from .faults import Fault, Faults
from .latency import uniform
from .scenario import Scenario
from .trainer import (
    CountingPlane,
    MemoryStore,
    Recorder,
    SimulatedPolicy,
    SimulatedPrompts,
    SimulatedRecipe,
    SimulatedWeights,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """Holds the results of one simulated run. Seconds are virtual, except for `cpu_s`.

    Example: `simulate(scenario).overlap_efficiency`.
    """

    steps: int
    """Optimizer steps that are in the weights at the end."""
    measured_s: float
    """Seconds that the whole run took, from the first publish to the end of the last step."""
    generate_s: float
    """A lower bound on the seconds that the engines need for all tokens they drew, if they wait for
    nothing: tokens ÷ (engines x tokens/s of one engine). An engine's tokens/s are those with its
    equal share of the most requests that capacity and concurrency admit, or with its slots if they
    are fewer. They are concave in the requests, so that no other split is faster."""
    train_s: float
    """Seconds in which the trainer computed, steps that were undone included."""
    pause_s: float
    """Seconds in which engines were paused for new weights."""
    sync_s: float
    """Seconds of all publishes, from staging to resuming; engines serve except in `pause_s`."""
    generated_tokens: float
    """Tokens that all engines drew."""
    trained_tokens: int
    """Tokens of the groups that are in the weights."""
    evicted_tokens: int
    """Tokens of complete groups that were cleared without being trained."""
    filtered_tokens: int
    """Tokens of groups that the recipe rejected."""
    lost_tokens: float
    """Tokens of requests without an answer: an engine died, their group was aborted, or the run
    ended."""
    engine_idle: float
    """Share of all engines' seconds in which an engine drew no token."""
    trainer_idle: float
    """Share of the seconds in which the trainer did not compute."""
    staleness: Mapping[int, int]
    """The number of trained groups, by the versions between the oldest weights of their tokens and
    the weights that they trained."""
    counts: Mapping[str, int]
    """The controller's `Counts`, by name."""
    conserved: bool
    """True if `counts` add up, and each trained group is in the weights exactly once."""
    left_over: int
    """Groups in the data plane at the end, minus those that are ready; 0 unless groups leak."""
    dropped: Mapping[str, float]
    """Groups that could not be generated or stored, and calls that were tried again, by the name of
    the metric; none that are 0."""
    restores: int
    """Restores of lost ranks from a checkpoint."""
    faults: tuple[tuple[float, str], ...]
    """Second and description of each fault that happened."""
    step_ends_s: tuple[float, ...]
    """Seconds at which a logger got each optimizer step's row."""
    cpu_s: float
    """Processor seconds of the whole simulation: controller, engines and clock."""

    @property
    def overlap_efficiency(self) -> float:
        """max(`generate_s`, `train_s` + `pause_s`) ÷ `measured_s`.

        It is 1 if the longer of generation and training hides the other one.
        """
        return max(self.generate_s, self.train_s + self.pause_s) / self.measured_s

    @property
    def useful_efficiency(self) -> float:
        """`overlap_efficiency` without the share of `generate_s` for evicted and lost tokens."""
        spent = self.evicted_tokens + self.lost_tokens
        useful = 1 - spent / self.generated_tokens if self.generated_tokens else 1.0
        return max(self.generate_s * useful, self.train_s + self.pause_s) / self.measured_s

    @property
    def wasted(self) -> float:
        """The share of all generated tokens that were evicted."""
        return self.evicted_tokens / self.generated_tokens if self.generated_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """The tokens that were trained, per virtual second."""
        return self.trained_tokens / self.measured_s

    @property
    def mean_staleness(self) -> float:
        """The staleness in versions, averaged over the groups that were trained."""
        groups = sum(self.staleness.values())
        return sum(lag * count for lag, count in self.staleness.items()) / max(groups, 1)

    @property
    def cpu_ms_per_group(self) -> float:
        """The processor milliseconds of the simulation, per group that was submitted."""
        return 1e3 * self.cpu_s / max(self.counts["submitted"], 1)

    def summary(self) -> dict[str, Any]:
        """Return all fields and properties by name, for JSON."""
        found = dataclasses.asdict(self)
        found["staleness"] = {str(lag): count for lag, count in self.staleness.items()}
        derived = (name for name, each in vars(type(self)).items() if isinstance(each, property))
        return found | {name: getattr(self, name) for name in derived}


ROWS: tuple[tuple[str, Callable[[SimulationReport], str]], ...] = (
    ("optimizer steps", lambda r: str(r.steps)),
    ("measured", lambda r: f"{r.measured_s:.0f} s"),
    ("generation alone", lambda r: f"{r.generate_s:.0f} s"),
    ("training", lambda r: f"{r.train_s:.0f} s"),
    ("weight syncs", lambda r: f"{r.sync_s:.0f} s"),
    ("of them paused", lambda r: f"{r.pause_s:.0f} s"),
    ("overlap efficiency", lambda r: f"{r.overlap_efficiency:.3f}"),
    ("without wasted tokens", lambda r: f"{r.useful_efficiency:.3f}"),
    ("trained tokens/s", lambda r: f"{r.tokens_per_s:.0f}"),
    ("engines idle", lambda r: f"{r.engine_idle:.1%}"),
    ("trainer idle", lambda r: f"{r.trainer_idle:.1%}"),
    ("staleness, mean", lambda r: f"{r.mean_staleness:.2f}"),
    ("staleness, most", lambda r: str(max(r.staleness, default=0))),
    ("wasted tokens", lambda r: f"{r.wasted:.2%}"),
    ("groups submitted", lambda r: str(r.counts["submitted"])),
    ("trained", lambda r: str(r.counts["trained"])),
    ("filtered", lambda r: str(r.counts["filtered"])),
    ("evicted", lambda r: str(r.counts["evicted"])),
    ("of them aborted", lambda r: str(r.counts["aborted"])),
    ("running", lambda r: str(r.counts["running"])),
    ("conserved", lambda r: "yes" if r.conserved else "NO"),
    ("faults, restores", lambda r: f"{len(r.faults)}, {r.restores}"),
    ("cpu per group", lambda r: f"{r.cpu_ms_per_group:.2f} ms"),
)
"""The rows of the table: each one's name, and a function that formats its value."""


def print_table(reports: Sequence[tuple[str, SimulationReport]]) -> None:
    """Print a table with a column per report, by label."""
    columns = [[label, *(show(report) for _, show in ROWS)] for label, report in reports]
    aligned = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    print(render((), [*zip(("", *(name for name, _ in ROWS)), *aligned, strict=True)]))


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
        tokens = sum(engine.serving.tokens for engine in self.engines)
        share = scenario.most_requests() / scenario.engines
        rate = scenario.engines * scenario.engine.tokens_per_s(share)
        busy_s = sum(engine.serving.busy_s for engine in self.engines)
        dropped = {
            name: value
            for name, value in self.recorder.last.items()
            if ("dropped" in name or "retries" in name) and value
        }
        lags = Counter(lag for update in self.policy.updates for lag in update.lags)
        counts = self.status.counts
        gone = counts["trained"] + counts["filtered"] + counts["evicted"]
        trained = [group_id for update in self.policy.updates for group_id in update.group_ids]
        once = len(set(trained)) == len(trained) == counts["trained"]
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
            counts=dict(counts),
            conserved=once and counts["submitted"] == gone + counts["running"],
            left_over=len(self.plane) - counts["ready"],
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
            fault = self.faults.due("prompt", index=group_id)
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
