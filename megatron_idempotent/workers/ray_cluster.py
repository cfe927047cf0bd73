"""Ray for ranks and engines: the cluster, placement, and the life and end of actors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import wire
from .protocol import RankFailed, RanksLost, RankTraceback
from .serve import describe

_SLICE_S = 0.5
"""Seconds that one look for a placement group blocks its thread; a cancelled start waits for it."""
_SHORT = 400


def import_ray() -> Any:
    """The `ray` module. Errors: `ModuleNotFoundError` that says how to install it."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ModuleNotFoundError(
            "ray is not installed; install megatron-idempotent[ray], here and on every node of "
            "the cluster",
            name="ray",
        ) from error


def check_connected(ray: Any, what: str) -> None:
    """Errors: `RuntimeError` where this process has no cluster."""
    if not ray.is_initialized():
        raise RuntimeError(
            f"{what} needs a Ray cluster and this process has none; call ray.init() first, with "
            'address="auto" on a node of a running cluster'
        )


async def resources(ray: Any) -> str:
    """Describes the cluster's resources, free and in all, for an error."""
    free, total = await asyncio.gather(
        asyncio.to_thread(ray.available_resources), asyncio.to_thread(ray.cluster_resources)
    )
    nodes = sum(node["Alive"] for node in await asyncio.to_thread(ray.nodes))
    kinds = [kind for kind in ("CPU", "GPU") if total.get(kind)]
    listed = ", ".join(f"{free.get(kind, 0):g} of {total[kind]:g} {kind} free" for kind in kinds)
    return f"{nodes} nodes with {listed or 'no CPU and no GPU'}"


async def place(
    ray: Any, bundles: Sequence[Mapping[str, float]], *, strategy: str, timeout_s: float
) -> Any:
    """Reserve a placement group.

    Args:
        bundles: resources of each actor, by Ray's names, such as `{"CPU": 1, "GPU": 1}`.
        strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".

    Errors: `RanksLost` with what was asked for and what there is, where it cannot be had in time.
        The reservation is then taken back.
    """
    group = ray.util.placement_group([dict(each) for each in bundles], strategy=strategy)
    clock = asyncio.get_running_loop().time
    ends = clock() + timeout_s
    try:
        # Not `await group.ready()`: that runs a task in the group, in a worker started for it.
        while not await asyncio.to_thread(group.wait, min(_SLICE_S, timeout_s)):
            if clock() >= ends:
                asked = _counted(bundles)
                raise RanksLost(
                    f"the Ray cluster has not given a placement group of {asked} ({strategy}) "
                    f"within {timeout_s:g} s; it has {await resources(ray)}. Ask for less, free "
                    "some, or add nodes"
                )
    except BaseException:
        remove(ray, group)
        raise
    return group


def remove(ray: Any, group: Any) -> None:
    """Give a placement group back. Does nothing where the cluster is gone."""
    if not ray.is_initialized():  # else Ray would start one
        return
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
        ray.util.remove_placement_group(group)


def kill(ray: Any, actors: Iterable[Any]) -> None:
    """End actors at once. Those that are dead, and all where the cluster is gone, are no error."""
    for actor in actors if ray.is_initialized() else ():  # else Ray would start one
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError, ValueError):
            ray.kill(actor, no_restart=True)


def in_short(error: BaseException) -> str:
    """Ray's reports of a death take a page; its start and its end."""
    words = " ".join(str(error).split())
    if len(words) > 2 * _SHORT:  # the start says who, the end why
        words = f"{words[:_SHORT]} ... {words[-_SHORT:]}"
    return words or type(error).__name__


def future(ref: Any) -> asyncio.Future[Any]:
    """A reference as a future of the running loop, which may close before it is there.

    Dropped, its error is not reported. Wait for it with `asyncio.wait`, which does not cancel it.
    """
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[Any] = loop.create_future()

    def settle(done: concurrent.futures.Future[Any]) -> None:
        if waiting.cancelled():
            return
        error = done.exception()
        if error is None:
            waiting.set_result(done.result())
        else:
            waiting.set_exception(error)
            waiting.exception()  # looked at, so not reported where nobody waits any more

    def arrived(done: concurrent.futures.Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, done)

    ref.future().add_done_callback(arrived)
    return waiting


def carried(value: Any) -> list[Any]:
    """A pickle in parts that Ray passes on without a copy of its own.

    Errors: those of `pickles.dump`.
    """
    parts = wire.dump(value)
    return [bytes(parts[0]), *(_array(part) for part in parts[1:])]


def received(parts: Sequence[Any]) -> Any:
    """Copies what `carried` was given: Ray's memory is shared and cannot be written."""
    return wire.load([parts[0], *(bytearray(part) for part in parts[1:])])


def _array(part: Any) -> Any:
    import numpy

    return numpy.frombuffer(part, dtype=numpy.uint8)


def _counted(bundles: Sequence[Mapping[str, float]]) -> str:
    kinds: dict[str, int] = {}
    for bundle in bundles:
        name = ", ".join(f"{number:g} {kind}" for kind, number in bundle.items())
        kinds[name] = kinds.get(name, 0) + 1
    return " and ".join(f"{number} x ({name})" for name, number in kinds.items())


_LARGE = 1 << 20
"""Results of so many bytes are unpickled in a thread."""


class ActorSession:
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
            kill(self._ray, self.actors)

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
        waiting = [future(ref) for ref in refs]
        self._doing = method
        # The first error, not all answers: the peers of a rank that died hang in a collective.
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        self._doing = ""
        for rank, each in enumerate(waiting):
            error = each.exception() if each.done() else None
            if error is not None:
                why = f"{type(error).__name__}: {in_short(error)}"
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
                found.append(received(answer.parts))
            else:
                found.append(await asyncio.to_thread(received, answer.parts))
        except Exception as error:  # noqa: BLE001 - a class's own code decides
            errors.append(describe(rank, error))
    if errors:
        raise RankFailed(method, errors)
    return found
