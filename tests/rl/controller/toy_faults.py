"""Faults that tests inject, and checks of what must hold after them."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from toy import ToyStore, conserved

BAD = RuntimeError("bad")


def once(toy, steps=5, groups=2):
    """Every step has its groups, and each of them once."""
    assert [len(step) for step in toy.policy.steps] == [groups] * steps
    assert len(set(toy.trained())) == steps * groups
    assert toy.status.trainer_version == steps
    assert conserved(toy.status)


class RealStore(ToyStore):
    """Brings the toy policy back to the checkpoint, as fresh ranks are."""

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


def stored(toy):
    toy.store.toy = toy
    return toy


async def when(toy, condition):
    """Wait until the run stands so."""
    while not condition(await toy.controller.ping()):
        await asyncio.sleep(0.05)


def fails_once(toy, version, error):
    """Let one publish of a version raise."""
    publish, failed = toy.generator.publish, []

    async def fails(published):
        if published == version and not failed:
            failed.append(published)
            await asyncio.sleep(1.0)
            raise error
        return await publish(published)

    toy.generator.publish = fails


@contextlib.contextmanager
def spinning_is_an_error():
    def look(*_):
        raise SystemExit("it spins")

    before = signal.signal(signal.SIGALRM, look)
    signal.alarm(5)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
