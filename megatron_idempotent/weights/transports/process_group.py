"""Buckets over a process group of their own: gloo over TCP, or NCCL from device to device."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_idempotent.weights.errors import UpdateDamaged
from megatron_idempotent.weights.records import Bucket, WeightUpdate

from .base import Announcement
from .errors import TransportError
from .group import Backend, Group, Rendezvous
from .layout import Layout
from .sending import SessionSender

KIND = "process_group"


class ProcessGroupSender(SessionSender):
    """Broadcasts each bucket as one message of bytes; the workers receive while it transmits.

    The group is made at the first bucket of an update and ends with it. It is none of the process's
    other groups, and leaves `torch.distributed`'s state alone. There is no authentication: use an
    address of a private network. Tested with gloo; with NCCL, which needs a device of its own for
    every rank, it has not been run.
    """

    kind = KIND

    def __init__(
        self,
        address: str = "127.0.0.1",
        *,
        port: int = 0,
        ranks: int = 1,
        backend: Backend = "gloo",
        timeout_s: float = 60.0,
    ) -> None:
        """
        Args:
            address: of this machine, as the workers reach it; no other is listened at.
            port: where to meet; 0 for a free one.
            ranks: the engine's workers.
            backend: "nccl" takes the current CUDA device of each process.
            timeout_s: longest wait for all workers to join, and then for each bucket.
        """
        super().__init__()
        if ranks < 1:
            raise ValueError(f"ProcessGroupSender() got ranks={ranks}; 1 or more workers")
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"ProcessGroupSender() got backend={backend!r}: 'gloo' or 'nccl'")
        if timeout_s <= 0:
            raise ValueError(f"ProcessGroupSender() got timeout_s={timeout_s}; above 0")
        self._address, self._port = address, port
        self._ranks, self._backend, self._timeout_s = ranks, backend, timeout_s
        self._device = _device(backend)

    def _begin(self, update: WeightUpdate) -> tuple[_Broadcasts, Mapping[str, Any]]:
        token = secrets.token_hex(8)  # keeps workers of an earlier open() out
        rendezvous, port = Rendezvous.serve(
            self._address, self._port, token=token, timeout_s=self._timeout_s
        )
        session = _Broadcasts(
            rendezvous, rank=0, ranks=self._ranks, backend=self._backend, device=self._device
        )
        return session, {
            "host": self._address,
            "port": port,
            "token": token,
            "ranks": self._ranks,
            "backend": self._backend,
            "timeout_s": self._timeout_s,
        }


class _Broadcasts:
    """Either end of the group, which is made at the first bucket."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        rank: int,
        ranks: int,
        backend: Backend,
        device: int | None,
    ) -> None:
        self._rendezvous: Rendezvous | None = rendezvous
        self._rank, self._ranks, self._backend, self._device = rank, ranks, backend, device
        self._group: Group | None = None
        self._flat_N: torch.Tensor | None = None

    def announce(self, layout: Layout, bucket: Bucket) -> Mapping[str, Any]:
        return {}

    def transmit(self, layout: Layout, bucket: Bucket) -> None:
        try:
            with self._closed_on_failure():
                group = self._joined()
                flat_N = self._buffer(layout.nbytes, group)
                layout.pack(bucket.tensors, flat_N)
                group.broadcast(flat_N)
        except TransportError as error:
            raise type(error)(
                f"update {layout.update_id}: bucket {layout.index} was not sent: {error}; close() "
                "the sender, and send the update again from open()"
            ) from error

    def receive(self, layout: Layout) -> Bucket:
        with self._closed_on_failure():
            group = self._joined()
            flat_N = self._buffer(layout.nbytes, group)
            group.broadcast(flat_N)
            return layout.unpack(flat_N)

    def release(self, index: int) -> None:
        pass

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
        self._group = self._rendezvous = self._flat_N = None

    @contextlib.contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        """Closes the group if the block raises, so that the other ends see it at once."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _joined(self) -> Group:
        if self._rendezvous is None:
            raise TransportError("the group has failed before, or is closed")
        if self._device is not None:
            torch.cuda.set_device(self._device)
        if self._group is None:
            self._group = self._rendezvous.join(
                self._rank, ranks=self._ranks, backend=self._backend
            )
        return self._group

    def _buffer(self, nbytes: int, group: Group) -> torch.Tensor:
        """Returns `nbytes` of memory, the same memory for every bucket."""
        if self._flat_N is None or len(self._flat_N) < nbytes:
            self._flat_N = None
            self._flat_N = torch.empty(max(1, nbytes), dtype=torch.uint8, device=group.device)
        return self._flat_N[: max(1, nbytes)]


class ProcessGroupReceiver:
    """A worker's end; it joins at its first bucket. A failure is final: it needs a new `open`."""

    def __init__(self, opened: Announcement, *, rank: int) -> None:
        self._update_id, self._rank = str(opened["update"]), rank
        self._opened = opened
        self._end: _Broadcasts | None = None
        self._closed = False
        self._device = _device(opened["backend"])
        ranks = int(opened["ranks"])
        if not 1 <= rank <= ranks:
            raise ValueError(f"receiver() got rank={rank}; this sender has workers 1 to {ranks}")

    def receive(self, announced: Announcement) -> Bucket:
        """See `Receiver.receive`. Waits for the sender, up to its `timeout_s`."""
        layout = Layout.from_json(announced, update_id=self._update_id)
        try:
            if self._closed:
                raise TransportError("this receiver is closed")
            if self._end is None:
                self._end = self._reach()
            return self._end.receive(layout)
        except TransportError as error:
            raise UpdateDamaged(
                f"update {self._update_id}: bucket {layout.index} did not come: {error}; send the "
                "update again"
            ) from error

    def _reach(self) -> _Broadcasts:
        opened = self._opened
        rendezvous = Rendezvous.reach(
            str(opened["host"]),
            int(opened["port"]),
            token=str(opened["token"]),
            timeout_s=float(opened["timeout_s"]),
        )
        return _Broadcasts(
            rendezvous,
            rank=self._rank,
            ranks=int(opened["ranks"]),
            backend=opened["backend"],
            device=self._device,
        )

    def close(self) -> None:
        """See `Receiver.close`."""
        self._closed = True
        if self._end is not None:
            self._end.close()


def _device(backend: Backend) -> int | None:
    """The caller's CUDA device: the thread that transfers has a current device of its own."""
    return torch.cuda.current_device() if backend == "nccl" else None
