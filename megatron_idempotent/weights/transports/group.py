"""A process group between a trainer's rank 0 and an engine's workers, beside their own groups."""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
from typing import Any, Literal

import torch
import torch.distributed

from .errors import TransportError, TransportTimeout

Backend = Literal["gloo", "nccl"]
#: Its stubs leave out what is used here.
dist: Any = torch.distributed
#: Between two looks at an NCCL operation, whose own deadline would end the process.
_POLL_S = 0.001


class Rendezvous:
    """The key-value store at which the ends meet, served by the trainer."""

    def __init__(self, store: Any, *, token: str, host: str, timeout_s: float) -> None:
        self._store = dist.PrefixStore(token, store)
        self._host = host
        self._timeout_s = timeout_s

    @classmethod
    def serve(cls, host: str, port: int, *, token: str, timeout_s: float) -> tuple[Rendezvous, int]:
        """Serve it at one address of this machine, and at no other; returns the port too.

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
        """Connects to a trainer's rendezvous. Errors: `TransportTimeout` where nobody answers."""
        try:
            mine = _address_towards(host, port)
            store = _store(host, port, timeout_s, is_master=False, listening=None)
        except (OSError, RuntimeError) as error:
            raise TransportTimeout(
                f"the trainer does not answer at {host!r}, port {port}, within {timeout_s} s: "
                f"{_first_line(error)}"
            ) from error
        return cls(store, token=token, host=mine, timeout_s=timeout_s)

    def join(self, rank: int, *, ranks: int, backend: Backend) -> Group:
        """Meet the others. All enter: the trainer as rank 0, and ranks 1 to `ranks`.

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
            return Group(
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
        """Leave it; the trainer's port is free once its groups are closed too."""
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


class Group:
    """Rank 0 and the workers. A failed operation breaks it for good: close it."""

    def __init__(self, group: Any, *, backend: Backend, timeout_s: float) -> None:
        self._group = group
        self._backend = backend
        self._timeout_s = timeout_s

    @property
    def device(self) -> torch.device:
        """The device that the bytes have to be on."""
        return torch.device("cuda" if self._backend == "nccl" else "cpu")

    def broadcast(self, flat_N: torch.Tensor) -> None:
        """Rank 0's bytes to all, who all enter; returns when all have them.

        Errors: `TransportTimeout`, `TransportError` where another end is gone.
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
        """Leave it; the others see that at once."""
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
    """This machine's address on the route to another; sends nothing."""
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
