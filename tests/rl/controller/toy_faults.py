"""Faults that tests inject, and checks of what must hold after them."""

import asyncio
import functools

from toy import Toy, ToyStore, conserved, run_virtually

from megatron_idempotent.rl.controller import InOrderSampler, MemoryPlane

BAD = RuntimeError("bad")


def once(toy, steps=5, groups=2):
    """Every step has its groups, and each of them once; no row has another one's publish."""
    rows = [(step, row) for step, row in toy.logger.rows if "sync/version" in row]
    assert [row["sync/version"] for _, row in rows] == [step for step, _ in rows]
    numbers = [row["sync/number"] for _, row in rows]
    assert numbers == sorted({*numbers})
    assert [len(step) for step in toy.policy.steps] == [groups] * steps
    assert len(set(toy.trained())) == steps * groups
    assert toy.status.trainer_version == steps
    assert conserved(toy.status)


@functools.cache
def clean_steps(count, groups=2):
    """Train undisturbed and in order; return the groups of each step."""
    return Toy(sampler=InOrderSampler(1), groups=groups).run(count).policy.steps


class RealStore(ToyStore):
    """Brings the toy policy back to the checkpoint, as fresh ranks are; some restores fail."""

    def __init__(self, failures=()):
        super().__init__()
        self.toy = None
        self.failures = list(failures)

    async def restore(self):
        if self.failures:
            raise self.failures.pop(0)
        self.toy.policy.open = None
        version = self.kept["trainer_version"] if self.kept else 0
        self.toy.policy.steps = self.toy.policy.steps[:version]
        return await super().restore()


def stored(failures=(), **more):
    """A toy with such a store."""
    toy = Toy(store=RealStore(failures), **more)
    toy.store.toy = toy
    return toy


class FaultyPlane(MemoryPlane):
    """Awaits `faults[method](real, argument)` in the place of a method."""

    def __init__(self, **faults):
        super().__init__()
        for method, fault in faults.items():
            setattr(self, method, functools.partial(fault, getattr(self, method)))


def fails(times, *, after=False):
    """Raise so many times, before or after the call is carried out."""
    left = [OSError("connection reset") for _ in range(times)]

    async def call(real, argument):
        if left and not after:
            raise left.pop()
        result = await real(argument)
        if left:
            raise left.pop()
        return result

    return call


def loses(*ids):
    """Have no such groups."""

    async def call(real, group_id):
        if group_id in ids:
            raise KeyError(group_id)
        return await real(group_id)

    return call


def takes(seconds):
    """Return so much later."""

    async def call(real, argument):
        await real(argument)
        await asyncio.sleep(seconds)

    return call


async def when(toy, condition):
    """Wait until the run stands so; a text is what it does."""
    while True:
        status = await toy.controller.ping()
        if condition(status) if callable(condition) else status.doing.startswith(condition):
            return
        await asyncio.sleep(0.05)


def cut_off(toy, condition, *, how="drain", until=100, go_on=0):
    """Run until the run stands so, and drain or cancel it; return its status.

    With `go_on` it is run to that version then, and `toy.status` is its last status.
    """

    async def main():
        running = asyncio.ensure_future(toy.controller.run(until))
        await when(toy, condition)
        if how == "drain":
            await toy.controller.drain()
            await running
        else:
            running.cancel()
            await asyncio.wait([running])
            assert running.cancelled()
            assert asyncio.all_tasks() == {asyncio.current_task()}
        status = await toy.controller.ping()
        assert status.counts["generating"] == status.counts["leased"] == 0
        assert (status.state, toy.policy.open) == ("ended", None)
        assert conserved(status)
        if go_on:
            toy.status = await toy.controller.run(go_on)
        return status

    return run_virtually(main())


def publish_raises(toy, error, *, versions, times=10**6, after_s=0.0):
    """Let publishes of these versions raise, so many times."""
    publish, left = toy.generator.publish, [times]

    async def raises(version):
        if version in versions and left[0]:
            left[0] -= 1
            await asyncio.sleep(after_s)
            raise error
        return await publish(version)

    toy.generator.publish = raises
    return left
