"""The ranks of a policy as Ray actors: one for each rank, in a placement group."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import ray_cluster
from .protocol import RanksLost, RankTraceback, WorkerSpec, check_per_rank
from .ray_cluster import ActorSession, carried, import_ray, received
from .serve import describe, make_worker, run_method


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodePlacement:
    """The place where an actor runs. Example: `seat.node`."""

    node: str
    """Ray's id of the node."""
    address: str
    """The node's, as other nodes reach it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """A rank's place among all. Example: `places(seats, shows_own_gpus=False)[0].local_rank`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    actor: int
    """Index of the actor that gets it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """The address at which ranks meet, and their backend. Example: `meeting.port`."""

    address: str
    port: int
    backend: str
    timeout_s: float
    """Seconds for the meeting, and for each collective."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RemoteResult:
    """The result of a call, in parts, or its error. Example: `answer.error is None`."""

    parts: Sequence[Any] = ()
    error: RankTraceback | None = None


def places(seats: Sequence[NodePlacement], *, shows_own_gpus: bool) -> list[Membership]:
    """Assigns ranks: neighbours to actors of one node, nodes in the order of their actors.

    Args:
        seats: of all actors.
        shows_own_gpus: whether each rank sees its own GPUs only, as Ray has it where actors ask for
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
    """The actor class. Ray runs its methods one at a time, in order, in the main thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment` is set before torch is imported."""
        os.environ.update(environment)
        self._rank = 0
        self._store: Any = None
        self._worker: Any = None

    def seat(self) -> NodePlacement:
        """Returns the place where it runs."""
        ray = import_ray()
        node = ray.get_runtime_context().get_node_id()
        return NodePlacement(node=node, address=ray.util.get_node_ip_address())

    def open_store(self, address: str, size: int, timeout_s: float) -> int:
        """Rank 0: listen where ranks meet; returns the port, which is taken from now on."""
        self._store = _store(address, 0, size, timeout_s, listens=True)
        return int(self._store.port)

    def join(self, place: Membership, meeting: Meeting) -> RemoteResult:
        """Set the variables that torchrun would, and make the default process group."""
        self._rank = place.rank
        return self._answered(lambda: self._join(place, meeting))

    def make(self, factory: str, argument: Sequence[Any]) -> RemoteResult:
        """Make the worker."""
        return self._answered(lambda: self._make(factory, argument))

    def call(self, method: str, shared: Sequence[Any], own: Sequence[Any]) -> RemoteResult:
        """Run a method of the worker.

        Args:
            method: its name.
            shared: parts of a tuple of arguments, the same for all ranks.
            own: parts of a tuple with one more, or with none.
        """
        return self._answered(
            lambda: run_method(self._worker, method, (*received(shared), *received(own)))
        )

    def _join(self, place: Membership, meeting: Meeting) -> None:
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
            from megatron_idempotent import cpu

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

    def _make(self, factory: str, argument: Sequence[Any]) -> None:
        self._worker = make_worker(WorkerSpec(factory=factory, argument=received(argument)))

    def _answered(self, do: Callable[[], Any]) -> RemoteResult:
        try:
            return RemoteResult(parts=carried(do()))
        except BaseException as error:  # noqa: BLE001 - told to the controller, who decides
            return RemoteResult(error=describe(self._rank, error))


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


_PLAIN = (str, int, float, bool, type(None))
_INLINE = 1 << 16
"""Arguments of so many bytes go with the call."""


class RayRanks:
    """A `RankGroup` on a Ray cluster that this process is connected to.

    Each call's arguments are pickled once and unpickled by each rank, so a rank may change its own;
    Ray by itself would hand out arrays that cannot be written. The package, and the module of the
    factory, must be importable on every node. Patches do not travel: the factory calls
    `megatron_idempotent.apply()`.

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
        watch_s: float = 1.0,
        start_timeout_s: float = 300.0,
        collective_timeout_s: float = 600.0,
    ) -> None:
        """
        Args:
            spec: what every rank makes.
            size: number of ranks.
            num_cpus: of each rank, as Ray counts them.
            num_gpus: of each rank. With 0 a rank runs on the CPU runtime (`cpu.enable()`).
            resources: of each rank, custom ones by their names in the cluster.
            strategy: of the placement group; "PACK" fills nodes one after another.
            backend: of the process group; "nccl" on GPUs and "gloo" without them, if not given.
            environment: variables that each rank sets before it imports torch.
            runtime_env: as Ray takes it, for instance with the `py_modules` that nodes lack.
            watch_s: between two looks whether idle ranks live.
            start_timeout_s: for a placement group, for the actors, and for their workers, each.
            collective_timeout_s: of the process group.
        """
        if size < 1:
            raise ValueError(f"RayRanks() got size={size}: 1 or more")
        if ":" not in spec.factory:
            raise ValueError(f"RayRanks() got factory {spec.factory!r}: `package.module:callable`")
        self._spec = spec
        self._size = size
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
        self._start_timeout_s = start_timeout_s
        self._collective_timeout_s = collective_timeout_s
        self._watch_s = watch_s
        self._ray: Any = None
        self._place: Any = None
        self._life: ActorSession | None = None
        self._why_none = "they were not started"
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size

    async def start(self) -> None:
        """See `RankGroup.start`. A placement group that it has is used again.

        Errors: beside those, `ModuleNotFoundError` without Ray and `RuntimeError` without a
            cluster.
        """
        self._ray = ray_cluster.import_ray()
        ray_cluster.check_connected(self._ray, "RayRanks")
        await self._end("they are being started again")
        if self._place is None:
            self._place = await ray_cluster.place(
                self._ray,
                [self._bundle] * self._size,
                strategy=self._strategy,
                timeout_s=self._start_timeout_s,
            )
        life = ActorSession(self._ray, *self._make_actors())
        try:
            await self._bring_up(life)
        except BaseException as error:
            life.end(f"they could not be started: {type(error).__name__}")
            self._why_none = life.lost
            raise
        self._life = life
        self._keep(life.watch(self._watch_s))

    async def call(
        self,
        method: str,
        *args: Any,
        per_rank: Sequence[Any] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """See `RankGroup.call`.

        `timeout_s` counts from when the call has its turn. One that is cancelled before is never
        sent; after that it runs to its end.
        Errors: in addition, `ValueError` where `per_rank` has not one argument for each rank, and
            what pickling the arguments raises.
        """
        check_per_rank(method, per_rank, self._size)
        if self._life is None:
            raise RanksLost(f"there are no ranks: {self._why_none}; start() makes new ones")
        sent = asyncio.Event()
        task = self._keep(self._in_turn(self._life, sent, method, args, per_rank, timeout_s))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not sent.is_set():
                task.cancel()
            raise

    async def close(self) -> None:
        """See `RankGroup.close`. Gives the placement group back."""
        await self._end("they were closed")
        if self._place is not None:
            place, self._place = self._place, None
            await asyncio.to_thread(ray_cluster.remove, self._ray, place)

    async def _in_turn(
        self,
        life: ActorSession,
        sent: asyncio.Event,
        method: str,
        args: tuple[Any, ...],
        per_rank: Sequence[Any] | None,
        timeout_s: float | None,
    ) -> list[Any]:
        async with self._turn:
            life.check()
            if per_rank is None and all(type(each) in _PLAIN for each in args):
                shared, own = self._carried(args, None)
            else:  # what the arguments are like shows only when they are pickled
                shared, own = await asyncio.to_thread(self._carried, args, per_rank)
            life.check()
            sent.set()
            refs = [
                actor.call.remote(method, shared, each)
                for actor, each in zip(life.actors, own, strict=True)
            ]
            return await life.results(method, refs, timeout_s)

    def _carried(self, args: Any, per_rank: Sequence[Any] | None) -> tuple[Any, list[Any]]:
        shared = ray_cluster.carried(args)
        if sum(len(part) for part in shared) > _INLINE:
            shared = self._ray.put(shared)  # once: as an argument it would be copied for each rank
        if per_rank is None:
            return shared, [ray_cluster.carried(())] * self._size
        return shared, [ray_cluster.carried((each,)) for each in per_rank]

    def _make_actors(self) -> tuple[list[Any], list[str]]:
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
        start = uuid.uuid4().hex
        names = [f"megatron-idempotent-{start}-{index}" for index in range(self._size)]
        actors = [
            actor_class.options(
                name=name,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._place, placement_group_bundle_index=index
                ),
                **options,
            ).remote(self._environment)
            for index, name in enumerate(names)
        ]
        return actors, names

    async def _bring_up(self, life: ActorSession) -> None:
        limit_s = self._start_timeout_s
        try:
            seats = await life.gather("seat", [a.seat.remote() for a in life.actors], limit_s)
        except RanksLost as error:
            has = await ray_cluster.resources(self._ray)
            raise RanksLost(f"{error}. The cluster has {has}") from error
        ranks = places(seats, shows_own_gpus="GPU" in self._bundle)
        life.reorder([each.actor for each in ranks])
        address = seats[ranks[0].actor].address
        opening = life.actors[0].open_store.remote(address, self._size, limit_s)
        (port,) = await life.gather("open_store", [opening], limit_s)
        meeting = Meeting(
            address=address, port=port, backend=self._backend, timeout_s=self._collective_timeout_s
        )
        joining = [
            actor.join.remote(each, meeting) for actor, each in zip(life.actors, ranks, strict=True)
        ]
        await life.results("start", joining, limit_s, errors_first=True)
        argument = await asyncio.to_thread(
            lambda: self._ray.put(ray_cluster.carried(self._spec.argument))
        )
        making = [actor.make.remote(self._spec.factory, argument) for actor in life.actors]
        await life.results("start", making, limit_s, errors_first=True)

    async def _end(self, why: str) -> None:
        """End the ranks that there are, and wait for what waits for them."""
        life, self._life, self._why_none = self._life, None, why
        if life is not None:
            life.end(why)
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _keep(self, doing: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.ensure_future(doing)
        self._tasks.add(task)
        task.add_done_callback(self._let_go)
        return task

    def _let_go(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: its caller may have been cancelled
