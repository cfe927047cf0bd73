"""Runs a policy's ranks on a Ray cluster, as actors: Ray places and starts them, and delivers
calls.

No server of this package is involved. Ray reports a rank that dies in a call; an idle rank is
checked by periodic pings.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import fcntl
import importlib
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .frames import BESIDE, Bytes, Frame, dump, load
from .protocol import RanksLost, WorkerSpec
from .ranks import Ranks
from .served import Served, make_worker

#: Seconds to wait for killed actors.
_END_S = 10.0
#: Seconds per wait for a placement group, which blocks a thread; a cancelled start waits for it.
_SLICE_S = 0.5
_SHORT = 400
#: Seconds for the rendezvous of ranks, and for each collective.
_COLLECTIVE_S = 600.0
#: Seconds between two pings of an idle rank.
_PING_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NodePlacement:
    """The Ray node on which an actor runs, the node's address, and the port of the actor's
    TCPStore. Example: `placement.node`.
    """

    node: str
    """Ray's id of the node."""
    address: str
    """The node's address for other nodes."""
    port: int = 0
    """The port of this actor's TCPStore, for the rendezvous if it becomes rank 0."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """The arguments with which all ranks create their process group: rank 0's address, the backend
    and the timeout. Example: `meeting.backend`.
    """

    rank_0: NodePlacement
    """The placement of rank 0."""
    backend: str
    timeout_s: float
    """Seconds for the rendezvous, and for each collective."""


def places(nodes: Sequence[str], *, shows_own_gpus: bool) -> list[tuple[int, dict[str, str]]]:
    """Assign a rank to each actor, such that the ranks of a node are consecutive.

    Args:
        nodes: the node of each actor.
        shows_own_gpus: True if each rank sees only its own GPUs, as in Ray actors that request
            GPUs. Its local rank is then 0.

    Returns:
        By rank, the index of its actor, and the environment variables that torchrun would set.
    """
    assignments: list[tuple[int, dict[str, str]]] = []
    for node in dict.fromkeys(nodes):
        actors = [index for index, node_of_actor in enumerate(nodes) if node_of_actor == node]
        for local_rank, actor in enumerate(actors):
            variables = {
                "RANK": len(assignments),
                "WORLD_SIZE": len(nodes),
                "LOCAL_RANK": 0 if shows_own_gpus else local_rank,
                "LOCAL_WORLD_SIZE": len(actors),
            }
            assignments.append((actor, {name: str(value) for name, value in variables.items()}))
    return assignments


class RankActor:
    """Runs a rank in a Ray actor; Ray calls its methods one at a time, in the main thread."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Set the variables of `environment`, before torch is imported."""
        os.environ.update(environment)
        self._store: Any = None
        self._served: Any = None
        self._address = ""

    def placement(self, size: int, timeout_s: float) -> NodePlacement:
        """Start a TCPStore, in case this actor becomes rank 0; return this actor's node, address
        and port.
        """
        ray = import_ray()
        address = self._address = ray.util.get_node_ip_address()
        # torch would listen on all addresses.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family, backlog=128)
        port = listening.getsockname()[1]
        self._store = _store(address, port, size, timeout_s, listening)
        node = ray.get_runtime_context().get_node_id()
        return NodePlacement(node=node, address=address, port=port)

    def take(
        self,
        variables: Mapping[str, str],
        meeting: Meeting,
        factory: str,
        argument: Sequence[Bytes],
    ) -> None:
        """Make this actor a rank: set its environment variables, and keep the factory with which a
        later MAKE frame constructs the worker.
        """
        os.environ.update(variables)
        rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])

        def make() -> Any:
            self._join(rank, size, meeting)
            return make_worker(WorkerSpec(factory=factory, argument=load(_copies(argument))))

        self._served = Served(rank, make)

    def answer(self, kind: bytes, parts: Sequence[Bytes]) -> Frame:
        """Execute a frame of the controller on this rank, and return the reply."""
        kind, result = self._served.answer(kind, _copies(parts))
        return kind, _for_ray(result)

    def ping(self) -> None:
        """Do nothing; a reply shows that the rank is alive and idle."""

    def _join(self, rank: int, size: int, meeting: Meeting) -> None:
        """Create torch's default process group on this rank, with rank 0's TCPStore; without GPUs,
        enable the CPU runtime first.
        """
        os.environ.update(MASTER_ADDR=meeting.rank_0.address, MASTER_PORT=str(meeting.rank_0.port))
        import torch

        if not torch.cuda.is_available():
            from megatron_idempotent.proof import cpu

            cpu.enable()
        name = _interface(self._address)
        if name is not None:  # else gloo uses the host name's address, possibly 127.0.0.1
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if rank > 0:
            rank_0 = meeting.rank_0
            self._store = _store(rank_0.address, rank_0.port, size, meeting.timeout_s, None)
        torch.distributed.init_process_group(
            meeting.backend,
            store=self._store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=meeting.timeout_s),
        )


def _interface(address: str) -> str | None:
    """Return the name of the network interface that has this IPv4 address, or None."""
    if sys.platform != "linux":
        return None
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
            try:
                answer = fcntl.ioctl(query, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # the interface has no address
                continue
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return None


#: From <linux/sockios.h>: the request for an interface's address.
_SIOCGIFADDR = 0x8915


def _store(
    address: str, port: int, size: int, timeout_s: float, listening: socket.socket | None
) -> Any:
    """Return a TCPStore. With a `listening` socket, it is a new server, which takes over the
    socket; without one, a client of the server at `address` and `port`.
    """
    import torch.distributed as dist

    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    # Without libuv, which in torch 2.6 cannot take over a bound socket.
    return make(
        address,
        port,
        size,
        is_master=listening is not None,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
        use_libuv=False,
    )


def _for_ray(parts: Sequence[Bytes]) -> list[Any]:
    """Return a frame's parts as arguments for Ray: large ones as out-of-band buffers."""
    return [pickle.PickleBuffer(part) if len(part) >= BESIDE else bytes(part) for part in parts]


def _copies(parts: Sequence[Any]) -> list[Bytes]:
    """Return copies of a frame's parts in writable memory, because Ray's shared memory is
    read-only.
    """
    return [bytearray(part) for part in parts]


class RayRanks(Ranks):
    """Implements `RankGroup` with an actor for each rank, on the Ray cluster that this process is
    connected to.

    The package and the factory's module must be importable on every node. Ranks do not inherit this
    process's patches: the factory must call `megatron_idempotent.apply()`.

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
        """Check and keep the settings; `start` starts the ranks.

        Args:
            spec: the worker that every rank constructs.
            size: the number of ranks.
            num_cpus: the CPUs of each rank, in Ray's units.
            num_gpus: the GPUs of each rank; with 0, ranks run on the CPU runtime (`cpu.enable()`).
            resources: each rank's custom resources, by their names in the cluster.
            strategy: the placement group's strategy; "PACK" fills nodes one after another.
            backend: the process group's backend; None for "nccl" on GPUs and "gloo" without them.
            environment: variables that each rank sets before it imports torch.
            runtime_env: Ray's runtime environment, such as `py_modules` that nodes lack.
            call_timeout_s: seconds for calls without a `timeout_s`; None for no limit.
            start_timeout_s: seconds for each of: the placement group, the actors, their workers.
        """
        super().__init__(size, start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s)
        if ":" not in spec.factory:
            fact = f"RayRanks() got factory={spec.factory!r}"
            raise ValueError(f"{fact}; allowed: package.module:callable")
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

    async def _launch(self) -> list[_ActorLink]:
        """Start an actor for each rank in a placement group, which is reused after an earlier
        start; return a link to each rank.

        Raises:
            RanksLost: the cluster lacks resources, or an actor was lost.
            ModuleNotFoundError: Ray is not installed.
            RuntimeError: Ray is not connected to a cluster.
        """
        self._ray = connected_ray("RayRanks")
        if self._place is None:
            self._place = await self._reserve()
        actors = self._actors = _Actors(self._ray, self._make_actors())
        try:
            return await self._assign(actors)
        except BaseException:
            await actors.end()
            raise

    async def _reserve(self) -> Any:
        """Reserve a placement group with one bundle per rank, and return the group. Raise
        `RanksLost` if the cluster does not provide it in time.

        Raises:
            RanksLost: the cluster did not provide it in time; the message has the requested and the
                available resources. The reservation is cancelled.
        """
        group = self._ray.util.placement_group([self._bundle] * self._size, strategy=self._strategy)
        clock = asyncio.get_running_loop().time
        ends = clock() + self._start_timeout_s
        try:
            # Not `await group.ready()`, which starts a worker in the group to run a task.
            look_s = min(_SLICE_S, self._start_timeout_s)
            while not await asyncio.to_thread(group.wait, look_s):
                if clock() >= ends:
                    bundle = ", ".join(
                        f"{number:g} {kind}" for kind, number in self._bundle.items()
                    )
                    raise RanksLost(
                        f"the Ray cluster has not provided a placement group of {self._size} x "
                        f"({bundle}) ({self._strategy}) within {self._start_timeout_s:g} s; it has "
                        f"{await _resources(self._ray)}. Ask for less, free some, or add nodes"
                    )
        except BaseException:
            _remove(self._ray, group)
            raise
        return group

    async def _assign(self, actors: _Actors) -> list[_ActorLink]:
        """Assign a rank to every actor, tell each actor its rank, and return a link to each
        rank.
        """
        placements = await actors.placements(self._size, self._start_timeout_s)
        nodes = [placement.node for placement in placements]
        ranks = places(nodes, shows_own_gpus="GPU" in self._bundle)
        meeting = Meeting(
            rank_0=placements[ranks[0][0]], backend=self._backend, timeout_s=_COLLECTIVE_S
        )
        parts = await asyncio.to_thread(dump, self._spec.argument)
        # Put once: as a plain argument it would be copied for each rank.
        argument = self._ray.put(_for_ray(parts))
        actors.all = [actors.all[actor] for actor, _ in ranks]
        taking = [
            _future(actor.take.remote(variables, meeting, self._spec.factory, argument))
            for actor, (_, variables) in zip(actors.all, ranks, strict=True)
        ]
        await actors.answers(taking, self._start_timeout_s)
        carrier = _Carrier(self._ray, self._size)
        return [_ActorLink(self._ray, actor, carrier) for actor in actors.all]

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

    async def _end(self, rank: int | None) -> str:
        actors, self._actors = self._actors, None
        if actors is not None:
            await actors.end()
        return ""  # the link's error has all that Ray knows

    async def _release(self) -> None:
        """Remove the placement group from the Ray cluster."""
        if self._place is not None:
            group, self._place = self._place, None
            await asyncio.to_thread(_remove, self._ray, group)


class _Actors:
    """The Ray actors that one `start` created; sorted by rank once ranks are assigned."""

    def __init__(self, ray: Any, actors: Sequence[Any]) -> None:
        self._ray = ray
        self.all = list(actors)

    async def placements(self, size: int, timeout_s: float) -> list[NodePlacement]:
        """Make each actor start a TCPStore, and return the node, address and port of each actor.

        Raises:
            RanksLost: as in `answers`.
        """
        replies = [_future(actor.placement.remote(size, timeout_s)) for actor in self.all]
        return await self.answers(replies, timeout_s)

    async def answers(self, replies: Sequence[asyncio.Future[Any]], timeout_s: float) -> list[Any]:
        """Wait up to `timeout_s` seconds for a reply of every actor, and return the replies. Raise
        `RanksLost` if an actor fails or does not reply.

        Raises:
            RanksLost: an actor was lost or did not reply in time; the message has the cluster's
                resources.
        """
        await asyncio.wait(replies, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        lost = [
            f"actor {i} was lost: {reason}"
            for i, reply in enumerate(replies)
            if (reason := _failure_of(reply))
        ]
        if not lost:
            silent = [index for index, reply in enumerate(replies) if not reply.done()]
            lost = [f"actors {silent} did not come within {timeout_s:g} s"] if silent else []
        if lost:
            raise RanksLost(
                f"the ranks could not be started: {lost[0]}. The cluster has "
                f"{await _resources(self._ray)}"
            )
        return [reply.result() for reply in replies]

    async def end(self) -> None:
        """Kill all actors, and wait up to `_END_S` seconds until Ray reports their end."""
        if not self._ray.is_initialized():  # else Ray would start a cluster
            return
        last = [_future(actor.ping.remote()) for actor in self.all]
        for actor in self.all:
            with contextlib.suppress(self._ray.exceptions.RayError, RuntimeError, ValueError):
                self._ray.kill(actor, no_restart=True)
        await asyncio.wait(last, timeout=_END_S)


class _Carrier:
    """Puts the large arguments of a call into Ray's object store, once for all ranks."""

    def __init__(self, ray: Any, size: int) -> None:
        self._ray, self._size = ray, size
        self._last: tuple[Sequence[Bytes], asyncio.Future[Any], list[None]] | None = None

    async def carried(self, parts: Sequence[Bytes]) -> Any:
        """Return a call's parts as an argument of an actor's method: directly if they are small, or
        else as a reference to Ray's object store, to which they are copied once for all ranks.
        """
        if sum(map(len, parts)) < BESIDE:
            return _for_ray(parts)
        if self._last is None or self._last[0] is not parts:
            put = asyncio.to_thread(self._ray.put, _for_ray(parts))
            putting: asyncio.Future[Any] = asyncio.ensure_future(put)
            self._last = (parts, putting, [])
        _, putting, uses = self._last
        uses.append(None)
        if len(uses) == self._size:  # else a large argument stays in memory until the next call
            self._last = None
        return await asyncio.shield(putting)


class _ActorLink:
    """Connects the controller to a rank in a Ray actor: implements `ranks.Link` with calls of the
    actor's methods.
    """

    def __init__(self, ray: Any, actor: Any, carrier: _Carrier) -> None:
        self.on_end: Callable[[], None] | None = None
        self.ended = ""
        self._ray, self._actor, self._carrier = ray, actor, carrier
        self._asking = 0
        self._pings = asyncio.get_running_loop().create_task(self._ping())

    async def ask(self, kind: bytes, parts: Sequence[Bytes]) -> Frame:
        """Send a frame to the actor, and return the reply; see `ranks.Link.ask`."""
        self._asking += 1
        try:
            carried = await self._carrier.carried(parts)
            answered, result = await self._answer(lambda: self._actor.answer.remote(kind, carried))
        finally:
            self._asking -= 1
        if sum(map(len, result)) < BESIDE:
            return answered, _copies(result)
        return answered, await asyncio.to_thread(_copies, result)

    async def leave(self) -> None:
        """Do nothing: killing an idle actor loses nothing."""

    def shut(self) -> None:
        """End the pings of the actor, without calling `on_end`; `_Actors.end` kills the actor."""
        self.on_end = None
        self._end("it was ended")

    async def closed(self) -> None:
        """Wait until the task that pings the actor has ended."""
        await asyncio.wait([self._pings])

    async def _ping(self) -> None:
        while not self.ended:
            await asyncio.sleep(_PING_S)
            if not self._asking:
                await self._answer(self._actor.ping.remote)

    async def _answer(self, call: Callable[[], Any]) -> Any:
        """Run `call`, which calls the actor's method, and return the reply. If the actor is lost,
        report that the link has ended, and never return: the caller then cancels this coroutine.
        """
        try:
            answer = _future(call())
            await asyncio.wait([answer])
            reason = _failure_of(answer)
        except (self._ray.exceptions.RayError, RuntimeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
        if not reason:
            return answer.result()
        self._end(reason)
        return await asyncio.get_running_loop().create_future()

    def _end(self, reason: str) -> None:
        if not self.ended:
            self.ended = reason
            self._pings.cancel()
            if self.on_end is not None:
                self.on_end()


def _failure_of(future: asyncio.Future[Any]) -> str:
    """Return the error of a future as one line of text, with the middle of a long text cut out;
    empty if the future has no error or is not done.
    """
    error = future.exception() if future.done() else None
    if error is None:
        return ""
    words = " ".join(str(error).split())
    if len(words) > 2 * _SHORT:  # the start has the actor, the end the reason
        words = f"{words[:_SHORT]} ... {words[-_SHORT:]}"
    return f"{type(error).__name__}: {words}"


def import_ray() -> Any:
    """Import Ray and return the module; the error for a missing Ray says how to install it.

    Raises:
        ModuleNotFoundError: Ray is not installed; the message says how to install it.
    """
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


def connected_ray(caller: str) -> Any:
    """Return the `ray` module; raise `RuntimeError` unless this process is connected to a cluster.

    `caller` is the name of the class that needs Ray, for errors.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        RuntimeError: Ray is not connected to a cluster.
    """
    ray = import_ray()
    if not ray.is_initialized():
        raise RuntimeError(
            f"{caller} needs a Ray cluster and this process has none; call ray.init() first, with "
            'address="auto" on a node of a running cluster'
        )
    return ray


async def _resources(ray: Any) -> str:
    """Return a text with the cluster's number of nodes and its free and total CPUs and GPUs, for an
    error.
    """
    free, total = await asyncio.gather(
        asyncio.to_thread(ray.available_resources), asyncio.to_thread(ray.cluster_resources)
    )
    nodes = sum(node["Alive"] for node in await asyncio.to_thread(ray.nodes))
    kinds = [kind for kind in ("CPU", "GPU") if total.get(kind)]
    listed = ", ".join(f"{free.get(kind, 0):g} of {total[kind]:g} {kind} free" for kind in kinds)
    return f"{nodes} nodes with {listed or 'no CPU and no GPU'}"


def _remove(ray: Any, group: Any) -> None:
    """Remove a placement group; do nothing if the cluster is gone."""
    if not ray.is_initialized():  # else Ray would start one
        return
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
        ray.util.remove_placement_group(group)


def _future(ref: Any) -> asyncio.Future[Any]:
    """Return a future of the result of a Ray object reference. If nobody retrieves the future's
    error, asyncio logs no warning.

    Wait for it with `asyncio.wait`, which does not cancel it.
    """
    future: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return future
