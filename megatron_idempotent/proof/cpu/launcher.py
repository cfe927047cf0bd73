"""Runs the launcher: a process that imports once, and then forks fresh ranks for every call.

Fresh ranks make calls independent: model parallel groups, Megatron's globals, RNG trackers,
patches, the environment, all are as after the import. A fork costs milliseconds where the imports
cost seconds. The launcher runs no torch operation and starts no thread, so that forking it is safe.
It ends when its pool's end of the connection closes, and its ranks with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import logging
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from . import huge_pages
from .calls import Call, Outcome
from .errors import NoDeviceError, RankFailure
from .gpu import Device, check_untouched, prepare
from .rank import HEADER, RankSlot, describe, occupy
from .runtime import enable, replaced_name_in

#: Seconds that the peers of a failed rank may go on, so that they can fail for their own reasons.
GRACE_S = 3.0
#: Seconds that ranks get to write their stacks.
STACKS_S = 2.0


#: Huge pages cost a second, and save 10 ms a fork: a pool with so many forks will make more.
_FORKS_OF_A_LONG_LIFE = 40


class PoolGone(Exception):
    """The pool's end of the connection is closed: nobody waits for the ranks any more."""


class Round:
    """Runs one call; `run()` leaves no process, however it ends."""

    def __init__(self, call: Call, connection: Connection) -> None:
        self._call = call
        self._connection = connection
        self._pids: dict[int, int] = {}
        self._pipes: dict[int, int] = {}  # rank → read end of its result pipe
        self._received: dict[int, bytearray] = {}
        self._exit_codes: dict[int, int] = {}
        self._results: dict[int, bytes] = {}
        self._failures: list[RankFailure] = []
        self._first_failure_s = 0.0
        self._stacks: dict[int, str] = {}
        self._release_write = -1

    def run(self) -> Outcome:
        """Fork the ranks, wait for them, and return their outcome.

        Raises:
            PoolGone: the pool has closed the connection meanwhile.
        """
        with tempfile.TemporaryDirectory(prefix="megatron-ranks-") as folder:
            self._folder = Path(folder)
            try:
                self._fork()
                timed_out = self._wait(time.monotonic() + self._call.timeout_s)
            finally:
                self._end()
        return Outcome(
            results=self._results,
            failures=self._failures,
            stacks=self._stacks,
            timed_out=timed_out,
        )

    def _fork(self) -> None:
        release_read, self._release_write = os.pipe()
        with _listening() as store, _listening() as reserved:
            master_port = reserved.getsockname()[1]
            reserved.close()
            for rank in range(self._call.world_size):
                read_fd, write_fd = os.pipe()
                seat = RankSlot(
                    rank=rank,
                    result_fd=write_fd,
                    release_fd=release_read,
                    # The store closes the descriptor it is given.
                    store_fd=os.dup(store.fileno()) if rank == 0 else -1,
                    store_port=store.getsockname()[1],
                    master_port=master_port,
                    stacks_path=str(self._stacks_path(rank)),
                )
                pid = os.fork()
                if pid == 0:
                    occupy(self._call, seat)
                os.close(write_fd)
                if seat.store_fd >= 0:
                    os.close(seat.store_fd)
                os.set_blocking(read_fd, False)
                self._pids[rank] = pid
                self._pipes[rank] = read_fd
                self._received[rank] = bytearray()
        os.close(release_read)

    def _wait(self, deadline_s: float) -> bool:
        """Collect messages until every rank has reported; return True if the deadline passed."""
        while waiting := [rank for rank in self._pids if not self._reported(rank)]:
            if self._failures:
                deadline_s = min(deadline_s, self._first_failure_s + GRACE_S)
            if time.monotonic() >= deadline_s:
                # After a failure only those still running are of interest.
                self._dump(waiting if self._failures else list(self._pids))
                return not self._failures
            watched = [*(self._pipes[rank] for rank in waiting), self._connection.fileno()]
            ready, _, _ = select.select(watched, [], [], 0.02)
            if self._connection.fileno() in ready:
                # The pool sends nothing during a call, so this is the end of the connection.
                raise PoolGone
            for rank in waiting:
                dead = self._has_exited(rank)  # before reading: its last words are in the pipe
                self._read(rank)
                if dead and not self._reported(rank):
                    self._fail(self._death_of(rank))
        return False

    def _reported(self, rank: int) -> bool:
        return rank in self._results or any(f.rank == rank for f in self._failures)

    def _read(self, rank: int) -> None:
        received = self._received[rank]
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._pipes[rank], 1 << 20):
                received += chunk
        if len(received) < HEADER.size:
            return
        kind, length = HEADER.unpack_from(received)
        payload = bytes(received[HEADER.size :])
        if len(payload) < length:
            return
        if kind == b"R":
            self._results[rank] = payload
        else:
            self._fail(pickle.loads(payload))

    def _fail(self, failure: RankFailure) -> None:
        if not self._failures:
            self._first_failure_s = time.monotonic()
        self._failures.append(failure)

    def _has_exited(self, rank: int) -> bool:
        if rank not in self._exit_codes:
            pid, status = os.waitpid(self._pids[rank], os.WNOHANG)
            if pid:
                self._exit_codes[rank] = os.waitstatus_to_exitcode(status)
        return rank in self._exit_codes

    def _death_of(self, rank: int) -> RankFailure:
        # A rank that crashes in C writes its Python stacks (faulthandler) before it dies.
        return RankFailure(
            rank=rank,
            exception_type="",
            message="the process ended without a result",
            traceback=self._written_stacks(rank),
            exit_code=self._exit_codes[rank],
        )

    def _dump(self, ranks: list[int]) -> None:
        """Make `ranks` write their Python stacks, and read them."""
        for rank in ranks:
            if not self._has_exited(rank):
                os.kill(self._pids[rank], signal.SIGUSR1)
        give_up_s = time.monotonic() + STACKS_S
        for rank in ranks:
            text = self._written_stacks(rank)
            while not self._has_exited(rank) and time.monotonic() < give_up_s:
                time.sleep(0.02)
                before, text = text, self._written_stacks(rank)
                if text and text == before:
                    break
            self._stacks[rank] = text or "(it wrote no stacks: stopped, or before its start)"

    def _stacks_path(self, rank: int) -> Path:
        return self._folder / f"stacks-{rank}"

    def _written_stacks(self, rank: int) -> str:
        path = self._stacks_path(rank)
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def _end(self) -> None:
        """Let finished ranks end, kill the others and all that ranks started, and reap them."""
        if self._failures or len(self._results) < self._call.world_size:
            self._kill()
        elif self._release_write >= 0:
            os.write(self._release_write, b"x" * self._call.world_size)
        for rank in self._pids:
            while not self._has_exited(rank):
                time.sleep(0.001)
        self._kill_what_they_started()
        for fd in (*self._pipes.values(), self._release_write):
            if fd >= 0:
                os.close(fd)

    def _kill(self) -> None:
        for rank, pid in self._pids.items():
            if not self._has_exited(rank):
                os.kill(pid, signal.SIGKILL)

    def _kill_what_they_started(self) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):  # nothing left in its process group
                os.killpg(pid, signal.SIGKILL)


def _listening() -> socket.socket:
    """Return a listening socket on a port that the system chose."""
    return socket.create_server(("127.0.0.1", 0), backlog=128)


def main(connection_fd: int, modules: Sequence[str], device: Device = "cpu") -> None:
    """Import `modules`, then serve calls until the connection closes.

    It turns the runtime on before the imports; for ranks on a GPU it leaves it off, and checks that
    no import starts the driver.
    """
    connection = Connection(connection_fd)
    with _ReportTo(connection):
        if device == "cuda":
            prepare()
        else:
            enable()
        for name in modules:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                continue  # a pool without Megatron runs plain torch functions
            if name.count(".") == 0 or _exists(name):
                _import(name)
                if device == "cuda":
                    check_untouched(name)
        _read_ahead()
    # Upstream reports every bucket and setting at level INFO; a call may lower the level again.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Ranks share these pages with us as long as no collection writes into them.
    gc.freeze()
    connection.send("ready")
    forks = 0
    with contextlib.suppress(EOFError, PoolGone, ConnectionResetError, BrokenPipeError):
        while True:
            call = pickle.loads(connection.recv_bytes())
            connection.send(Round(call, connection).run())
            before, forks = forks, forks + call.world_size
            if before < _FORKS_OF_A_LONG_LIFE <= forks:
                huge_pages.collapse()
    # Triton lists what nobody has collected when the interpreter ends.
    gc.unfreeze()


def _import(name: str) -> None:
    """Import a module, unless it needs a package that is not installed."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or importlib.util.find_spec(error.name.partition(".")[0]) is not None:
            raise


def _read_ahead() -> None:
    """Read the code of upstream that patches compare, so that no rank's `apply()` has to."""
    from megatron_idempotent.patching import catalog, decide, source

    for patch in catalog.patches().values():
        decide.check_bodies(patch, named=False)
        for target in patch.targets:
            file = getattr(sys.modules.get(target.module), "__file__", None)
            if file is not None:
                source.kept(file)


def _exists(name: str) -> bool:
    parent, _, _ = name.rpartition(".")
    if parent.count(".") and not _exists(parent):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is a namespace without this part
        return False


class _ReportTo:
    """Tells the pool why the imports failed; it waits for the word "ready"."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, exc_type: object, exc: BaseException | None, tb: object) -> None:
        if exc is not None:
            failure = describe(-1, type(exc), exc, exc.__traceback__)
            if (name := replaced_name_in(exc)) is not None:
                failure = replace(failure, message=f"{exc}; the CPU runtime emulates {name}")
            self._connection.send(failure)
        if isinstance(exc, NoDeviceError):
            raise SystemExit(1)  # the pool says it; a traceback would say no more
