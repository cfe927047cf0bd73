"""A run of the controller with groups that cost next to nothing to make and to train."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from megatron_idempotent.rl.controller.controller import Controller
from megatron_idempotent.rl.controller.protocol import RolloutGroup
from megatron_idempotent.rl.controller.samplers import load_sampler
from megatron_idempotent.rl.controller.state import ControllerSettings
from megatron_idempotent.rl.engines.protocol import Sample
from megatron_idempotent.rl.simulator import clock
from megatron_idempotent.rl.simulator.latency import uniform
from megatron_idempotent.rl.simulator.trainer import (
    SimulatedPolicy,
    SimulatedPrompts,
    SimulatedRecipe,
    TrainCosts,
)


class Quick:
    """A generator whose groups take seconds of virtual time, and microseconds of real time."""

    version = 0

    async def generate(self, group_id: int, prompt: Any, *, attempt: int) -> RolloutGroup:
        version = self.version
        await asyncio.sleep(10 * uniform(3, group_id))
        sample = Sample(
            request_id="", tokens=(7,), logprobs=(-1.0,), versions=(version,), finish_reason="stop"
        )
        return RolloutGroup(
            id=group_id, prompt=prompt, samples=(sample, sample), rewards=(0.0, 1.0)
        )

    async def publish(self, version: int, **_: Any) -> dict[str, float]:
        self.version = version
        return {"pause_s": 0.0}

    async def recover(self) -> bool:
        return False


def seconds_of_run(count: int) -> float:
    """Measure processor seconds of a run that trains `count` groups."""
    per_step = 50
    controller = Controller(
        settings=ControllerSettings(
            target_groups=per_step, group_size=2, train_global_batch_size=2 * per_step
        ),
        sampler=load_sampler("windowed", max_staleness=3),
        prompts=SimulatedPrompts(),
        generator=Quick(),
        policy=SimulatedPolicy(TrainCosts(token_s=0.01, finish_s=1.0)),
        recipe=SimulatedRecipe(seed=0, filtered=0.0),
    )
    started = time.process_time()
    status = clock.run(controller.run(count // per_step))
    seconds = time.process_time() - started
    assert status.counts["trained"] == count
    return seconds
