"""Shards to rank 0, point to point: each crosses once, and rank 0 keeps whole tensors only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_idempotent.weights.records import TensorInfo

from .plan import Held, Part, Plan


class Shipping:
    """Fetches tensors of a plan, as `BucketStream` asks for them.

    Rows go straight from a parameter into the tensor that they are of. What has no consecutive
    bytes, or another type, is packed first: never more than the largest such part at a time, and on
    rank 0 never more than the largest tensor.
    """

    def __init__(
        self,
        plan: Plan,
        infos: tuple[TensorInfo, ...],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            plan: of `make_plan`.
            infos: of the tensors as they are to arrive.
            device: where rank 0 wants them.
            group: the plan's; None for the default group.
        """
        self._plan, self._infos, self._device, self._group = plan, infos, device, group
        self._rank = dist.get_rank(group) if dist.is_initialized() else 0
        self._largest = max((info.nbytes for info in infos), default=0)
        mine = (
            _bytes_of(info, part)
            for info, parts in zip(infos, plan.parts, strict=True)
            for part in parts
            if part.rank == self._rank
        )
        self._packing = max(mine, default=0)

    @property
    def keeps(self) -> bool:
        """True on the rank at which tensors arrive."""
        return self._rank == 0

    def __call__(self, members: range) -> Mapping[str, torch.Tensor]:
        """The tensors, whole, on rank 0; nothing on others."""
        return self._receive(members) if self._rank == 0 else self._send(members)

    def _send(self, members: range) -> Mapping[str, torch.Tensor]:
        flight = _Flight(self._packing, self._group)
        for member in members:
            for part in self._plan.parts[member]:
                if part.rank == self._rank:
                    self._send_part(self._infos[member], part, flight)
        flight.land()
        return {}

    def _send_part(self, info: TensorInfo, part: Part, flight: _Flight) -> None:
        held = self._held(info, part)
        rows = _consecutive(held)
        if rows is None or rows.dtype != info.dtype:
            rows = flight.room(_shape_of(info, part), info.dtype, held.placed.parameter.device)
            _copy(held, rows)
        flight.add(dist.isend, rows, 0)

    def _receive(self, members: range) -> Mapping[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        flight = _Flight(self._largest, self._group)
        for member in members:
            info = self._infos[member]
            tensors[info.name] = torch.empty(info.shape, dtype=info.dtype, device=self._device)
            for part in self._plan.parts[member]:
                self._receive_part(info, part, flight, tensors[info.name])
        flight.land()
        return tensors

    def _receive_part(
        self, info: TensorInfo, part: Part, flight: _Flight, whole: torch.Tensor
    ) -> None:
        rows = whole.narrow(part.dim, part.start, part.size)
        if part.rank == self._rank:
            _copy(self._held(info, part), rows)
        elif rows.is_contiguous():
            flight.add(dist.irecv, rows, part.rank)
        else:
            packed = flight.room(_shape_of(info, part), info.dtype, self._device)
            flight.add(dist.irecv, packed, part.rank, into=rows)

    def _held(self, info: TensorInfo, part: Part) -> Held:
        return self._plan.held[(info.name, part.dim, part.start, part.size)]


class _Flight:
    """Messages under way, and the memory that is packed for them."""

    def __init__(self, most: int, group: dist.ProcessGroup | None) -> None:
        self._most, self._packed, self._group = most, 0, group
        self._messages: list[dist.P2POp] = []
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []

    def room(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a part that is packed; waits for those before it where there is too little."""
        size = math.prod(shape) * dtype.itemsize
        if self._packed + size > self._most:
            self.land()
        self._packed += size
        return torch.empty(shape, dtype=dtype, device=device)

    def add(
        self,
        way: Callable[..., Any],
        rows: torch.Tensor,
        peer: int,
        into: torch.Tensor | None = None,
    ) -> None:
        flat = rows.reshape(-1).view(torch.uint8)  # as bytes: backends do not take all types
        self._messages.append(dist.P2POp(way, flat, group=self._group, group_peer=peer))
        if into is not None:
            self._arriving.append((rows, into))

    def land(self) -> None:
        """Wait for all, and put in place what came packed."""
        if self._messages:
            for work in dist.batch_isend_irecv(self._messages):
                work.wait()
        for packed, into in self._arriving:
            into.copy_(packed)
        self._messages.clear()
        self._arriving.clear()
        self._packed = 0


def _consecutive(held: Held) -> torch.Tensor | None:
    """The share where it is consecutive in memory."""
    (start, size), *others = held.share.segments
    rows = held.placed.view.narrow(held.share.dim, start, size)
    return rows if not others and rows.is_contiguous() else None


def _copy(held: Held, into: torch.Tensor) -> None:
    at, dim, view = 0, held.share.dim, held.placed.view
    for start, size in held.share.segments:
        into.narrow(dim, at, size).copy_(view.narrow(dim, start, size))
        at += size


def _shape_of(info: TensorInfo, part: Part) -> list[int]:
    shape = list(info.shape)
    shape[part.dim] = part.size
    return shape


def _bytes_of(info: TensorInfo, part: Part) -> int:
    return info.nbytes // info.shape[part.dim] * part.size
