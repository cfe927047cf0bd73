"""One rank in a Ray actor: its environment, its process group, its worker and the calls on it."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import RankTraceback
from .protocol import WorkerSpec
from .ray_cluster import carried, import_ray, received
from .serve import describe, make_worker, run_method


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
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
class Answer:
    """The result of a call, in parts, or its error. Example: `answer.error is None`."""

    parts: Sequence[Any] = ()
    error: RankTraceback | None = None


def places(seats: Sequence[Seat], *, shows_own_gpus: bool) -> list[Membership]:
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

    def seat(self) -> Seat:
        """Returns the place where it runs."""
        ray = import_ray()
        node = ray.get_runtime_context().get_node_id()
        return Seat(node=node, address=ray.util.get_node_ip_address())

    def open_store(self, address: str, size: int, timeout_s: float) -> int:
        """Rank 0: listen where ranks meet; returns the port, which is taken from now on."""
        self._store = _store(address, 0, size, timeout_s, listens=True)
        return int(self._store.port)

    def join(self, place: Membership, meeting: Meeting) -> Answer:
        """Set the variables that torchrun would, and make the default process group."""
        self._rank = place.rank
        return self._answered(lambda: self._join(place, meeting))

    def make(self, factory: str, argument: Sequence[Any]) -> Answer:
        """Make the worker."""
        return self._answered(lambda: self._make(factory, argument))

    def call(self, method: str, shared: Sequence[Any], own: Sequence[Any]) -> Answer:
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

    def _answered(self, do: Callable[[], Any]) -> Answer:
        try:
            return Answer(parts=carried(do()))
        except BaseException as error:  # noqa: BLE001 - told to the controller, who decides
            return Answer(error=describe(self._rank, error))


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
