"""Runs a policy's ranks on a Ray cluster: Ray places and starts them, and they dial the controller.

Calls travel over the same connection as those of embedded and torchrun's ranks, so a rank that dies
is noticed at once, and a tensor is not copied through an object store.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import ray_cluster, wire
from .protocol import RanksLost, WorkerSpec
from .ray_cluster import import_ray
from .serve import RankConnection
from .server import Server
from .socket_ranks import Connection, SocketRanks

#: Seconds for killed actors to be gone.
_END_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodePlacement:
    """Says where an actor runs. Example: `seat.node`."""

    node: str
    """Ray's id of the node."""
    address: str
    """The node's address, as other nodes reach it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Gives a rank its place. Example: `places(seats, shows_own_gpus=False)[0].local_rank`."""

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


def places(seats: Sequence[NodePlacement], *, shows_own_gpus: bool) -> list[Membership]:
    """Assigns ranks to actors: consecutive ones to those of a node, in the order of the nodes.

    Args:
        seats: the places of all actors.
        shows_own_gpus: True if each rank sees its own GPUs only, as Ray has it if actors ask for
            some. The first GPU that it sees is then its own, so its local rank is 0.
    """
    nodes: dict[str, list[int]] = {}
    for index, seat in enumerate(seats):
        nodes.setdefault(seat.node, []).append(index)
    found: list[Membership] = []
    for actors in nodes.values():
        found += [
            Membership(
                rank=len(found) + place,
                size=len(seats),
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

    def seat(self) -> NodePlacement:
        """Returns the place where this actor runs."""
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
        ray_cluster.check_connected(self._ray, "RayRanks")
        if self._place is None:
            self._place = await ray_cluster.place(
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
            await self._seat(actors, dial)
            return await self._arrived(actors, server)
        except BaseException:
            await actors.end()
            raise
        finally:
            await server.close()

    async def _seat(self, actors: _Actors, dial: Dial) -> None:
        """Give every actor its rank, and have it dial."""
        limit_s = self._start_timeout_s
        try:
            seats = await actors.all_of(
                "seat", [each.seat.remote() for each in actors.all], limit_s
            )
        except RanksLost as error:
            has = await ray_cluster.resources(self._ray)
            raise RanksLost(f"{error}. The cluster has {has}") from error
        ranks = places(seats, shows_own_gpus="GPU" in self._bundle)
        actors.reorder([each.actor for each in ranks])
        address = seats[ranks[0].actor].address
        opening = actors.all[0].open_store.remote(address, self._size, limit_s)
        (port,) = await actors.all_of("open_store", [opening], limit_s)
        meeting = Meeting(
            address=address, port=port, backend=self._backend, timeout_s=self._collective_timeout_s
        )
        pickled = await asyncio.to_thread(_pickled, self._spec.argument)
        argument = self._ray.put(pickled)  # once: as an argument it would be copied for each rank
        actors.serving = [
            ray_cluster.future(
                actor.serve.remote(each, meeting, dial, self._spec.factory, argument)
            )
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
            await asyncio.to_thread(ray_cluster.remove, self._ray, place)


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
        """Fetches the references' values. Errors: `RanksLost`."""
        waiting = [ray_cluster.future(ref) for ref in refs]
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
        ray_cluster.kill(self._ray, self.all)
        if self.serving and self._ray.is_initialized():
            await asyncio.wait(self.serving, timeout=_END_S)

    def end_of(self, rank: int) -> str:
        """Returns Ray's account of a rank's end; empty without one, or if the rank said goodbye."""
        if rank >= len(self.serving) or not self.serving[rank].done():
            return ""
        return _why(self.serving[rank]) if self.serving[rank].exception() is not None else ""


def _why(done: asyncio.Future[Any]) -> str:
    error = done.exception()
    return "" if error is None else f"{type(error).__name__}: {ray_cluster.in_short(error)}"


def _pickled(value: Any) -> list[bytes]:
    return [bytes(part) for part in wire.dump(value)]
