"""The actors of one start, until one is lost and all are ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from . import ray_cluster
from .errors import RankFailed, RanksLost, RankTraceback
from .serve import describe

_LARGE = 1 << 20
"""Results of so many bytes are unpickled in a thread."""


class Life:
    """Ranks that live and die together; the first reason is the one that is told."""

    def __init__(self, ray: Any, actors: Sequence[Any], names: Sequence[str]) -> None:
        """`names` are those of the actors, by which Ray lists the ones that live."""
        self.actors = list(actors)
        self.lost = ""
        self._ray = ray
        self._names = list(names)
        self._doing = ""
        self._ended = asyncio.Event()

    def reorder(self, order: Sequence[int]) -> None:
        """Number the ranks: the first is the actor of the first index."""
        self.actors = [self.actors[index] for index in order]
        self._names = [self._names[index] for index in order]

    def end(self, why: str) -> None:
        """Kill all actors. Ended already: no-op."""
        if not self._ended.is_set():
            self.lost = why
            self._ended.set()
            ray_cluster.kill(self._ray, self.actors)

    def check(self) -> None:
        """Errors: `RanksLost` once they are ended."""
        if not self._ray.is_initialized():  # else Ray would start a cluster for the next call
            self.end("this process has left the Ray cluster")
        if self._ended.is_set():
            raise RanksLost(
                f"{self.lost}; all {len(self.actors)} ranks were ended, start() makes new ones"
            )

    async def watch(self, every_s: float) -> None:
        """Look whether all live, until they are ended; a call that runs sees it sooner."""
        while not self._ended.is_set():
            if not self._ray.is_initialized():
                self.end("this process has left the Ray cluster")
                return
            listed = await asyncio.to_thread(self._ray.util.list_named_actors)
            gone = [rank for rank, name in enumerate(self._names) if name not in listed]
            if gone:
                when = f"in {self._doing}()" if self._doing else "while idle"
                self.end(f"rank {gone[0]} was lost {when}: its actor has died")
                return
            try:
                await asyncio.wait_for(self._ended.wait(), every_s)
            except asyncio.TimeoutError:
                continue

    async def results(
        self,
        method: str,
        refs: Sequence[Any],
        timeout_s: float | None,
        *,
        errors_first: bool = False,
    ) -> list[Any]:
        """Returns the results of a call on all ranks, by rank.

        Args:
            method: for errors.
            refs: to an `Answer` of each rank.
            timeout_s: after it, ranks are lost.
            errors_first: ranks that have not answered in time are no loss where others raised, and
                those wait for them.

        Errors: `RankFailed`, and those of `gather`.
        """
        try:
            answers = await self.gather(method, refs, timeout_s)
        except _Silent as silent:
            errors = [each.error for each in silent.answers if each.error is not None]
            if errors and errors_first:
                raise RankFailed(method, errors) from silent
            raise
        return await _read(method, answers)

    async def gather(self, method: str, refs: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Fetches the references' values. Errors: `RanksLost`; all ranks are then ended."""
        waiting = [ray_cluster.future(ref) for ref in refs]
        self._doing = method
        # The first error, not all answers: the peers of a rank that died hang in a collective.
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        self._doing = ""
        for rank, each in enumerate(waiting):
            error = each.exception() if each.done() else None
            if error is not None:
                why = f"{type(error).__name__}: {ray_cluster.in_short(error)}"
                self.end(f"rank {rank} was lost in {method}(): {why}")
                self.check()
        silent = [rank for rank, each in enumerate(waiting) if not each.done()]
        if silent:
            self.end(f"{method}() was not answered within {timeout_s} s by ranks {silent}")
            raise _Silent(self.lost, [each.result() for each in waiting if each.done()])
        return [each.result() for each in waiting]


class _Silent(RanksLost):
    def __init__(self, message: str, answers: Sequence[Any]) -> None:
        super().__init__(f"{message}; all ranks were ended, start() makes new ones")
        self.answers = answers


async def _read(method: str, answers: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    errors: list[RankTraceback] = []
    for rank, answer in enumerate(answers):
        if answer.error is not None:
            errors.append(answer.error)
            continue
        try:
            if sum(len(part) for part in answer.parts) < _LARGE:
                found.append(ray_cluster.received(answer.parts))
            else:
                found.append(await asyncio.to_thread(ray_cluster.received, answer.parts))
        except Exception as error:  # noqa: BLE001 - a class's own code decides
            errors.append(describe(rank, error))
    if errors:
        raise RankFailed(method, errors)
    return found
