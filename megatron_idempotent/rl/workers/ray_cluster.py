"""Uses Ray for ranks and engines: the cluster, placement, futures, and the end of actors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .protocol import RanksLost

_SLICE_S = 0.5
"""Seconds that one look for a placement group blocks its thread; a cancelled start waits for it."""
_SHORT = 400


def import_ray() -> Any:
    """Return the `ray` module. Errors: `ModuleNotFoundError` that says how to install it."""
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
    """Raise `RuntimeError` unless this process is connected to a cluster."""
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
        bundles: the resources of each actor, by Ray's names, such as `{"CPU": 1, "GPU": 1}`.
        strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
        timeout_s: seconds to wait for it.

    Errors: `RanksLost` with what was asked for and what there is, if the cluster does not give it
        in time. The reservation is then taken back.
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
    """Give a placement group back; does nothing if the cluster is gone."""
    if not ray.is_initialized():  # else Ray would start one
        return
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
        ray.util.remove_placement_group(group)


def kill(ray: Any, actors: Iterable[Any]) -> None:
    """End actors at once; dead ones are no error, nor is a cluster that is gone."""
    for actor in actors if ray.is_initialized() else ():  # else Ray would start one
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError, ValueError):
            ray.kill(actor, no_restart=True)


def in_short(error: BaseException) -> str:
    """Return an error in one line: the start and the end of Ray's page-long reports of a death."""
    words = " ".join(str(error).split())
    if len(words) > 2 * _SHORT:  # the start says who, the end why
        words = f"{words[:_SHORT]} ... {words[-_SHORT:]}"
    return words or type(error).__name__


def future(ref: Any) -> asyncio.Future[Any]:
    """Return a future of the running loop for a reference's value.

    The loop may close before the value is there. The error of a future that is dropped is not
    reported. Wait for it with `asyncio.wait`, which does not cancel it.
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


def _counted(bundles: Sequence[Mapping[str, float]]) -> str:
    kinds: dict[str, int] = {}
    for bundle in bundles:
        name = ", ".join(f"{number:g} {kind}" for kind, number in bundle.items())
        kinds[name] = kinds.get(name, 0) + 1
    return " and ".join(f"{number} x ({name})" for name, number in kinds.items())
