"""Runs a policy's ranks on a Ray cluster: Ray places and starts them, and they dial the controller.

Calls travel over the same connection as those of embedded and torchrun's ranks, so a rank that dies
is noticed at once, and a tensor is not copied through an object store.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import datetime
import importlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import wire
from .protocol import RanksLost, WorkerSpec
from .serve import RankConnection
from .server import Server
from .socket_ranks import Connection, SocketRanks

#: Seconds for killed actors to be gone.
_END_S = 10.0
#: Seconds that a look for a placement group blocks its thread; a cancelled start waits for it.
_SLICE_S = 0.5
_SHORT = 400


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodePlacement:
    """Says where an actor runs. Example: `placement.node`."""

    node: str
    """Ray's id of the node."""
    address: str
    """The node's address, as other nodes reach it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Gives a rank its place. Example: `places(placements, shows_own_gpus=False)[0].local_rank`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    actor: int
    """The index of the actor that becomes this rank."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Names the address at which ranks meet, and their backend. Example: `meeting.port`."""

    address: str
    port: int
    backend: str
    timeout_s: float
    """Seconds for the meeting, and for each collective."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dial:
    """Names the controller that a rank dials. Example: `dial.address`."""

    address: str
    token: bytes
    generation: bytes


def places(placements: Sequence[NodePlacement], *, shows_own_gpus: bool) -> list[Membership]:
    """Assign ranks to actors: consecutive ones to those of a node, in the order of the nodes.

    Args:
        placements: the places of all actors.
        shows_own_gpus: True if each rank sees its own GPUs only, as Ray has it if actors ask for
            some. The first GPU that it sees is then its own, so its local rank is 0.
    """
    nodes: dict[str, list[int]] = {}
    for index, placement in enumerate(placements):
        nodes.setdefault(placement.node, []).append(index)
    found: list[Membership] = []
    for actors in nodes.values():
        found += [
            Membership(
                rank=len(found) + place,
                size=len(placements),
                local_rank=0 if shows_own_gpus else place,
                local_size=len(actors),
                actor=actor,
            )
            for place, actor in enumerate(actors)
        ]
    return found


class RankActor:
    """Runs a rank in a Ray actor; Ray calls its methods in turn, in the main thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Set the variables of `environment`, before torch is imported."""
        os.environ.update(environment)
        self._store: Any = None

    def placement(self) -> NodePlacement:
        """Return the place where this actor runs."""
        ray = import_ray()
        node = ray.get_runtime_context().get_node_id()
        return NodePlacement(node=node, address=ray.util.get_node_ip_address())

    def open_store(self, address: str, size: int, timeout_s: float) -> int:
        """Listen, on rank 0, where ranks meet; returns the port, which is taken from now on."""
        self._store = _store(address, 0, size, timeout_s, listens=True)
        return int(self._store.port)

    def serve(
        self,
        place: Membership,
        meeting: Meeting,
        dial: Dial,
        factory: str,
        argument: Sequence[bytes],
    ) -> None:
        """Dial the controller, and answer its calls until it says goodbye.

        Errors: those of `RankConnection`.
        """
        # Copied: what is in Ray's memory is shared, and cannot be written.
        own = [bytearray(part) for part in argument]
        spec = WorkerSpec(factory=factory, argument=wire.load(own))
        hello = wire.Hello(generation=dial.generation, rank=place.rank, pid=os.getpid())
        connection = RankConnection(dial.address, dial.token, hello)
        connection.serve(spec, lambda: self._join(place, meeting))

    def _join(self, place: Membership, meeting: Meeting) -> None:
        """Set the variables that torchrun would, and make the default process group."""
        os.environ.update(
            RANK=str(place.rank),
            WORLD_SIZE=str(place.size),
            LOCAL_RANK=str(place.local_rank),
            LOCAL_WORLD_SIZE=str(place.local_size),
            MASTER_ADDR=meeting.address,
            MASTER_PORT=str(meeting.port),
        )
        import torch

        if not torch.cuda.is_available():
            from megatron_idempotent.proof import cpu

            cpu.enable()
        if self._store is None:
            self._store = _store(
                meeting.address, meeting.port, place.size, meeting.timeout_s, listens=False
            )
        torch.distributed.init_process_group(
            meeting.backend,
            store=self._store,
            rank=place.rank,
            world_size=place.size,
            timeout=datetime.timedelta(seconds=meeting.timeout_s),
        )


def _store(address: str, port: int, size: int, timeout_s: float, *, listens: bool) -> Any:
    import torch.distributed as dist

    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make(
        address,
        port,
        size,
        is_master=listens,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


class RayRanks(SocketRanks):
    """Implements `RankGroup` on a Ray cluster that this process is connected to.

    Ranks dial this process, so every node must reach the address that Ray knows its node by. The
    package, and the module of the factory, must be importable on every node. Patches do not travel:
    the factory calls `megatron_idempotent.apply()`.

    Example:
        ray.init(address="auto")
        ranks = RayRanks(WorkerSpec(factory="my_run.worker:make", argument=config), 16, num_gpus=1)
        await ranks.start()
        losses = await ranks.call("train", per_rank=batches)
    """

    def __init__(
        self,
        spec: WorkerSpec,
        size: int,
        *,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        strategy: str = "PACK",
        backend: str | None = None,
        environment: Mapping[str, str] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        call_timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        collective_timeout_s: float = 600.0,
    ) -> None:
        """
        Args:
            spec: the worker that every rank makes.
            size: the number of ranks.
            num_cpus: the CPUs of each rank, as Ray counts them.
            num_gpus: the GPUs of each rank. With 0 a rank runs on the CPU runtime (`cpu.enable()`).
            resources: each rank's custom resources, by their names in the cluster.
            strategy: the placement group's strategy; "PACK" fills nodes one after another.
            backend: the process group's backend; None for "nccl" on GPUs and "gloo" without them.
            environment: variables that each rank sets before it imports torch.
            runtime_env: Ray's runtime environment, for instance with `py_modules` that nodes lack.
            call_timeout_s: seconds for calls that give no `timeout_s`; None for no limit.
            start_timeout_s: seconds for a placement group, for the actors, and for their workers,
                each.
            collective_timeout_s: seconds for each collective of the process group.
        """
        super().__init__(size, start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s)
        if ":" not in spec.factory:
            what = f"RayRanks() got factory={spec.factory!r}"
            raise ValueError(f"{what}; allowed: package.module:callable")
        self._spec = spec
        self._bundle = {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}
        self._bundle = {kind: number for kind, number in self._bundle.items() if number}
        if not self._bundle:
            raise ValueError(
                f"RayRanks() got num_cpus={num_cpus} and num_gpus={num_gpus}: a placement group "
                "needs one of them, or other resources"
            )
        self._strategy = strategy
        self._backend = backend or ("nccl" if num_gpus else "gloo")
        self._environment = dict(environment or {})
        self._runtime_env = dict(runtime_env or {})
        self._collective_timeout_s = collective_timeout_s
        self._ray: Any = None
        self._place: Any = None
        self._actors: _Actors | None = None

    async def _launch(self) -> list[Connection]:
        """Place and start the actors; it keeps the placement group of an earlier start.

        Errors: `RanksLost`; `ModuleNotFoundError` without Ray and `RuntimeError` without a cluster.
        """
        self._ray = import_ray()
        _check_connected(self._ray, "RayRanks")
        if self._place is None:
            self._place = await _place(
                self._ray,
                [self._bundle] * self._size,
                strategy=self._strategy,
                timeout_s=self._start_timeout_s,
            )
        token, generation = wire.new_token(), wire.new_generation()
        server = Server(self._size, token, expected=generation)
        actors = self._actors = _Actors(self._ray, self._make_actors())
        try:
            here = await asyncio.to_thread(self._ray.util.get_node_ip_address)
            dial = Dial(address=server.listen(f"tcp:{here}:0"), token=token, generation=generation)
            await self._assign(actors, dial)
            return await self._arrived(actors, server)
        except BaseException:
            await actors.end()
            raise
        finally:
            await server.close()

    async def _assign(self, actors: _Actors, dial: Dial) -> None:
        """Give every actor its rank, and have it dial."""
        limit_s = self._start_timeout_s
        try:
            placements = await actors.all_of(
                "placement", [each.placement.remote() for each in actors.all], limit_s
            )
        except RanksLost as error:
            has = await _resources(self._ray)
            raise RanksLost(f"{error}. The cluster has {has}") from error
        ranks = places(placements, shows_own_gpus="GPU" in self._bundle)
        actors.reorder([each.actor for each in ranks])
        address = placements[ranks[0].actor].address
        opening = actors.all[0].open_store.remote(address, self._size, limit_s)
        (port,) = await actors.all_of("open_store", [opening], limit_s)
        meeting = Meeting(
            address=address, port=port, backend=self._backend, timeout_s=self._collective_timeout_s
        )
        parts = await asyncio.to_thread(wire.dump, self._spec.argument)
        # Once: as an argument it would be copied for each rank.
        argument = self._ray.put([bytes(part) for part in parts])
        actors.serving = [
            _future(actor.serve.remote(each, meeting, dial, self._spec.factory, argument))
            for actor, each in zip(actors.all, ranks, strict=True)
        ]

    async def _arrived(self, actors: _Actors, server: Server) -> list[Connection]:
        connections = await server.complete_unless(actors.serving, self._start_timeout_s)
        if connections is not None:
            return connections
        for rank in range(self._size):
            if why := actors.end_of(rank):
                raise RanksLost(f"the ranks could not be started: rank {rank}: {why}")
        raise RanksLost(
            f"the ranks could not be started in {self._start_timeout_s:g} s: {server.missing()}"
        )

    def _make_actors(self) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        custom = {k: number for k, number in self._bundle.items() if k not in ("CPU", "GPU")}
        options: dict[str, Any] = {
            "num_cpus": self._bundle.get("CPU", 0),
            "num_gpus": self._bundle.get("GPU", 0),
            "resources": custom,
            "max_restarts": 0,
        }
        if self._runtime_env:
            options["runtime_env"] = self._runtime_env
        actor_class = self._ray.remote(RankActor)
        return [
            actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._place, placement_group_bundle_index=index
                ),
                **options,
            ).remote(self._environment)
            for index in range(self._size)
        ]

    async def _ended(self, rank: int | None) -> str:
        actors, self._actors = self._actors, None
        if actors is None:
            return ""
        await actors.end()
        return "" if rank is None else actors.end_of(rank)

    async def _release(self) -> None:
        """Give the placement group back."""
        if self._place is not None:
            place, self._place = self._place, None
            await asyncio.to_thread(_remove, self._ray, place)


class _Actors:
    """Holds the actors of one start."""

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self._ray = ray
        self.all = list(actors)
        self.serving: list[asyncio.Future[Any]] = []
        """A future per rank, done once the rank has ended."""

    def reorder(self, order: Sequence[int]) -> None:
        """Put the actors in the order of their ranks: rank r is the actor at `order[r]`."""
        self.all = [self.all[index] for index in order]

    async def all_of(self, method: str, refs: Sequence[Any], timeout_s: float) -> list[Any]:
        """Fetch the references' values. Errors: `RanksLost`."""
        waiting = [_future(ref) for ref in refs]
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        for index, each in enumerate(waiting):
            if each.done() and each.exception() is not None:
                raise RanksLost(f"actor {index} was lost in {method}(): {_why(each)}")
        silent = [index for index, each in enumerate(waiting) if not each.done()]
        if silent:
            raise RanksLost(f"{method}() was not answered within {timeout_s} s by actors {silent}")
        return [each.result() for each in waiting]

    async def end(self) -> None:
        """Kill all actors, and wait for a bounded time until Ray says that they are gone."""
        _kill(self._ray, self.all)
        if self.serving and self._ray.is_initialized():
            await asyncio.wait(self.serving, timeout=_END_S)

    def end_of(self, rank: int) -> str:
        """Return Ray's account of a rank's end; empty without one, or if the rank said goodbye."""
        if rank >= len(self.serving) or not self.serving[rank].done():
            return ""
        return _why(self.serving[rank]) if self.serving[rank].exception() is not None else ""


def _why(done: asyncio.Future[Any]) -> str:
    error = done.exception()
    return "" if error is None else f"{type(error).__name__}: {_in_short(error)}"


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


def _check_connected(ray: Any, what: str) -> None:
    """Raise `RuntimeError` unless this process is connected to a cluster."""
    if not ray.is_initialized():
        raise RuntimeError(
            f"{what} needs a Ray cluster and this process has none; call ray.init() first, with "
            'address="auto" on a node of a running cluster'
        )


async def _resources(ray: Any) -> str:
    """Describe the cluster's resources, free and in all, for an error."""
    free, total = await asyncio.gather(
        asyncio.to_thread(ray.available_resources), asyncio.to_thread(ray.cluster_resources)
    )
    nodes = sum(node["Alive"] for node in await asyncio.to_thread(ray.nodes))
    kinds = [kind for kind in ("CPU", "GPU") if total.get(kind)]
    listed = ", ".join(f"{free.get(kind, 0):g} of {total[kind]:g} {kind} free" for kind in kinds)
    return f"{nodes} nodes with {listed or 'no CPU and no GPU'}"


async def _place(
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
                    f"within {timeout_s:g} s; it has {await _resources(ray)}. Ask for less, free "
                    "some, or add nodes"
                )
    except BaseException:
        _remove(ray, group)
        raise
    return group


def _remove(ray: Any, group: Any) -> None:
    """Give a placement group back; do nothing if the cluster is gone."""
    if not ray.is_initialized():  # else Ray would start one
        return
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
        ray.util.remove_placement_group(group)


def _kill(ray: Any, actors: Iterable[Any]) -> None:
    """End actors at once; dead ones are no error, nor is a cluster that is gone."""
    for actor in actors if ray.is_initialized() else ():  # else Ray would start one
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError, ValueError):
            ray.kill(actor, no_restart=True)


def _in_short(error: BaseException) -> str:
    """Return an error in one line: the start and the end of Ray's page-long reports of a death."""
    words = " ".join(str(error).split())
    if len(words) > 2 * _SHORT:  # the start says who, the end why
        words = f"{words[:_SHORT]} ... {words[-_SHORT:]}"
    return words or type(error).__name__


def _future(ref: Any) -> asyncio.Future[Any]:
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
