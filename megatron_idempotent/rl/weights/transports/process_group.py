"""Sends buckets over a process group of their own: gloo over TCP, or NCCL between devices."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed

from megatron_idempotent.rl.weights.records import Bucket, UpdateDamaged, WeightUpdate

from .base import Announcement, SessionSender, TransportError, TransportTimeout
from .layout import BucketLayout

Backend = Literal["gloo", "nccl"]
#: Its stubs leave out what is used here.
dist: Any = torch.distributed
#: Time between two looks at an NCCL operation, whose own deadline would end the process.
_POLL_S = 0.001


class Rendezvous:
    """Lets both ends meet at a key-value store, which the trainer serves."""

    def __init__(self, store: Any, *, token: str, host: str, timeout_s: float) -> None:
        self._store = dist.PrefixStore(token, store)
        self._host = host
        self._timeout_s = timeout_s

    @classmethod
    def serve(cls, host: str, port: int, *, token: str, timeout_s: float) -> tuple[Rendezvous, int]:
        """Serve the store at one address of this machine, and at no other; return the port too.

        Errors: `TransportError` for an address that is not this machine's, or is taken.
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
        return cls(store, token=token, host=host, timeout_s=timeout_s), port

    @classmethod
    def reach(cls, host: str, port: int, *, token: str, timeout_s: float) -> Rendezvous:
        """Connect to a trainer's store. Errors: `TransportTimeout` if it does not answer."""
        try:
            mine = _address_towards(host, port)
            store = _store(host, port, timeout_s, is_master=False, listening=None)
        except (OSError, RuntimeError) as error:
            raise TransportTimeout(
                f"the trainer does not answer at {host!r}, port {port}, within {timeout_s} s: "
                f"{_first_line(error)}; is the update still open, and can this machine reach that "
                "address?"
            ) from error
        return cls(store, token=token, host=mine, timeout_s=timeout_s)

    def join(self, rank: int, *, ranks: int, backend: Backend) -> TransferGroup:
        """Meet the others, and return their group. The trainer enters as rank 0, and workers 1 on.

        Errors: `TransportTimeout` naming who did not come; `TransportError`.
        """
        began = time.monotonic()
        try:
            if rank == 0:
                self._wait_for_workers(ranks)
            elif self._store.add(f"joined/{rank}", 1) > 1:
                raise TransportError(
                    f"a second worker joined as rank {rank} of {ranks}; give each its own rank"
                )
            return TransferGroup(
                _process_group(backend, self._store, rank, ranks + 1, self._host, self._timeout_s),
                backend=backend,
                timeout_s=self._timeout_s,
            )
        except TransportError:
            raise
        except RuntimeError as error:
            # Without its traceback, which holds the store.
            raise _told(error, "the process group was not made", began, self._timeout_s) from (
                error.with_traceback(None)
            )

    def close(self) -> None:
        """Leave the store; the trainer's port is free once its groups are closed too."""
        self._store = None

    def _wait_for_workers(self, ranks: int) -> None:
        keys = {rank: f"joined/{rank}" for rank in range(1, ranks + 1)}
        try:
            self._store.wait(list(keys.values()), datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            absent = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise TransportTimeout(
                f"workers {absent} of {ranks} did not join within {self._timeout_s} s; were they "
                "given open()'s announcement and a bucket's, and can they reach this address?"
            ) from error


class TransferGroup:
    """Connects rank 0 and the workers. A failed operation breaks the group for good: close it."""

    def __init__(self, group: Any, *, backend: Backend, timeout_s: float) -> None:
        self._group = group
        self._backend = backend
        self._timeout_s = timeout_s

    @property
    def device(self) -> torch.device:
        """The device that the bytes have to be on."""
        return torch.device("cuda" if self._backend == "nccl" else "cpu")

    def broadcast(self, flat_N: torch.Tensor) -> None:
        """Send rank 0's bytes to all ranks; all enter, and return when all have them.

        Errors: `TransportTimeout`; `TransportError` if another end is gone.
        """
        began = time.monotonic()
        try:
            self._finish(self._group.broadcast([flat_N]), began)
            # Workers pass the bytes on to others; this tells rank 0 that the last one has them.
            everyone = torch.zeros(1, device=flat_N.device)
            self._finish(self._group.allreduce([everyone]), began)
        except TransportError:
            raise
        except RuntimeError as error:
            # Without its traceback, which holds the operation and with it the connections: an error
            # that somebody keeps would keep the others from seeing that this end is gone.
            raise _told(error, "the transfer broke off", began, self._timeout_s) from (
                error.with_traceback(None)
            )

    def _finish(self, work: Any, began: float) -> None:
        if self._backend == "gloo":
            work.wait()  # up to the timeout that the group was made with
            return
        while not work.is_completed():
            if time.monotonic() - began > self._timeout_s:
                self._group.abort()
                raise TransportTimeout(f"no end of the transfer within {self._timeout_s} s")
            time.sleep(_POLL_S)
        work.wait()

    def close(self) -> None:
        """Leave the group; the others see that at once."""
        self._group = None


def _process_group(
    backend: Backend, store: Any, rank: int, size: int, host: str, timeout_s: float
) -> Any:
    # The classes themselves: `init_process_group` would take the default group, and `new_group`
    # needs one that has all ranks in it.
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        # NCCL's watchdog ends the process at its deadline; ours comes first.
        nccl._timeout = datetime.timedelta(seconds=10 * timeout_s)
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = datetime.timedelta(seconds=timeout_s)
    # By default gloo takes what the host's name resolves to, which others may not reach.
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def _store(
    host: str, port: int, timeout_s: float, *, is_master: bool, listening: int | None
) -> Any:
    # Not libuv's, which in torch 2.6 takes no socket that is bound already.
    return dist.TCPStore(
        host,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=listening,
        use_libuv=False,
    )


def _address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to another; send nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, kind)) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _told(error: Exception, fact: str, began: float, timeout_s: float) -> TransportError:
    late = time.monotonic() - began >= timeout_s
    kind = TransportTimeout if late else TransportError
    return kind(f"{fact} after {time.monotonic() - began:.1f} s: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


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
            address: the address of this machine that workers reach; it listens at no other.
            port: the port to meet at; 0 for a free one.
            ranks: the number of the engine's workers.
            backend: "gloo", or "nccl", which takes the current CUDA device of each process.
            timeout_s: longest wait in seconds for all workers to join, and then for each bucket.
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
    """Sends or receives buckets over the group, which is made at the first one."""

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
        self._group: TransferGroup | None = None
        self._flat_N: torch.Tensor | None = None

    def announce(self, layout: BucketLayout, bucket: Bucket) -> Mapping[str, Any]:
        return {}

    def transmit(self, layout: BucketLayout, bucket: Bucket) -> None:
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

    def receive(self, layout: BucketLayout) -> Bucket:
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
        """Close the group if the block raises, so that the other ends see it at once."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _joined(self) -> TransferGroup:
        if self._rendezvous is None:
            raise TransportError("the group has failed before, or is closed")
        if self._device is not None:
            torch.cuda.set_device(self._device)
        if self._group is None:
            self._group = self._rendezvous.join(
                self._rank, ranks=self._ranks, backend=self._backend
            )
        return self._group

    def _buffer(self, nbytes: int, group: TransferGroup) -> torch.Tensor:
        """Return `nbytes` of memory, the same memory for every bucket."""
        if self._flat_N is None or len(self._flat_N) < nbytes:
            self._flat_N = None
            self._flat_N = torch.empty(max(1, nbytes), dtype=torch.uint8, device=group.device)
        return self._flat_N[: max(1, nbytes)]


class ProcessGroupReceiver:
    """Receives buckets in a worker, which joins at the first one; a failure needs a new `open`."""

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
        layout = BucketLayout.from_json(announced, update_id=self._update_id)
        try:
            if self._closed:
                raise TransportError("this receiver is closed")
            if self._end is None:
                self._end = self._reach()
            return self._end.receive(layout)
        except TransportError as error:
            raise UpdateDamaged(
                f"update {self._update_id}: bucket {layout.index} did not arrive: {error}; send "
                "the update again"
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
    """Return the caller's CUDA device.

    The thread that transfers has a current device of its own.
    """
    return torch.cuda.current_device() if backend == "nccl" else None
