"""Runs one rank: a process that the launcher forked for one call, and that ends with it."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from . import gpu
from .calls import Call, PicklableStruct, dump_result, load_arguments, resolve
from .errors import RankFailure

_PR_SET_PDEATHSIG = 1
#: A message's kind (R result, F failure), and the length of its payload.
HEADER = PicklableStruct("!cQ")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSlot:
    """Holds the data that the launcher gives to one rank."""

    rank: int
    #: The write end of the pipe for this rank's message: HEADER, then the payload.
    result_fd: int
    #: A pipe from which each rank can read one byte once all are done.
    release_fd: int
    #: A listening socket for rank 0's store; its port is `store_port`.
    store_fd: int
    store_port: int
    #: A port that was free at the fork, for programs that initialise torch.distributed themselves.
    master_port: int
    stacks_path: str


def occupy(call: Call, seat: RankSlot) -> None:
    """Run the call as one rank and end the process; do not return."""
    # Its own process group, so that ending a rank ends what it started too.
    os.setpgrp()
    _die_with_the_launcher()
    with open(seat.stacks_path, "w", encoding="utf-8") as stacks, _Reporter(seat) as reporter:
        faulthandler.enable(file=stacks, all_threads=True)  # a crash in C
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # a hang
        _settle(call, seat)
        function = resolve(call.function)
        args, kwargs = load_arguments(call)
        if call.distributed:
            _join_default_group(call, seat)
        with _checks(call):
            result = function(*args, **kwargs)
        reporter.payload = dump_result(result)


def _checks(call: Call) -> AbstractContextManager[None]:
    if call.device != "checked":
        return contextlib.nullcontext()
    from .checked import checking

    return checking()


class _Reporter:
    """Sends the result, or the exception that ends the block, and then ends the process."""

    def __init__(self, seat: RankSlot) -> None:
        self._seat = seat
        self.payload = b""

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if exc_type is not None and exc is not None:
            failure = describe(self._seat.rank, exc_type, exc, tb)
            kind, payload = b"F", pickle.dumps(failure)
        else:
            kind, payload = b"R", self.payload
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        with open(self._seat.result_fd, "wb", closefd=False) as out:
            out.write(HEADER.pack(kind, len(payload)) + payload)
        if exc_type is None:
            # Rank 0 holds the store and every rank a socket that its peers may still read.
            os.read(self._seat.release_fd, 1)
        # Not sys.exit: exit handlers inherited from the launcher are not this process's to run.
        os._exit(0)


def describe(
    rank: int, exc_type: type[BaseException], exc: BaseException, tb: TracebackType | None
) -> RankFailure:
    """Return the record of an exception on a rank."""
    name = exc_type.__qualname__
    if exc_type.__module__ != "builtins":
        name = f"{exc_type.__module__}.{name}"
    text = "".join(traceback.format_exception(exc_type, exc, tb))
    return RankFailure(rank=rank, exception_type=name, message=str(exc), traceback=text)


def _flush(stream: IO[str] | None) -> None:
    if stream is not None:
        with contextlib.suppress(ValueError, OSError):  # closed by the function that ran
            stream.flush()


def _die_with_the_launcher() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _settle(call: Call, seat: RankSlot) -> None:
    os.environ.clear()
    os.environ.update(call.environ)
    os.environ.update(
        RANK=str(seat.rank),
        LOCAL_RANK=str(seat.rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_WORLD_SIZE=str(call.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(seat.master_port),
    )
    if call.device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Megatron asks for 1 before it accepts tensor parallelism with overlap.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Without it gloo resolves the host name, which may be slow or wrong in a container.
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # For a log line, torch asks for the name of each peer's address, which no hosts file has. A
    # name server that loses the question would cost 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")
    sys.path[:] = call.sys_path
    os.chdir(call.cwd)

    import torch

    torch.set_num_threads(1)
    if call.device == "cuda":
        gpu.settle(seat.rank, call.world_size)
    else:
        torch.cuda.set_device(seat.rank)


def _join_default_group(call: Call, seat: RankSlot) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    # Longer than the deadline: a hang is the launcher's to report, with the stacks of all ranks.
    timeout = datetime.timedelta(seconds=call.timeout_s + 60.0)
    is_master = seat.rank == 0
    store = TCPStore(
        "127.0.0.1",
        seat.store_port,
        call.world_size,
        is_master,
        timeout,
        wait_for_workers=False,
        master_listen_fd=seat.store_fd if is_master else None,
        use_libuv=False,
    )
    how = gpu.group_options(call.world_size) if call.device == "cuda" else {"backend": "gloo"}
    dist.init_process_group(
        store=store, rank=seat.rank, world_size=call.world_size, timeout=timeout, **how
    )
    # Rank 0 holds the store: if it raised and left while another rank still joins, that rank would
    # report a broken connection in place of its own error.
    dist.barrier()
