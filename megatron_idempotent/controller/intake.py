"""Gives the step the next groups from the buffer, as soon as there are any."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .clearing import Clearing
from .records import Held
from .samplers import checked_evict, checked_select
from .shared import Shared


class Drained(Exception):
    """No more groups are to be trained: the run ends here."""


class OutOfPrompts(Exception):
    """The stream of prompts has ended, and too few groups are left for a step."""


class Intake:
    """Example: `held = await intake.next(1)`; the groups are leased to the open step."""

    #: Raised by `next` for reasons that are not a step's failure.
    expected = (Drained, OutOfPrompts)

    def __init__(
        self, shared: Shared, clearing: Clearing, republish: Callable[[], Awaitable[None]]
    ) -> None:
        """`republish` brings engines back that were all lost, or raises why it cannot."""
        self._shared = shared
        self._clearing = clearing
        self._republish = republish

    async def next(self, most: int) -> list[Held]:
        """Wait for groups that may train now, and lease them: one, and up to `most` that are there.

        A sampler that is deterministic gets as many as it asks for, whenever they come.
        Errors: `Drained`, `OutOfPrompts`.
        """
        shared = self._shared
        fewest = most if shared.sampler.drains else 1
        found = await self._try(most)
        if len(found) < fewest:
            with shared.measure.phase("exposed_generation"):
                while len(found) < fewest:
                    shared.doing = "waiting for groups"
                    if shared.draining:
                        raise Drained
                    if shared.engines_back or shared.publish_failed:
                        await self._republish()
                    elif self._nothing_to_come():
                        raise OutOfPrompts
                    else:
                        await shared.change()
                    found = await self._try(most)
        shared.buffer.lease([held.id for held in found])
        shared.progressed()  # and their places in the buffer are free
        return found

    async def _try(self, most: int) -> list[Held]:
        await self._evict()
        shared = self._shared
        chosen = checked_select(
            shared.sampler, shared.buffer.ready, version=shared.trainer_version, count=most
        )
        return list(chosen)

    async def _evict(self) -> None:
        shared = self._shared
        stale = checked_evict(shared.sampler, shared.buffer.ready, version=shared.trainer_version)
        if not stale:
            return
        for held in stale:
            shared.buffer.drop(held.id, "evicted", "stale")
        shared.tell()
        await self._clearing.clear([held.id for held in stale])

    def _nothing_to_come(self) -> bool:
        return self._shared.exhausted and not self._shared.buffer.counts.generating
