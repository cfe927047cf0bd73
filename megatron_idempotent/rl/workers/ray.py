"""Runs a policy's ranks on a Ray cluster: Ray places and starts them, and they dial the controller.

Calls travel over the same connection as those of embedded and torchrun's ranks, so a rank that dies
is noticed at once, and a tensor is not copied through an object store.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import importlib
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from . import wire
from .protocol import RanksLost, WorkerSpec
from .socket_ranks import Connection, Server, SocketRanks

#: Seconds for killed actors to be gone.
_END_S = 10.0
#: Seconds that a look for a placement group blocks its thread; a cancelled start waits for it.
_SLICE_S = 0.5
_SHORT = 400
#: Seconds for the meeting of ranks, and for each collective of theirs.
_COLLECTIVE_S = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodePlacement:
    """Says where an actor runs. Example: `placement.node`."""

    node: str
    """Ray's id of the node."""
    address: str
    """The node's address, as other nodes reach it."""
    port: int = 0
    """The port of this actor's store, at which ranks meet if it becomes rank 0."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """Says where ranks meet each other and the controller. Example: `meeting.backend`."""

    at: NodePlacement
    """The place of rank 0."""
    backend: str
    timeout_s: float
    """Seconds for the meeting, and for each collective."""
    controller: wire.Address
    token: bytes


def places(nodes: Sequence[str], *, shows_own_gpus: bool) -> list[tuple[int, dict[str, str]]]:
    """Return for each rank the index of its actor, and the variables that torchrun would set.

    Consecutive ranks are on one node, in the order of the nodes.

    Args:
        nodes: the nodes of all actors.
        shows_own_gpus: True if each rank sees its own GPUs only, as Ray has it if actors ask for
            some. The first GPU that it sees is then its own, so its local rank is 0.
    """
    found: list[tuple[int, dict[str, str]]] = []
    for node in dict.fromkeys(nodes):
        actors = [index for index, each in enumerate(nodes) if each == node]
        for place, actor in enumerate(actors):
            variables = {
                "RANK": len(found),
                "WORLD_SIZE": len(nodes),
                "LOCAL_RANK": 0 if shows_own_gpus else place,
                "LOCAL_WORLD_SIZE": len(actors),
            }
            found.append((actor, {name: str(value) for name, value in variables.items()}))
    return found


class RankActor:
    """Runs a rank in a Ray actor; Ray calls its methods in turn, in the main thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Set the variables of `environment`, before torch is imported."""
        os.environ.update(environment)
        self._store: Any = None

    def placement(self, size: int, timeout_s: float) -> NodePlacement:
        """Listen where ranks meet if this actor becomes rank 0; return the place where it runs."""
        ray = import_ray()
        address = ray.util.get_node_ip_address()
        self._store = _store(address, 0, size, timeout_s, listens=True)
        node = ray.get_runtime_context().get_node_id()
        return NodePlacement(node=node, address=address, port=self._store.port)

    def serve(
        self,
        variables: Mapping[str, str],
        meeting: Meeting,
        factory: str,
        argument: Sequence[bytes],
    ) -> None:
        """Dial the controller, and answer its calls until it says goodbye.

        Errors: those of `RankConnection`.
        """
        # Copied: what is in Ray's memory is shared, and cannot be written.
        own = [bytearray(part) for part in argument]
        spec = WorkerSpec(factory=factory, argument=wire.load(own))
        rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        connection = wire.RankConnection(meeting.controller, meeting.token, rank)
        os.environ.update(variables)
        connection.serve(spec, lambda: self._join(rank, size, meeting))

    def _join(self, rank: int, size: int, meeting: Meeting) -> None:
        """Make the default process group."""
        os.environ.update(MASTER_ADDR=meeting.at.address, MASTER_PORT=str(meeting.at.port))
        import torch

        if not torch.cuda.is_available():
            from megatron_idempotent.proof import cpu

            cpu.enable()
        if rank > 0:
            at = meeting.at
            self._store = _store(at.address, at.port, size, meeting.timeout_s, listens=False)
        torch.distributed.init_process_group(
            meeting.backend,
            store=self._store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=meeting.timeout_s),
        )


def _store(address: str, port: int, size: int, timeout_s: float, *, listens: bool) -> Any:
    import torch.distributed as dist

    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=timeout_s)
    return make(address, port, size, is_master=listens, timeout=timeout, wait_for_workers=False)


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
        self._ray: Any = None
        self._place: Any = None
        self._actors: _Actors | None = None

    async def _launch(self) -> list[Connection]:
        """Place and start the actors; it keeps the placement group of an earlier start.

        Errors: `RanksLost`; `ModuleNotFoundError` without Ray and `RuntimeError` without a cluster.
        """
        self._ray = ray = connected_ray("RayRanks")
        if self._place is None:
            self._place = await self._reserve()
        token = secrets.token_bytes(32)
        server = Server(self._size, token)
        actors = self._actors = _Actors(ray, self._make_actors())
        connections: list[Connection] = []
        try:
            here = await asyncio.to_thread(ray.util.get_node_ip_address)
            await self._assign(actors, server.listen((here, 0)), token)
            connections += await self._complete(server, actors.serving, actors.ends)
            await server.close()
        except BaseException:
            server.drop(connections)
            await actors.end()
            await server.close()
            raise
        return connections

    async def _reserve(self) -> Any:
        """Reserve a placement group, with the bundle of a rank for each.

        Errors: `RanksLost` with what was asked for and what there is, if the cluster does not give
            it in time. The reservation is then taken back.
        """
        group = self._ray.util.placement_group([self._bundle] * self._size, strategy=self._strategy)
        clock = asyncio.get_running_loop().time
        ends = clock() + self._start_timeout_s
        try:
            # Not `await group.ready()`: that runs a task in the group, in a worker started for it.
            look_s = min(_SLICE_S, self._start_timeout_s)
            while not await asyncio.to_thread(group.wait, look_s):
                if clock() >= ends:
                    bundle = ", ".join(
                        f"{number:g} {kind}" for kind, number in self._bundle.items()
                    )
                    raise RanksLost(
                        f"the Ray cluster has not given a placement group of {self._size} x "
                        f"({bundle}) ({self._strategy}) within {self._start_timeout_s:g} s; it has "
                        f"{await _resources(self._ray)}. Ask for less, free some, or add nodes"
                    )
        except BaseException:
            _remove(self._ray, group)
            raise
        return group

    async def _assign(self, actors: _Actors, controller: wire.Address, token: bytes) -> None:
        """Give every actor its rank, and have it dial."""
        placements = await actors.placements(self._size, self._start_timeout_s)
        nodes = [placement.node for placement in placements]
        ranks = places(nodes, shows_own_gpus="GPU" in self._bundle)
        meeting = Meeting(
            at=placements[ranks[0][0]],
            backend=self._backend,
            timeout_s=_COLLECTIVE_S,
            controller=controller,
            token=token,
        )
        parts = await asyncio.to_thread(wire.dump, self._spec.argument)
        # Once: as an argument it would be copied for each rank.
        argument = self._ray.put([bytes(part) for part in parts])
        actors.serving = [
            _future(actors.all[actor].serve.remote(own, meeting, self._spec.factory, argument))
            for actor, own in ranks
        ]

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

    async def placements(self, size: int, timeout_s: float) -> list[NodePlacement]:
        """Return where all actors run. Errors: `RanksLost`, with what the cluster has."""
        waiting = [_future(actor.placement.remote(size, timeout_s)) for actor in self.all]
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        lost = [
            f"actor {i} was lost: {why}" for i, each in enumerate(waiting) if (why := _why(each))
        ]
        if not lost:
            silent = [index for index, each in enumerate(waiting) if not each.done()]
            lost = [f"actors {silent} did not come within {timeout_s:g} s"] if silent else []
        if lost:
            raise RanksLost(f"{lost[0]}. The cluster has {await _resources(self._ray)}")
        return [each.result() for each in waiting]

    async def end(self) -> None:
        """Kill all actors, and wait for a bounded time until Ray says that they are gone."""
        for actor in self.all if self._ray.is_initialized() else ():  # else Ray would start one
            with contextlib.suppress(self._ray.exceptions.RayError, RuntimeError, ValueError):
                self._ray.kill(actor, no_restart=True)
        if self.serving and self._ray.is_initialized():
            await asyncio.wait(self.serving, timeout=_END_S)

    def end_of(self, rank: int) -> str:
        """Return Ray's account of a rank's end; empty without one, or if the rank said goodbye."""
        return _why(self.serving[rank]) if rank < len(self.serving) else ""

    def ends(self) -> str:
        """Return the account of the first rank that has ended; empty if none has."""
        told = ((rank, self.end_of(rank)) for rank in range(len(self.serving)))
        return next((f"rank {rank}: {why}" for rank, why in told if why), "")


def _why(each: asyncio.Future[Any]) -> str:
    """Return a future's error in one line: start and end of Ray's page-long reports of a death."""
    error = each.exception() if each.done() else None
    if error is None:
        return ""
    words = " ".join(str(error).split())
    if len(words) > 2 * _SHORT:  # the start says who, the end why
        words = f"{words[:_SHORT]} ... {words[-_SHORT:]}"
    return f"{type(error).__name__}: {words}"


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


def connected_ray(who: str) -> Any:
    """Return the `ray` module, of a process with a cluster; `who` needs it.

    Errors: those of `import_ray`; `RuntimeError` without a cluster.
    """
    ray = import_ray()
    if not ray.is_initialized():
        raise RuntimeError(
            f"{who} needs a Ray cluster and this process has none; call ray.init() first, with "
            'address="auto" on a node of a running cluster'
        )
    return ray


async def _resources(ray: Any) -> str:
    """Describe the cluster's resources, free and in all, for an error."""
    free, total = await asyncio.gather(
        asyncio.to_thread(ray.available_resources), asyncio.to_thread(ray.cluster_resources)
    )
    nodes = sum(node["Alive"] for node in await asyncio.to_thread(ray.nodes))
    kinds = [kind for kind in ("CPU", "GPU") if total.get(kind)]
    listed = ", ".join(f"{free.get(kind, 0):g} of {total[kind]:g} {kind} free" for kind in kinds)
    return f"{nodes} nodes with {listed or 'no CPU and no GPU'}"


def _remove(ray: Any, group: Any) -> None:
    """Give a placement group back; do nothing if the cluster is gone."""
    if not ray.is_initialized():  # else Ray would start one
        return
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
        ray.util.remove_placement_group(group)


def _future(ref: Any) -> asyncio.Future[Any]:
    """Return a future for a reference's value, whose error may go unseen.

    Wait for it with `asyncio.wait`, which does not cancel it.
    """
    future: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
