"""Sends buckets over a separate process group: gloo over TCP, or NCCL between devices."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.distributed

from megatron_idempotent.rl.weights.records import Bucket, UpdateDamaged, WeightUpdate

from .base import (
    Announcement,
    Receiver,
    Sender,
    Session,
    TransportError,
    TransportTimeout,
    opened_field,
)
from .layout import BucketLayout

Backend = Literal["gloo", "nccl"]
_LONGEST_S = 1e9
#: Untyped, because torch's stubs lack names that are used here.
dist: Any = torch.distributed
#: Seconds between two polls of an NCCL operation, whose own timeout would end the process.
_POLL_S = 0.001


def _serve(host: str, port: int, timeout_s: float) -> tuple[Any, int]:
    """Start a key-value store (TCPStore) that listens on one address of this machine only; return
    the store and its port.

    Raises:
        TransportError: the address is not this machine's, or the port is in use.
    """
    listening = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
        port = int(listening.getsockname()[1])
        store = _store(host, port, timeout_s, is_master=True, listening=listening.fileno())
        listening.detach()  # the store closes it
    except (OSError, RuntimeError) as error:
        if listening is not None:
            listening.close()
        raise TransportError(
            f"cannot listen at {host!r}, port {port}: {error}; give an address of this machine "
            "that the workers reach, and port=0 for a free port"
        ) from error
    return store, port


def _reach(host: str, port: int, timeout_s: float) -> tuple[Any, str]:
    """Connect to the trainer's key-value store; return the store, and this machine's address on the
    route to it.

    Raises:
        TransportTimeout: the store does not respond.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with contextlib.closing(socket.socket(family, kind)) as probe:
            probe.connect(address)  # UDP: sends nothing
            own_address = str(probe.getsockname()[0])
        return _store(host, port, timeout_s, is_master=False, listening=None), own_address
    except (OSError, RuntimeError, ValueError) as error:  # ValueError for an invalid host name
        raise TransportTimeout(
            f"the trainer does not answer at {host!r}, port {port}, within {timeout_s} s: "
            f"{_first_line(error)}; is the update still open, and can this machine reach that "
            "address?"
        ) from error


def _process_group(
    backend: Backend, store: Any, rank: int, size: int, host: str, timeout_s: float
) -> Any:
    # The constructors, because `init_process_group` would make the default group, and `new_group`
    # needs a default group with all ranks.
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        # NCCL's watchdog ends the process at its timeout; this sender's timeout comes first.
        nccl._timeout = datetime.timedelta(seconds=10 * timeout_s)
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = datetime.timedelta(seconds=timeout_s)
    # By default gloo uses the host name's address, which other machines may not reach.
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def _store(
    host: str, port: int, timeout_s: float, *, is_master: bool, listening: int | None
) -> Any:
    # Without libuv, which in torch 2.6 cannot take over a bound socket.
    return dist.TCPStore(
        host,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=listening,
        use_libuv=False,
    )


def _with_transport_errors(run: Callable[[], None], fact: str, timeout_s: float) -> None:
    """Call `run`; convert an error of torch to `TransportError`, or to `TransportTimeout` if it
    came after `timeout_s` seconds.
    """
    began = time.monotonic()
    try:
        run()
    except TransportError:
        raise
    except RuntimeError as error:
        took_s = time.monotonic() - began
        kind = TransportTimeout if took_s >= timeout_s else TransportError
        # Without the traceback, whose frames refer to the store and the connections: if a caller
        # keeps the error, the other ends would not see that this end is closed. (Frames of a
        # context manager would have the same effect.)
        raise kind(f"{fact} after {took_s:.1f} s: {_first_line(error)}") from (
            error.with_traceback(None)
        )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


KIND = "process_group"


class ProcessGroupSender(Sender):
    """Broadcasts each bucket as one message of bytes, over a process group of the trainer and the
    workers; workers must receive it concurrently.

    The group is created at the first bucket of an update and closed with the update. It is separate
    from the process's other groups, and does not touch `torch.distributed`'s state. There is no
    authentication: use an address of a private network. Tested with gloo; untested with NCCL, which
    needs a separate device for every rank.
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
        """Check and keep the settings; `open()` starts to listen.

        Args:
            address: the address of this machine to listen on, which workers can reach.
            port: the port to listen on; 0 for a free one.
            ranks: the number of the engine's workers.
            backend: "gloo", or "nccl", which uses the current CUDA device of each process.
            timeout_s: the longest wait in seconds for all workers to join, and for each bucket.
        """
        super().__init__()
        if ranks < 1:
            raise ValueError(f"ProcessGroupSender() got ranks={ranks}; allowed: 1 or more")
        if backend not in ("gloo", "nccl"):
            raise ValueError(
                f"ProcessGroupSender() got backend={backend!r}; allowed: 'gloo', 'nccl'"
            )
        if timeout_s <= 0:
            raise ValueError(f"ProcessGroupSender() got timeout_s={timeout_s}; allowed: above 0")
        self._address, self._port = address, port
        self._ranks, self._backend, self._timeout_s = ranks, backend, timeout_s
        self._device = _device(backend)

    def _begin(self, update: WeightUpdate) -> tuple[_Broadcasts, Mapping[str, Any]]:
        store, port = _serve(self._address, self._port, self._timeout_s)
        fields = {
            "host": self._address,
            "port": port,
            "token": secrets.token_hex(8),  # keeps workers of an earlier open() out
            "ranks": self._ranks,
            "backend": self._backend,
            "timeout_s": self._timeout_s,
        }
        return _Broadcasts(store, self._address, fields, rank=0, device=self._device), fields


class _Broadcasts(Session):
    """One end of a transfer, which sends or receives buckets over a process group. It creates the
    group at the first bucket.

    The trainer is rank 0, and workers are ranks 1 and up. A failed operation closes the group, so
    that the other ends notice at once.
    """

    def __init__(
        self, store: Any, host: str, opened: Announcement, *, rank: int, device: int | None
    ) -> None:
        self._store = dist.PrefixStore(str(opened["token"]), store)
        self._host, self._rank, self._device = host, rank, device
        self._ranks, self._backend = int(opened["ranks"]), opened["backend"]
        self._timeout_s = float(opened["timeout_s"])
        self._group: Any = None
        self._flat_N: torch.Tensor | None = None

    def transmit(self, layout: BucketLayout, bucket: Bucket) -> None:
        try:
            self._broadcast(layout, bucket.tensors)
        except TransportError as error:
            raise type(error)(
                f"update {layout.update_id}: bucket {layout.index} was not sent: {error}; close() "
                "the sender, and send the update again from open()"
            ) from error

    def receive(self, layout: BucketLayout) -> Bucket:
        return layout.unpack(self._broadcast(layout, None))

    def close(self) -> None:
        """Drop the process group and the key-value store; the port is free once trainer and workers
        have all done so.
        """
        self._group = self._store = self._flat_N = None

    def _broadcast(
        self, layout: BucketLayout, tensors: Mapping[str, torch.Tensor] | None
    ) -> torch.Tensor:
        """Broadcast a bucket's bytes from the trainer (rank 0) to the workers; return the bytes
        once all ranks have them. A collective.

        Raises:
            TransportTimeout: another rank did not join or finish in time.
            TransportError: another rank is gone.
        """
        if self._store is None:
            raise TransportError("the group has failed before, or is closed")
        if self._device is not None:
            torch.cuda.set_device(self._device)
        try:
            if self._group is None:
                _with_transport_errors(
                    self._join, "the process group was not made", self._timeout_s
                )
            flat_N = self._buffer(layout.nbytes)
            if tensors is not None:
                layout.pack(tensors, flat_N)
            _with_transport_errors(
                lambda: self._exchange(flat_N), "the transfer broke off", self._timeout_s
            )
            return flat_N
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        """Register a worker's rank or, on rank 0, wait for all workers; then create the process
        group.

        Raises:
            TransportTimeout: workers did not join in time; the message has their ranks.
            TransportError: two workers have the same rank.
        """
        keys = {rank: f"joined/{rank}" for rank in range(1, self._ranks + 1)}
        if self._rank and self._store.add(keys[self._rank], 1) > 1:
            raise TransportError(
                f"a second worker joined as rank {self._rank} of {self._ranks}; give each its own "
                "rank"
            )
        try:
            if not self._rank:
                wait = datetime.timedelta(seconds=self._timeout_s)
                self._store.wait(list(keys.values()), wait)
        except RuntimeError as error:
            absent = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise TransportTimeout(
                f"workers {absent} of {self._ranks} did not join within {self._timeout_s} s; were "
                "they given open()'s announcement and a bucket's, and can they reach this address?"
            ) from error
        group_arguments = self._store, self._rank, self._ranks + 1
        self._group = _process_group(self._backend, *group_arguments, self._host, self._timeout_s)

    def _exchange(self, flat_N: torch.Tensor) -> None:
        until = time.monotonic() + self._timeout_s
        self._finish(self._group.broadcast([flat_N]), until)
        # Workers forward the bytes; the all-reduce tells rank 0 that all workers have them.
        everyone = torch.zeros(1, device=flat_N.device)
        self._finish(self._group.allreduce([everyone]), until)

    def _finish(self, work: Any, until: float) -> None:
        if self._backend == "gloo":
            work.wait()  # up to the group's timeout
            return
        while not work.is_completed():
            if time.monotonic() > until:
                self._group.abort()
                raise TransportTimeout(f"no end of the transfer within {self._timeout_s} s")
            time.sleep(_POLL_S)
        work.wait()

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 buffer of `nbytes` on the backend's device. All buckets reuse its memory,
        which grows when a bucket is larger.
        """
        if self._flat_N is None or len(self._flat_N) < nbytes:
            self._flat_N = None
            device = "cuda" if self._backend == "nccl" else "cpu"
            self._flat_N = torch.empty(max(1, nbytes), dtype=torch.uint8, device=device)
        return self._flat_N[: max(1, nbytes)]


class ProcessGroupReceiver(Receiver):
    """Receives the buckets of a `ProcessGroupSender` in a worker, which joins the process group at
    the first bucket. After a failure, make a new receiver.
    """

    def __init__(self, opened: Announcement, *, rank: int) -> None:
        super().__init__(opened)
        self._opened, self._rank = opened, rank
        self._end: _Broadcasts | None = None
        self._closed = False
        kinds = {"host": str, "port": int, "token": str, "ranks": int, "backend": str}
        for key, kind in kinds.items():
            opened_field(opened, key, kind)
        opened_field(opened, "timeout_s", (int, float))
        backend, ranks = opened["backend"], opened["ranks"]
        port, timeout_s = opened["port"], opened["timeout_s"]
        if backend not in get_args(Backend) or port > 65535 or not 0 < timeout_s < _LONGEST_S:
            raise UpdateDamaged(
                f"the sender's announcement has backend {backend[:40]!r}, port {port} and "
                f"timeout_s {timeout_s}; pass on what open() gave"
            )
        self._device = _device(backend)
        if not 1 <= rank <= ranks:
            raise UpdateDamaged(f"receiver() got rank={rank}; this sender has workers 1 to {ranks}")

    def _receive(self, layout: BucketLayout, announced: Announcement) -> Bucket:
        opened = self._opened
        try:
            if self._closed:
                raise TransportError("this receiver is closed")
            if self._end is None:
                address = str(opened["host"]), int(opened["port"])
                store, own_address = _reach(*address, float(opened["timeout_s"]))
                broadcast_arguments = store, own_address, opened
                self._end = _Broadcasts(*broadcast_arguments, rank=self._rank, device=self._device)
            return self._end.receive(layout)
        except TransportError as error:
            raise UpdateDamaged(
                f"update {self._update_id}: bucket {layout.index} did not arrive: {error}; send "
                "the update again"
            ) from error

    def close(self) -> None:
        """Leave the process group, if the worker has joined it. A second call is a no-op."""
        self._closed = True
        if self._end is not None:
            self._end.close()


def _device(backend: Backend) -> int | None:
    """Return the index of the calling thread's current CUDA device for NCCL; None for gloo.

    The transferring thread has another current device.
    """
    if backend != "nccl":
        return None
    if not torch.cuda.is_available():
        raise TransportError(
            f"backend {backend!r} connects GPUs, and this process sees none; use 'gloo'"
        )
    return torch.cuda.current_device()
