"""A run small enough to follow: generation that takes virtual seconds, and a policy that counts.

`events` is what everything did, in order.
"""

import asyncio
import random

from benchmarks._virtual_clock import run as run_virtually
from megatron_idempotent.rl.controller import (
    Controller,
    ControllerSettings,
    RolloutGroup,
    StepOutcome,
    WindowedSampler,
)
from megatron_idempotent.rl.engines.protocol import Sample


class ToyPrompts:
    def __init__(self, count=None):
        self.count = count

    def prompt(self, index):
        return None if self.count is not None and index >= self.count else f"prompt {index}"

    def epoch(self, index):
        return index // 10


class ToyGenerator:
    """`faults` maps (group, attempt) to what is raised; None hangs for ever."""

    def __init__(self, events, *, seconds=1.0, faults=None):
        self.events = events
        self.seconds = seconds
        self.faults = faults or {}
        self.version = None
        self.publish_seconds = 0.1
        self.publishing = []

    async def generate(self, group_id, prompt, *, attempt):
        self.events.append(("generate", group_id))
        version = self.version
        await asyncio.sleep(self.seconds * (0.5 + random.Random(group_id).random()))
        if (group_id, attempt) in self.faults:
            fault = self.faults[group_id, attempt]
            if fault is None:
                await asyncio.Event().wait()
            raise fault
        sample = Sample(
            request_id=str(group_id),
            tokens=(1, 2),
            logprobs=(-0.1, -0.2),
            versions=(version, version),
            finish_reason="stop",
        )
        return RolloutGroup(id=group_id, prompt=prompt, samples=(sample,) * 2, rewards=(0.0, 1.0))

    async def publish(self, version):
        if self.publishing:
            raise self.publishing.pop(0)
        await asyncio.sleep(self.publish_seconds)
        self.version = version
        self.events.append(("publish", version))
        number = sum(event[0] == "publish" for event in self.events)
        return {"pause_s": 0.25, "version": version, "number": number}

    async def recover(self):
        return False


class ToyPolicy:
    """`faults` maps the number of a call of a method to what is raised, None hangs."""

    def __init__(self, events, *, seconds=0.2, faults=None):
        self.events = events
        self.seconds = seconds
        self.faults = faults or {}
        self.calls = {}
        self.open = None
        self.steps = []

    async def _do(self, method, *what):
        number = self.calls[method] = self.calls.get(method, -1) + 1
        self.events.append((method, *what))
        await asyncio.sleep(self.seconds)
        if (method, number) in self.faults:
            if self.faults[method, number] is None:
                await asyncio.Event().wait()
            raise self.faults[method, number]

    async def begin(self, step_id):
        assert self.open is None, "two steps are open"
        self.open = (step_id, [])
        await self._do("begin")

    async def logprobs(self, batch, which):
        await self._do("logprobs", which, *batch)
        return which

    async def microbatch(self, step_id, batch, *, microbatch_id, last):
        assert step_id == self.open[0]
        self.open[1].extend(batch)
        await self._do("microbatch", *batch, *(["last"] if last else []))

    async def finish(self, step_id):
        assert step_id == self.open[0]
        await self._do("finish")
        self.steps.append(tuple(self.open[1]))
        self.open = None
        return StepOutcome(updated=True, tokens=4 * len(self.steps[-1]), metrics={"loss": 0.5})

    async def abort(self, step_id=None):
        self.open = None
        await self._do("abort")


class ToyRecipe:
    def __init__(self, *, rejected=()):
        self.rejected = rejected
        self.given = []

    def rejects(self, group):
        return "tied" if group.id in self.rejected else ""

    def inputs(self, groups):
        return [group.id for group in groups]

    def batch(self, groups, inputs, logprobs):
        self.given.append(dict(logprobs))
        return inputs

    def metrics(self, groups, version):
        return {"reward": 0.5}


class ToyStore:
    """Keeps the newest checkpoint in memory."""

    def __init__(self):
        self.kept = None
        self.restored = 0

    async def save(self, version, state):
        await asyncio.sleep(0.05)
        self.kept = state

    async def restore(self):
        self.restored += 1
        return self.kept


class ToyLogger:
    def __init__(self):
        self.rows = []

    def log(self, metrics, *, step):
        self.rows.append((step, dict(metrics)))

    def close(self):
        pass


class Toy:
    """A controller of toys. Example: `Toy(minibatches=2).run(4).policy.steps`."""

    def __init__(
        self,
        *,
        sampler=None,
        groups=2,
        minibatches=1,
        generating=None,
        policy=None,
        seconds=1.0,
        step_seconds=0.2,
        rejected=(),
        prompts=None,
        store=None,
        plane=None,
        evaluate=None,
        loggers=None,
        timeline=None,
        **settings,
    ):
        self.events = []
        self.generator = ToyGenerator(self.events, seconds=seconds, faults=generating)
        self.policy = ToyPolicy(self.events, seconds=step_seconds, faults=policy)
        self.recipe = ToyRecipe(rejected=rejected)
        self.logger = ToyLogger()
        self.store = store
        limits = {"group_timeout_s": 20.0, "stall_s": 200.0, "drain_s": 30.0, "abort_s": 10.0}
        self.controller = Controller(
            settings=ControllerSettings(
                target_groups=groups * minibatches,
                group_size=2,
                train_global_batch_size=2 * groups,
                **limits | settings,
            ),
            sampler=sampler if sampler is not None else WindowedSampler(max(2, minibatches)),
            prompts=ToyPrompts(prompts),
            generator=self.generator,
            policy=self.policy,
            recipe=self.recipe,
            plane=plane,
            store=store,
            loggers=[self.logger] if loggers is None else loggers,
            evaluate=evaluate,
            timeline=timeline,
        )

    def run(self, until):
        """Runs on a virtual clock; returns this toy, with `status`."""

        async def main():
            self.status = await self.controller.run(until)

        run_virtually(main(), limit_s=10_000)
        return self

    def trained(self):
        """Ids of all groups that were trained."""
        return [group_id for step in self.policy.steps for group_id in step]

    def published(self):
        """The version that the publish in each row brought; None for a row without a publish."""
        return [row.get("sync/version") for _, row in self.logger.rows]

    def kinds(self, *wanted):
        """Events of some kinds."""
        return [event for event in self.events if event[0] in wanted]


def conserved(status):
    """Return whether no group is lost or counted twice."""
    counts = status.counts
    out = counts["trained"] + counts["filtered"] + counts["evicted"]
    return counts["submitted"] == out + counts["running"]
