"""Measures which staleness suits how many engines: the controller runs 8 to 1,024 in virtual time.

    python -m benchmarks.async_staleness [--engines 8,32,128,1024] [--staleness 0,1,2,4,8]
                                         [--steps 20] [--json]

Controller, sampler, fleet, pool and weight sync are the package's own. Engines and trainer are
simulated: they sleep in virtual time and compute nothing. All runs have the same job:

- optimizer steps of 128 groups of 4 responses; lengths have a median of 500 tokens, and one in a
  hundred has more than 2,500;
- a trainer that needs 20 s for a step, and a publish of 2 s, followed by a pause of the engines of
  0.5 s;
- engines that run up to 64 requests at once, and sample a token for each of n requests in
  10 + n / 2 ms;
- the sampler `windowed` with `order=oldest` and `abort_stale=true`.

A cell of the table has three numbers: the fraction of the time in which the trainer trains, the
tokens of evicted groups ÷ those of all trained or evicted groups, and the mean staleness of trained
groups. They cover the steps after the window is full.

The sum of the staleness of all trained groups must equal its closed form exactly. The controller
keeps the groups of window + 1 steps in the system, so the groups of `window` steps remain after
each step, and each becomes one version older. By Little's law, this sum over steps equals the sum
of the versions that all groups wait. So the sum of the trained groups' staleness is

    window x trained groups
    - the versions that other groups waited: window + 1 until they were evicted, fewer at the end
    + the groups that started between a step and its publish, with weights one version old
    - the versions for which groups waited in a full engine, before any of their tokens was sampled

In long runs, with engines that are never full, the mean is window x (1 - evicted ÷ trained).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import _virtual_clock
from benchmarks._record import options, tell
from megatron_idempotent.rl.controller import (
    Controller,
    ControllerSettings,
    Fleet,
    RolloutGroup,
    StepOutcome,
    WindowedSampler,
)
from megatron_idempotent.rl.engines import EngineHealth, PauseMode, Request, Sample
from megatron_idempotent.rl.weights import Bucket, WeightUpdate

GROUPS, SAMPLES = 128, 4
MEDIAN_TOKENS, P99_TOKENS, MOST_TOKENS = 500, 2500, 8192
STEP_S, STAGE_S, COMMIT_S = 20.0, 2.0, 0.5
SLOTS, TOKEN_S, REQUEST_S = 64, 0.01, 0.0005
#: The number of tokens per simulated sleep, whose length depends on the engine's load at its start.
PIECE = 128
_SIGMA = math.log(P99_TOKENS / MEDIAN_TOKENS) / 2.3263478740408408  # of the normal distribution


@functools.cache
def lengths(group_id: int) -> tuple[int, ...]:
    """Return the number of tokens of each response of a group, drawn from the group's id, so that
    all runs have the same lengths.
    """
    rng = random.Random(group_id)
    drawn = (rng.lognormvariate(math.log(MEDIAN_TOKENS), _SIGMA) for _ in range(SAMPLES))
    return tuple(min(round(length) + 1, MOST_TOKENS) for length in drawn)


def requests(group_id: int, prompt: Any) -> list[Request]:
    """Return a group's requests, whose `max_tokens` are the lengths of their responses."""
    return [
        Request(id=f"{group_id}/{place}", prompt=(1,), max_tokens=length)
        for place, length in enumerate(lengths(group_id))
    ]


async def score(group_id: int, prompt: Any, samples: Sequence[Sample]) -> list[float]:
    """Return a reward of 0 for each sample, because the trainer does not use rewards."""
    return [0.0] * len(samples)


class Engine:
    """Simulates an engine: implements `RolloutEngine` in virtual time, without a model.

    A sample has one entry for each piece of up to `PIECE` tokens.
    """

    def __init__(self, name: str, drawn: Counter[int]) -> None:
        """Take the engine's name, and the counter of sampled tokens by group id, which all engines
        share and add to.
        """
        self.name = name
        self._drawn = drawn
        self._version = self._staged = self._running = 0
        self._slots = asyncio.Semaphore(SLOTS)
        self._serving = asyncio.Event()
        self._serving.set()

    async def generate(self, request: Request) -> Sample:
        group_id = int(request.id.partition("/")[0])
        left, versions = request.max_tokens, []
        async with self._slots:
            self._running += 1
            try:
                while left:
                    await self._serving.wait()
                    versions.append(self._version)
                    tokens = min(left, PIECE)
                    await asyncio.sleep(tokens * (TOKEN_S + REQUEST_S * self._running))
                    self._drawn[group_id] += tokens
                    left -= tokens
            finally:
                self._running -= 1
        entries = len(versions)
        return Sample(
            request_id=request.id,
            tokens=(0,) * entries,
            logprobs=(0.0,) * entries,
            versions=tuple(versions),
            finish_reason="stop",
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._serving.clear()

    async def resume(self) -> None:
        self._serving.set()

    async def stage(self, update: WeightUpdate, buckets: AsyncIterator[Bucket]) -> None:
        async for _ in buckets:
            await asyncio.sleep(STAGE_S)
        self._staged = update.version

    async def commit(self, update_id: str) -> int:
        await asyncio.sleep(COMMIT_S)
        self._version = self._staged
        return self._version

    async def rollback(self, update_id: str) -> None:
        self._staged = self._version

    async def health(self) -> EngineHealth:
        status = "SERVING" if self._serving.is_set() else "PAUSED"
        return EngineHealth(status=status, version=self._version, running=self._running)

    async def close(self) -> None:
        self._serving.clear()


class Weights:
    """Implements `WeightSource` for simulated engines: yields one bucket that has no tensors."""

    def tensors(self) -> tuple[()]:
        return ()

    def buckets(self, *, bucket_bytes: int) -> Iterator[Bucket]:
        yield Bucket(index=0, tensors={}, checksums={})


class Trainer:
    """Implements the controller's `Policy`, `Recipe` and `Prompts`; sleeps in virtual time instead
    of training.
    """

    def __init__(self) -> None:
        self.oldest: list[dict[int, int]] = []
        """A mapping per step: from a group's id to the oldest version that sampled the group."""
        self.ends_s: list[float] = []
        self._open: dict[int, int] = {}

    async def begin(self, step_id: str) -> None:
        self._open = {}

    async def microbatch(
        self, step_id: str, batch: Sequence[RolloutGroup], *, microbatch_id: str, last: bool
    ) -> None:
        await asyncio.sleep(STEP_S / GROUPS * len(batch))
        self._open |= {group.id: group.oldest_version for group in batch}

    async def finish(self, step_id: str) -> StepOutcome:
        self.oldest.append(self._open)
        self.ends_s.append(asyncio.get_running_loop().time())
        return StepOutcome(updated=True, tokens=sum(map(sum, map(lengths, self._open))))

    async def abort(self, step_id: str | None = None) -> None:
        self._open = {}

    async def logprobs(self, batch: Any, which: str) -> None:
        raise NotImplementedError("the settings ask for none")

    def rejects(self, group: RolloutGroup) -> str:
        return ""

    def inputs(self, groups: Sequence[RolloutGroup]) -> Sequence[RolloutGroup]:
        return groups

    def batch(
        self, groups: Sequence[RolloutGroup], inputs: Any, logprobs: Any
    ) -> Sequence[RolloutGroup]:
        return groups

    def metrics(self, groups: Any, version: int) -> Mapping[str, float]:
        return {}

    def prompt(self, index: int) -> int:
        return index

    def epoch(self, index: int) -> int:
        return 0


class WatchedFleet(Fleet):
    """A `Fleet` that records, whenever a group starts, the trainer's weight version and the version
    published to the engines.
    """

    def __init__(self, trainer: Trainer, engines: Sequence[Engine]) -> None:
        super().__init__(engines, source=Weights(), requests=requests, score=score)
        self.starts: dict[int, tuple[int, int]] = {}
        self._trainer = trainer
        self._published = 0

    async def generate(self, group_id: int, prompt: Any, *, attempt: int) -> RolloutGroup:
        self.starts[group_id] = len(self._trainer.oldest), self._published
        return await super().generate(group_id, prompt, attempt=attempt)

    async def publish(self, version: int) -> Mapping[str, float]:
        metrics = await super().publish(version)
        self._published = version
        return metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """The results of one simulated run. `busy`, `thrown_away` and `staleness` leave out the first
    steps, in which weights cannot be as stale as allowed; the two sums are over all steps.
    """

    busy: float
    """Seconds in which the trainer trained ÷ all seconds."""
    thrown_away: float
    """Tokens of evicted groups ÷ tokens of trained and evicted ones."""
    staleness: float
    """The mean over trained groups of: version before the step - oldest version that sampled."""
    sum_of_staleness: int
    closed_form: int

    def __str__(self) -> str:
        return f"{self.busy:.0%} · {self.thrown_away:.0%} · {self.staleness:.1f}"


def measure(engines: int, window: int, steps: int) -> Cell:
    """Simulate a run of `steps` optimizer steps with `engines` engines and a staleness of up to
    `window` versions; return its results.

    Raises:
        ValueError: `steps` is too small for a measurement after the window is full.
        AssertionError: groups were lost, or staleness differs from its closed form.
    """
    if steps < window + 3:
        raise ValueError(f"--steps is {steps}; a staleness of {window} takes {window + 3} or more")
    drawn: Counter[int] = Counter()
    trainer = Trainer()

    async def main() -> tuple[WatchedFleet, Mapping[str, int]]:
        fleet = WatchedFleet(trainer, [Engine(str(index), drawn) for index in range(engines)])
        controller = Controller(
            settings=ControllerSettings(
                target_groups=GROUPS,
                group_size=SAMPLES,
                groups_per_call=1,
                group_timeout_s=1e5,
                stall_s=1e6,
            ),
            sampler=WindowedSampler(window, "oldest", abort_stale=True),
            prompts=trainer,
            generator=fleet,
            policy=trainer,
            recipe=trainer,
        )
        return fleet, (await controller.run(steps)).counts

    fleet, counts = _virtual_clock.run(main())
    oldest = {group_id: version for step in trainer.oldest for group_id, version in step.items()}
    assert len(oldest) == counts["trained"] == GROUPS * steps, counts
    others = {group_id: start for group_id, start in fleet.starts.items() if group_id not in oldest}
    staleness = [
        [version - first for first in step.values()] for version, step in enumerate(trainer.oldest)
    ]
    full = window + 1  # the first step with a full window
    used = sum(drawn[group_id] for step in trainer.oldest[full:] for group_id in step)
    evicted = sum(
        drawn[group_id]
        for group_id, (_, published) in others.items()
        if full < published + full <= steps
    )
    cell = Cell(
        busy=(steps - full) * STEP_S / (trainer.ends_s[-1] - trainer.ends_s[full - 1]),
        thrown_away=evicted / (used + evicted),
        staleness=sum(map(sum, staleness[full:])) / (steps - full) / GROUPS,
        sum_of_staleness=sum(map(sum, staleness)),
        closed_form=window * GROUPS * steps
        - sum(min(steps - published, full) for _, published in others.values())
        + sum(trained - published for trained, published in fleet.starts.values())
        - sum(first - fleet.starts[group_id][1] for group_id, first in oldest.items()),
    )
    assert cell.sum_of_staleness == cell.closed_form, f"{engines} engines, {window}: {cell}"
    return cell


def main() -> None:
    """Print a table with a row per number of engines, each cell once its run is simulated. With
    `--json` also print the results as one JSON object.
    """
    parser = options(__doc__)
    parser.add_argument("--engines", default="8,32,128,1024", help="numbers of engines")
    parser.add_argument("--staleness", default="0,1,2,4,8", help="windows of staleness")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run")
    asked = parser.parse_args()
    windows = [int(text) for text in asked.staleness.split(",")]
    out = sys.stderr if asked.json else sys.stdout
    print("| engines |", *(f"staleness {window} |" for window in windows), file=out)
    print("| --- |", *("--- |" for _ in windows), file=out)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for engines in (int(text) for text in asked.engines.split(",")):
        print(f"| {engines:,} |", end="", file=out, flush=True)
        row = results[f"{engines} engines"] = {}
        for window in windows:
            cell = measure(engines, window, asked.steps)
            row[f"staleness {window}"] = dataclasses.asdict(cell)
            print(f" {cell} |", end="", file=out, flush=True)
        print(file=out)
    if asked.json:
        tell(results, True)


if __name__ == "__main__":
    main()
