"""Runs that are drained, cancelled, and go on in the same controller or a fresh one, with faults.

Engines are in memory, and the clock is virtual. What must hold is checked while a run goes on and
at its end, by the policy's books and the weights that drew each token, not by the controller's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
import random
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from memory_engine import MemoryEngine, Source, limits
from toy import ToyPrompts, conserved, run_virtually
from toy_faults import FaultyPlane

from megatron_idempotent.rl.controller import (
    Controller,
    ControllerSettings,
    Fleet,
    PublishFailed,
    RolloutGroup,
    Stalled,
    Status,
    StepFailed,
    StepOutcome,
)
from megatron_idempotent.rl.controller.samplers import configured_sampler
from megatron_idempotent.rl.engines import Request
from megatron_idempotent.rl.metrics.loggers import Loggers
from megatron_idempotent.rl.workers import RanksLost

#: What may end a run; a fresh controller, or the same one, then goes on.
ENDS = (StepFailed, PublishFailed, Stalled, RanksLost)
MOST_LEGS = 25
ENGINE_FAULTS = ("dies", "starts again", "hangs", "slow")
METHODS = ("stage", "pause", "commit", "rollback", "resume")
SETTINGS = {
    "group_timeout_s": 60.0,
    "stall_s": 600.0,
    "checkpoint_every": 3,
    "drain_s": 30.0,
    "abort_s": 20.0,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Goes wrong `times` times from `at_s` on, or with an engine for `for_s` seconds.

    `part` is a call of the policy or the data plane, `export`, `prompt 7`, `engine 1`, or a method
    of one: `engine 1 commit`. Engines and calls raise as `memory_engine.FAULTS` say; a call also
    has `ranks lost`, a prompt is `poisoned`, `fails` or `hangs`.
    """

    part: str
    kind: str = "raises"
    at_s: float = 0.0
    times: int = 1
    for_s: float = 30.0


class InjectedError(RuntimeError):
    """A call failed because a fault was due."""


class BrokenRule(AssertionError):
    """A caller broke a rule of `Policy`, or a group would count twice."""


class Faults:
    """Brings about the faults of calls; `happened` are those that were due."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._left = [fault for fault in faults for _ in range(fault.times)]
        self.happened: list[Fault] = []

    def due(self, part: str) -> str:
        """The kind of the fault that is due in a call; "" for none."""
        now = asyncio.get_running_loop().time()
        for fault in self._left:
            if fault.part == part and fault.at_s <= now:
                self._left.remove(fault)
                self.happened.append(fault)
                return fault.kind
        return ""

    async def around(self, part: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Await a call with its fault."""
        kind = self.due(part)
        if kind == "hangs":
            await asyncio.Event().wait()
        if kind == "raises":
            raise InjectedError(f"{part} fails")
        if kind == "ranks lost":
            raise RanksLost(f"{part}: a rank died")
        result = await call()
        if kind:
            raise InjectedError(f"{part} was carried out, and then it failed")
        return result


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
    faults: tuple[Fault, ...] = ()
    legs: tuple[Leg, ...] = ()
    steps: int = 16
    engines: int = 4
    group_size: int = 4
    groups_per_step: int = 4
    minibatches: int = 1
    sampler: str = "windowed"
    staleness: int = 2
    order: str = "freshest"
    gated: bool = True
    abort_stale: bool = False
    filtered: float = 0.0
    pause_mode: str = "keep"
    save_s: float = 1.0
    evaluate: str = ""
    """Versions that are evaluated: "" none, "all", or "due" for every third."""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def controller_settings(self) -> ControllerSettings:
        return ControllerSettings(
            target_groups=self.groups_per_step * self.minibatches,
            group_size=self.group_size,
            train_global_batch_size=self.groups_per_step * self.group_size,
            **{**SETTINGS, **self.settings},
        )

    def make_sampler(self) -> Any:
        return configured_sampler(
            self.sampler,
            window=self.staleness,
            order=self.order,
            gated=self.gated,
            abort_stale=self.abort_stale,
        )

    def rejects(self, group_id: int) -> bool:
        return random.Random(group_id).random() < self.filtered


def some_story(chance: random.Random) -> Story:
    """Any sampler and sizes, 0–6 faults, and up to four runs one after the other."""
    engines = chance.randint(1, 6)
    sampler = chance.choice(["windowed", "windowed", "strict", "first_ready", "in_order"])
    minibatches = chance.choice([1, 1, 2, 3]) if sampler != "strict" else 1
    groups = chance.choice([1, 2, 4])
    staleness = chance.randint(minibatches - 1, minibatches + 2)
    needed = max((staleness + 1) * groups, minibatches * groups)
    steps = chance.choice([8, 12, 18])
    legs = []
    for _ in range(chance.randrange(4)):
        cut = chance.choice(["", "drain", "drain", "cancel", "cancel twice"])
        done = chance.randint(1, steps)
        at_s = chance.choice([0.0, 0.3, chance.uniform(0, 100)])
        fresh = chance.random() < 0.5
        legs.append(Leg(steps=steps if cut else done, cut=cut, at_s=at_s, fresh=fresh))
    faults = [_fault(chance, engines) for _ in range(chance.randrange(7))]
    if chance.random() < 1 / 3:
        faults.append(Fault(part="export", kind="ranks lost", at_s=chance.uniform(0, 60)))
    per_call = chance.randint(1, groups)
    return Story(
        faults=_survived(faults),
        legs=tuple(legs),
        steps=steps,
        engines=engines,
        group_size=chance.choice([1, 2, 4]),
        groups_per_step=groups,
        minibatches=minibatches,
        sampler=sampler,
        staleness=staleness,
        order=chance.choice(["freshest", "oldest"]),
        gated=chance.random() < 0.7,
        abort_stale=chance.random() < 0.5,
        filtered=chance.choice([0, 0, 0.2]),
        pause_mode=chance.choice(["keep", "abort", "wait"]),
        save_s=chance.choice([0.0, 1.0]),
        evaluate=chance.choice(["", "all", "due"]),
        settings={
            "capacity": chance.choice([0, 0, needed, needed + 3]),
            "concurrency": chance.choice([0, 0, 1, groups]),
            "logprobs": chance.choice(["none", "policy", "both"]),
            "groups_per_call": per_call,
            "min_groups_per_call": chance.randint(1, per_call),
            "checkpoint_every": chance.choice([0, 1, 3]),
            "drain_s": chance.choice([0.2, 5.0, 30.0]),
        },
    )


def _survived(faults: list[Fault]) -> tuple[Fault, ...]:
    """The faults, of which reads fail less often than a checkpoint tries to read its groups.

    One that cannot read them, as often as it tries, ends the run as it should.
    """
    kept, left = [], ControllerSettings(group_size=1).group_attempts - 1
    for fault in faults:
        if fault.part == "get":
            if not left:
                continue
            fault = dataclasses.replace(fault, times=min(fault.times, left))
            left -= fault.times
        kept.append(fault)
    return tuple(kept)


def _fault(chance: random.Random, engines: int) -> Fault:
    # Half of them at the times of the first publishes and steps, the others anywhere.
    at_s = chance.choice([chance.uniform(0, 15), chance.uniform(0, 120)])
    target = chance.choice(["engine", "engine", "policy", "policy", "export", "plane", "prompt"])
    times = chance.choice([1, 1, 2, 5])
    if target == "engine":
        part, kind = f"engine {chance.randrange(engines)}", chance.choice(ENGINE_FAULTS)
        if chance.random() < 0.5:
            part = f"{part} {chance.choice(METHODS)}"
            kind = chance.choice(["raises", "raises in the middle", "done, then raises", "dies"])
        # One that died again and again would be a stall.
        times = 1 if kind == "dies" else times
        return Fault(part=part, kind=kind, at_s=at_s, for_s=chance.uniform(0.1, 60), times=times)
    if target == "policy":
        part = chance.choice(["begin", "logprobs", "microbatch", "finish", "abort"])
        kind = chance.choice(["raises", "ranks lost", "done, then raises", "hangs"])
        times = times if kind == "raises" else 1
        return Fault(part=part, kind=kind, at_s=at_s, times=times)
    if target == "plane":
        part = chance.choice(["put", "get", "clear"])
        kind = chance.choice(["raises", "done, then raises"]) if part != "get" else "raises"
        return Fault(part=part, kind=kind, at_s=at_s, times=times)
    if target == "prompt":
        kind = chance.choice(["poisoned", "fails", "hangs"])
        part = f"prompt {chance.randrange(60)}"
        return Fault(part=part, kind=kind, times=chance.choice([1, 2, 99]))
    return Fault(part="export", at_s=at_s, times=times)


class BookedPolicy:
    """Trains nothing, but keeps books: a group that would count twice is an error.

    `steps` has a mapping for each step in the weights: the staleness of its groups, by id.
    """

    def __init__(self, faults: Faults) -> None:
        self.steps: list[dict[int, int]] = []
        self.lost, self.aborted = False, 0
        self._faults = faults
        self._open = ""
        self._batches: dict[str, Sequence[RolloutGroup]] = {}
        self._finished: dict[str, StepOutcome] = {}

    def restart(self, steps: Sequence[dict[int, int]]) -> None:
        """Be fresh ranks, whose weights have had these steps."""
        self.lost, self.steps = False, list(steps)
        self._open, self._batches, self._finished = "", {}, {}

    async def _call(self, method: str, seconds: float, effect: Callable[[], Any]) -> Any:
        async def call() -> Any:
            await asyncio.sleep(seconds)
            return effect()

        if self.lost:
            raise RanksLost(f"{method}: the ranks are gone; restore them first")
        try:
            return await self._faults.around(method, call)
        except RanksLost:
            self.lost = True
            raise

    async def begin(self, step_id: str) -> None:
        def effect() -> None:
            if self._open not in ("", step_id) or step_id in self._finished:
                raise BrokenRule(f"begin({step_id}) while {self._open!r} is open, or finished")
            self._open = step_id

        await self._call("begin", 0.0, effect)

    async def logprobs(self, batch: Any, which: str) -> None:
        await self._call("logprobs", 0.1, lambda: None)

    async def microbatch(
        self, step_id: str, batch: Sequence[RolloutGroup], *, microbatch_id: str, last: bool
    ) -> None:
        def effect() -> None:
            others = [
                group.id
                for name, groups in self._batches.items()
                for group in groups
                if name != microbatch_id
            ]
            before = {*others, *itertools.chain(*self.steps)}
            if step_id != self._open or before & {group.id for group in batch}:
                raise BrokenRule(f"microbatch of {step_id}: {batch} while {self._open!r} is open")
            self._batches[microbatch_id] = batch

        await self._call("microbatch", 0.3 * len(batch), effect)

    async def finish(self, step_id: str) -> StepOutcome:
        def effect() -> StepOutcome:
            if step_id != self._open:
                raise BrokenRule(f"finish of {step_id} while {self._open!r} is open")
            groups = list(itertools.chain(*self._batches.values()))
            version = len(self.steps)
            self.steps.append({group.id: version - group.oldest_version for group in groups})
            self._open, self._batches = "", {}
            tokens = sum(group.tokens for group in groups)
            self._finished = {step_id: StepOutcome(updated=True, tokens=tokens)}
            return self._finished[step_id]

        if step_id in self._finished:
            return self._finished[step_id]
        return await self._call("finish", 0.5, effect)

    async def abort(self, step_id: str | None = None) -> None:
        def effect() -> None:
            if self._open and step_id in (None, self._open):
                self.aborted += 1
                self._open, self._batches = "", {}

        await self._call("abort", 0.1, effect)


class Weights:
    """The weights that the policy has now."""

    def __init__(self, policy: BookedPolicy, faults: Faults) -> None:
        self._policy, self._faults = policy, faults

    def tensors(self) -> Any:
        return Source(0).tensors()

    def buckets(self, *, bucket_bytes: int) -> Iterator[Any]:
        kind = self._faults.due("export")
        self._policy.lost |= kind == "ranks lost"
        if self._policy.lost:
            raise RanksLost("an export: a rank died")
        for bucket in Source(len(self._policy.steps)).buckets(bucket_bytes=bucket_bytes):
            yield bucket
            if kind:
                raise InjectedError("the export fails")


class BookedStore:
    """Keeps the newest checkpoint in memory, its state as JSON."""

    def __init__(self, policy: BookedPolicy, save_s: float) -> None:
        self.restored = 0
        self._policy, self._save_s = policy, save_s
        self._newest: tuple[list[dict[int, int]], str] = [], "null"

    async def save(self, version: int, state: Mapping[str, Any]) -> None:
        steps = list(self._policy.steps)
        assert len(steps) == version, f"version {version} is saved, and {len(steps)} are trained"
        await asyncio.sleep(self._save_s)
        self._newest = steps, json.dumps(state)

    async def restore(self) -> Any:
        await asyncio.sleep(10)
        self.restored += 1
        self._policy.restart(self._newest[0])
        return json.loads(self._newest[1])


class Recipe:
    def __init__(self, story: Story) -> None:
        self._story = story

    def rejects(self, group: RolloutGroup) -> str:
        return "flat" if self._story.rejects(group.id) else ""

    def inputs(self, groups: Any) -> Any:
        return groups

    def batch(self, groups: Any, inputs: Any, logprobs: Any) -> Any:
        return groups

    def metrics(self, groups: Any, version: int) -> Mapping[str, float]:
        return {}


class Rows:
    """A logger: versions, and how often there had been a restore; the last row."""

    def __init__(self, store: BookedStore) -> None:
        self.rows: list[tuple[int, int]] = []
        self.last: Mapping[str, float] = {}
        self._store = store

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if step:
            self.rows.append((step, self._store.restored))
            self.last = dict(metrics)

    def close(self) -> None:
        pass


class Evaluation:
    def __init__(self, story: Story) -> None:
        if story.evaluate == "due":
            self.due = lambda version: version % 3 == 0

    async def __call__(self, version: int) -> Mapping[str, float]:
        await asyncio.sleep(1.0)
        return {"evaluation/reward": 0.5}


def _now() -> float:
    return asyncio.get_running_loop().time()


def tell(story: Story) -> Teller:
    """Run a story to its end; what does not hold raises."""
    log = logging.getLogger("megatron_idempotent.rl.controller")
    log.setLevel(logging.CRITICAL)
    try:
        teller = Teller(story)
        run_virtually(teller.run(), limit_s=3e5)
    finally:
        log.setLevel(logging.NOTSET)
    return teller


class Teller:
    """Example: `tell(some_story(random.Random(3))).policy.steps`."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.faults = Faults(story.faults)
        self.policy = BookedPolicy(self.faults)
        self.store = BookedStore(self.policy, story.save_s)
        self.rows = Rows(self.store)
        self.engines = [
            MemoryEngine(f"engine-{index}", token_s=0.3, bucket_s=0.1, length=self._length)
            for index in range(story.engines)
        ]
        self.wrong: list[Any] = []
        """Samples that were drawn with other weights than they say, or with half of two."""
        self.ends: list[str] = []
        self.dropped = False

    def _length(self, request: Request) -> float:
        group_id, _, _ = request.id.partition("/")
        kind = "" if request.continued else self.faults.due(f"prompt {group_id}")
        if kind == "poisoned":
            raise ValueError(f"prompt {group_id} is poisoned")
        if kind == "fails":
            raise RuntimeError(f"prompt {group_id} fails")
        if kind == "hangs":
            return 10**6
        return min(round(random.Random(request.id).lognormvariate(2.5, 0.7)) + 1, 90)

    async def run(self) -> None:
        story = self.story
        others = [asyncio.ensure_future(self._bring_about(fault)) for fault in story.faults]
        others.append(asyncio.ensure_future(self._start_dead_engines()))
        self._ours = {asyncio.current_task(), *others}
        legs = [*story.legs, *[Leg(steps=story.steps)] * MOST_LEGS]
        controller = await self._fresh()
        for leg in legs:
            await self._leg(controller, leg)
            await self._nothing_is_left(controller)
            if not leg.cut and leg.steps == story.steps and self.ends[-1] == "there":
                break
            if leg.fresh or self.ends[-1] in ("Stalled", "StepFailed", "InjectedError"):
                controller = await self._fresh(resume=True)
        else:
            raise AssertionError(f"not at its end after {len(legs)} runs: {self.ends}")
        self.ended_s = _now()
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self.status = await controller.ping()
        self._check_end(self.status)

    async def _bring_about(self, fault: Fault) -> None:
        """Bring about what happens to an engine; other parts ask for their faults."""
        target, _, place = fault.part.partition(" ")
        if target != "engine":
            return
        index, _, method = place.partition(" ")
        engine = self.engines[int(index)]
        await asyncio.sleep(fault.at_s)
        self.faults.happened.append(fault)
        if method:
            engine.faults.setdefault(method, []).extend([fault.kind] * fault.times)
        elif fault.kind == "dies":
            engine.dead = True
        elif fault.kind == "starts again":
            engine.start()
        else:
            engine.token_s *= 1e5 if fault.kind == "hangs" else 5
        await asyncio.sleep(fault.for_s)
        engine.token_s = 0.3
        if engine.dead:
            engine.start()

    async def _start_dead_engines(self) -> None:
        while True:
            await asyncio.sleep(60)
            for engine in self.engines:
                if engine.dead:
                    engine.start()

    async def _fresh(self, *, resume: bool = False) -> Controller:
        story = self.story
        around = self.faults.around
        self.plane = FaultyPlane(
            put=lambda real, group: around("put", lambda: real(group)),
            get=lambda real, group_id: around("get", lambda: real(group_id)),
            clear=lambda real, ids: around("clear", lambda: real(ids)),
        )

        async def score(group_id: int, prompt: Any, samples: Sequence[Any]) -> list[float]:
            self.wrong += [sample for sample in samples if sample.versions != sample.logprobs]
            return [0.0] * len(samples)

        def requests(group_id: int, prompt: Any) -> list[Request]:
            ids = [f"{group_id}/{place}" for place in range(story.group_size)]
            return [Request(id=name, prompt=(1,), max_tokens=10**6) for name in ids]

        self.fleet = Fleet(
            self.engines,
            source=Weights(self.policy, self.faults),
            requests=requests,
            score=score,
            settings=dataclasses.replace(limits(20.0), pause_mode=story.pause_mode),
        )
        controller = Controller(
            settings=story.controller_settings(),
            sampler=story.make_sampler(),
            prompts=ToyPrompts(),
            generator=self.fleet,
            policy=self.policy,
            recipe=Recipe(story),
            plane=self.plane,
            store=self.store,
            loggers=Loggers([self.rows]),  # in the loop: they look at the store
            evaluate=Evaluation(story) if story.evaluate else None,
        )
        for _ in range(5 if resume else 0):
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
        for task in (pinging, cutting):
            if not task.cancelled():
                task.result()
        if running.cancelled():
            self.ends.append("cancelled")
        elif (error := running.exception()) is not None:
            if not isinstance(error, ENDS) and not self._put_failed_in_a_restore(error):
                raise error
            cause: BaseException | None = error
            while cause is not None:
                assert not isinstance(cause, AssertionError), cause
                assert "BrokenRule" not in str(cause), cause
                cause = cause.__cause__
            hangs = any(
                fault.kind == "hangs" and " " not in fault.part for fault in self.story.faults
            )
            assert hangs or not isinstance(error, Stalled), error
            self.ends.append(type(error).__name__)
        else:
            status = running.result()
            there = status.trainer_version >= leg.steps
            assert there or leg.cut == "drain", status
            assert status.trainer_version == len(self.policy.steps)
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
        counts, story = status.counts, self.story
        assert not self.wrong
        assert conserved(status), counts
        settings, sampler = story.controller_settings(), story.make_sampler()
        assert min(counts.values()) >= 0
        assert counts["generating"] <= settings.checked_capacity(sampler)
        assert not settings.concurrency or counts["generating"] <= settings.concurrency
        assert counts["leased"] <= story.groups_per_step
        window = sampler.max_staleness
        for step in self.policy.steps:
            assert len(step) == story.groups_per_step, step
            assert min(step.values()) >= 0, step
            assert window is None or max(step.values()) <= window, step

    async def _nothing_is_left(self, controller: Controller) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        if "cancel twice" not in [leg.cut for leg in self.story.legs]:
            left = [
                task
                for task in asyncio.all_tasks() - self._ours
                if "UpdateAttempt" not in repr(task) and "MemoryEngine" not in repr(task)
            ]
            assert not left, left
        status = await controller.ping()
        self._check(status)
        self.dropped |= bool(controller._shared.dropped)
        assert status.state == "ended"
        assert status.counts["generating"] == status.counts["leased"] == 0, status
        ready = {group.id for group in controller._shared.buffer.ready}
        owed = controller._stored._owed
        assert set(self.plane._groups) - ready <= owed, (set(self.plane._groups) - ready, owed)
        assert not owed & ready, (owed, ready)

    def _check_end(self, status: Status) -> None:
        story, steps = self.story, self.policy.steps
        assert status.trainer_version == len(steps) == story.steps
        trained = [group_id for step in steps for group_id in step]
        assert len(set(trained)) == len(trained) == status.counts["trained"]
        rows = self.rows.rows
        for (before, restored), (after, then) in itertools.pairwise(rows):
            assert after == before + 1 or (after <= before + 1 and then > restored), rows
        if story.sampler == "in_order" and not self.dropped:
            in_order = (number for number in itertools.count() if not story.rejects(number))
            assert trained == list(itertools.islice(in_order, len(trained))), status.counts
