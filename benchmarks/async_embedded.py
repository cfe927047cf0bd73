"""Measures how far an asynchronous run overlaps generation and training on this machine.

    python -m benchmarks.async_embedded [--steps 8] [--rounds 3] [--tokens 32]
                                        [--slots 256,8,4] [--json]

A real Megatron rank, a real engine and the real controller. In turns, on the same prompts:
generation alone, training alone on groups that are there already (with the publishing of weights),
and both in one run. Overlap efficiency = max(T_generate, T_train + T_pause) ÷ T_both, the median of
the rounds. Weights that are trained end their responses elsewhere, so T_generate is that of as many
tokens as the run with both has drawn. Fewer slots make generation the slower side. Meanwhile a
coroutine measures how late the event loop wakes it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_idempotent.rl.controller import (
    Controller,
    Fleet,
    MemoryPlane,
    RolloutGroup,
    WindowedSampler,
)
from megatron_idempotent.rl.engines.transformers import TransformersEngine
from megatron_idempotent.rl.trainer.async_ranks import RankPolicy, make_ranks
from megatron_idempotent.rl.trainer.async_run import make_settings
from megatron_idempotent.rl.trainer.config import load_config
from megatron_idempotent.rl.trainer.output import INITIAL, Job, data_path
from megatron_idempotent.rl.trainer.rewards import GrpoRecipe, PromptStream, RequestMaker
from megatron_idempotent.rl.trainer.task.prompts import read_prompts
from megatron_idempotent.rl.trainer.task.tokenizer import make_tokenizer, sequence_positions
from megatron_idempotent.rl.workers import RemoteWeights

STALENESS = 2


class Replay:
    """A generator whose groups are there already, with the version that is being trained."""

    def __init__(self, groups: list[RolloutGroup], fleet: Fleet) -> None:
        self._groups, self._fleet, self._version = groups, fleet, 0

    async def generate(self, group_id: int, prompt: Any, *, attempt: int) -> RolloutGroup:
        """One of the groups, under the id that is asked for."""
        found = self._groups[group_id % len(self._groups)]
        samples = tuple(
            dataclasses.replace(sample, versions=(self._version,) * len(sample.tokens))
            for sample in found.samples
        )
        return dataclasses.replace(found, id=group_id, samples=samples)

    async def publish(self, version: int) -> Any:
        """The real thing."""
        found = await self._fleet.publish(version)
        self._version = version
        return found

    async def recover(self) -> bool:
        """Nothing is lost here."""
        return False


class CountingFleet(Fleet):
    """Knows how many tokens it has drawn."""

    drawn = 0

    async def sample(self, request: Any) -> Any:
        """Draw as a fleet does."""
        found = await super().sample(request)
        self.drawn += len(found.tokens)
        return found


async def measure(
    tokens: int, slots: int, steps: int, rounds: int, folder: Path
) -> dict[str, float]:
    """Seconds of each side, and their ratios; medians of the rounds."""
    settings = ["run.mode=async", *_settings(tokens, folder), f"run.out={folder / 'run'}"]
    config = load_config(None, settings)
    prompts = read_prompts(data_path(config))
    job = Job(config=config, out=folder / "run")
    (job.out / "logs").mkdir(parents=True)
    ranks = make_ranks(job)
    await ranks.start()
    tokenizer = make_tokenizer(config, prompts)
    requests = RequestMaker(config, tokenizer)

    async def score(group_id: int, prompt: Any, samples: Any) -> list[float]:
        rng = random.Random(group_id)
        return [rng.random() for _ in samples]

    fleet = CountingFleet(
        [TransformersEngine(job.out / INITIAL, name="engine", max_running=slots)],
        source=RemoteWeights(ranks, asyncio.get_running_loop()),
        requests=lambda group, prompt: requests.make(
            prompt, stream=group, samples=config.rollout.group_size
        ),
        score=score,
    )
    stream = PromptStream(prompts.train, seed=1)
    positions = sequence_positions(prompts, tokenizer, max_response_tokens=tokens)
    settings = make_settings(config)

    def controller(generator: Any) -> Controller:
        return Controller(
            settings=settings,
            sampler=WindowedSampler(STALENESS, order="oldest"),
            prompts=stream,
            generator=generator,
            policy=RankPolicy(ranks, config.layout, timeout_s=120.0),
            recipe=GrpoRecipe(config, tokenizer, positions=positions),
            plane=MemoryPlane(),
        )

    async def generated(first: int) -> tuple[float, list[RolloutGroup]]:
        """Draw the number of groups that the run trains, at most as many at once as it starts."""
        gate = asyncio.Semaphore(settings.groups_per_step * (STALENESS + 1))

        async def one(index: int) -> RolloutGroup:
            async with gate:
                return await fleet.generate(index, stream.prompt(index), attempt=0)

        started = time.perf_counter()
        groups = settings.groups_per_step * steps
        found = await asyncio.gather(*(one(first + index) for index in range(groups)))
        return time.perf_counter() - started, list(found)

    async def run(generator: Any) -> float:
        trained = controller(generator)
        await trained.run(1)  # sets up process groups, and fills the buffer
        started = time.perf_counter()
        await trained.run(1 + steps)
        return time.perf_counter() - started

    try:
        await run(fleet)
        rows: list[dict[str, float]] = []
        late: list[float] = []
        for number in range(rounds):
            before = fleet.drawn
            alone, groups = await generated(10_000 * (number + 1))
            per_token = alone / (fleet.drawn - before)
            train = await run(Replay(groups, fleet))
            both = controller(fleet)
            await both.run(1)
            looking = asyncio.ensure_future(_lateness(late))
            before, started = fleet.drawn, time.perf_counter()
            await both.run(1 + steps)
            together = time.perf_counter() - started
            looking.cancel()
            generate = per_token * (fleet.drawn - before)
            rows.append(
                {
                    "generate": generate,
                    "train": train,
                    "both": together,
                    "efficiency": max(generate, train) / together,
                    "against one after the other": (generate + train) / together,
                }
            )
    finally:
        await fleet.close()
        await ranks.close()
    found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    late.sort()
    found["loop late p50 ms"] = 1e3 * late[len(late) // 2]
    found["loop late p99 ms"] = 1e3 * late[int(len(late) * 0.99)]
    return found


async def _lateness(taken: list[float], every_s: float = 0.1) -> None:
    """Add up how late the event loop wakes this coroutine, in seconds, until it is cancelled."""
    while True:
        started = time.perf_counter()
        await asyncio.sleep(every_s)
        taken.append(time.perf_counter() - started - every_s)


def write_task(tokens: int, folder: Path) -> Path:
    """A task whose answers are as long as responses may be."""
    rng = random.Random(0)
    rows = []
    for number in range(200):
        answer = " ".join(rng.choice("abcdefghij") for _ in range(tokens - 1))
        split = "held_out" if number % 8 == 0 else "train"
        rows.append({"prompt": f"say {answer}", "answer": answer, "split": split})
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return data


def _settings(tokens: int, folder: Path) -> list[str]:
    """One rank."""
    return [
        f"task.data={write_task(tokens, folder)}",
        "run.ranks=1",
        f"rollout.max_response_tokens={tokens}",
        "rollout.prompts=8",
        "rollout.group_size=8",
        "controller.groups_per_call=2",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="longest responses")
    parser.add_argument("--slots", default="256,8,4", help="requests that the engine runs at once")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {}
    for slots in (int(each) for each in options.slots.split(",")):
        with tempfile.TemporaryDirectory() as name:
            found[slots] = asyncio.run(
                measure(options.tokens, slots, options.steps, options.rounds, Path(name))
            )
    if options.json:
        print(json.dumps(found, indent=1))
        return
    names = list(next(iter(found.values())))
    print(" slots  " + "  ".join(names))
    for slots, row in found.items():
        cells = [f"{row[name]:{max(len(name), 5)}.3f}" for name in names]
        print(f"{slots:6d}  " + "  ".join(cells))


if __name__ == "__main__":
    main()
