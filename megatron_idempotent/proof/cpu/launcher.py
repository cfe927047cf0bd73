"""Runs the launcher: a process that imports once, and then forks fresh ranks for every call.

Fresh ranks make calls independent: model parallel groups, Megatron's globals, RNG trackers,
patches, the environment, all are as after the import. A fork costs milliseconds where the imports
cost seconds. The launcher runs no torch operation and starts no thread, so that forking it is safe.
It ends when its pool's end of the connection closes, and its ranks with it. Processes that a rank
has started end with it, even if it is killed, and even in another process group or session: the
launcher adopts them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from importlib import metadata
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from . import gpu
from .errors import NoDeviceError, RankFailure
from .gpu import Device, check_untouched, prepare
from .memory import clear_tables_of_dynamo, collapse_pages, fill_holes, lay_names_together
from .pool import (
    MARK,
    Call,
    Outcome,
    RewritingFinder,
    dump_result,
    receive_pipes,
    resolve,
    send_pipes,
)
from .runtime import enable, replaced_name_in

#: Seconds that the peers of a failed rank may go on, so that they can fail for their own reasons.
GRACE_S = 3.0
#: Seconds that ranks get to write their stacks.
STACKS_S = 2.0
#: Huge pages cost a second, and save 10 ms a fork: pools get them after this many forks.
_FORKS_OF_A_LONG_LIFE = 40
#: Thresholds of garbage collection during the imports, which take a sixth less time with them.
_WHILE_IMPORTING = (50_000, 20, 100)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class PoolGone(Exception):
    """Raised when the pool has closed its end of the connection: nobody waits for the ranks any
    more.
    """


class ForkedCall:
    """Runs one call on ranks that it forks. When `run()` returns or raises, all ranks and the
    processes that they started have ended.
    """

    def __init__(self, call: Call, connection: Connection, pipes: Sequence[int] = ()) -> None:
        self._call = call
        self._connection = connection
        self._pipes = pipes
        self._earlier_children = children()
        self._pids: dict[int, int] = {}
        self._ranks: dict[int, Connection] = {}
        self._exit_codes: dict[int, int] = {}
        self._first_failure_s = 0.0
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Fork the ranks, wait until they have finished or failed, and return the `Outcome` of the
        call.

        Raises:
            PoolGone: the pool has closed the connection meanwhile.
        """
        with contextlib.ExitStack() as stack:
            # Unnamed files leave nothing behind, however this process ends.
            self._stacks = [
                stack.enter_context(tempfile.TemporaryFile()).fileno()
                for _ in range(self._call.world_size)
            ]
            try:
                self._fork()
                self._outcome.timed_out = self._wait(time.monotonic())
            finally:
                self._end()
        return self._outcome

    def _fork(self) -> None:
        with _listening() as store, _listening() as reserved:
            master_port = reserved.getsockname()[1]
            reserved.close()
            for rank in range(self._call.world_size):
                parent_end, child_end = Pipe()
                setup = RankSetup(
                    rank=rank,
                    connection=child_end,
                    # The store closes the descriptor it is given.
                    store_fd=os.dup(store.fileno()) if rank == 0 else -1,
                    store_port=store.getsockname()[1],
                    master_port=master_port,
                    stacks_fd=self._stacks[rank],
                    pipe_fd=self._pipes[rank] if self._pipes else -1,
                )
                pid = os.fork()
                if pid == 0:
                    store.close()  # or its port would outlive rank 0
                    self._connection.close()  # or the pool would not see the launcher end
                    for descriptor in self._pipes:
                        if descriptor != setup.pipe_fd:  # or another rank's end would go unseen
                            os.close(descriptor)
                    run_rank(self._call, setup)
                child_end.close()
                if setup.store_fd >= 0:
                    os.close(setup.store_fd)
                self._pids[rank], self._ranks[rank] = pid, parent_end
        for descriptor in self._pipes:
            os.close(descriptor)

    def _wait(self, begun_s: float) -> bool:
        """Collect messages until every rank has reported, or time is up. Return True if the
        deadline passed without a failure, False otherwise.
        """
        deadline_s, last_s = begun_s + self._call.timeout_s, begun_s + self._call.longest_s
        while waiting := [rank for rank in self._pids if not self._reported(rank)]:
            if self._outcome.failures:
                deadline_s = last_s = min(deadline_s, self._first_failure_s + GRACE_S)
            late_s = time.monotonic() - deadline_s
            # A rank that hangs waits for a peer, and not for a processor.
            if late_s >= 0.0 and late_s >= min(
                last_s - deadline_s, sum(map(unserved_s, self._pids.values()))
            ):
                # After a failure only those still running are of interest.
                self._dump(waiting if self._outcome.failures else list(self._pids))
                return not self._outcome.failures
            ready = wait([*(self._ranks[rank] for rank in waiting), self._connection], 0.02)
            if self._connection in ready:
                # The pool sends nothing during a call, so this is the end of the connection.
                raise PoolGone
            for rank in waiting:
                dead = self._has_exited(rank)  # before reading: its result may be in the pipe
                self._read(rank)
                if dead and not self._reported(rank):
                    self._fail(
                        RankFailure(
                            rank=rank,
                            exception_type="",
                            message="the process ended without a result",
                            # In a crash in C, faulthandler writes Python's stacks.
                            traceback=self._written_stacks(rank),
                            exit_code=self._exit_codes[rank],
                        )
                    )
        return False

    def _reported(self, rank: int) -> bool:
        return rank in self._outcome.results or any(f.rank == rank for f in self._outcome.failures)

    def _read(self, rank: int) -> None:
        # A rank that dies while writing shows up as EOF; its death is reported.
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self._ranks[rank].poll():
                kind, payload = (self._ranks[rank].recv_bytes() for _ in range(2))
                if kind == b"R":
                    self._outcome.results[rank] = payload
                else:
                    self._fail(pickle.loads(payload))

    def _fail(self, failure: RankFailure) -> None:
        if not self._outcome.failures:
            self._first_failure_s = time.monotonic()
        self._outcome.failures.append(failure)

    def _has_exited(self, rank: int) -> bool:
        if rank not in self._exit_codes:
            pid, status = os.waitpid(self._pids[rank], os.WNOHANG)
            if pid:
                self._exit_codes[rank] = os.waitstatus_to_exitcode(status)
        return rank in self._exit_codes

    def _dump(self, ranks: list[int]) -> None:
        """Signal the processes of `ranks` to write their Python stacks, wait until these are
        complete or `STACKS_S` seconds are over, and keep each rank's text in `stacks` of the
        outcome.
        """
        for rank in ranks:
            if not self._has_exited(rank):
                os.kill(self._pids[rank], signal.SIGUSR1)
        give_up_s = time.monotonic() + STACKS_S
        for rank in ranks:
            text = self._written_stacks(rank)
            while not self._has_exited(rank) and time.monotonic() < give_up_s:
                time.sleep(0.02)
                dumping = is_dumping(self._pids[rank])  # before reading, so that no line is missing
                last_text, text = text, self._written_stacks(rank)
                if text and text == last_text and not dumping:
                    break
            self._outcome.stacks[rank] = (
                text or "(it wrote no stacks: stopped, or before its start)"
            )

    def _written_stacks(self, rank: int) -> str:
        descriptor = self._stacks[rank]
        # pread, because the rank shares the file's offset.
        written = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return written.decode("utf-8", errors="replace")

    def _end(self) -> None:
        """Let the ranks exit if all have returned a result; otherwise kill those still running.
        Then kill all processes that the ranks started, and reap all.
        """
        over = not self._outcome.failures and len(self._outcome.results) == self._call.world_size
        for rank, pid in self._pids.items():
            if over:
                with contextlib.suppress(OSError):  # it has died since
                    self._ranks[rank].send_bytes(b"")
            elif not self._has_exited(rank):
                os.kill(pid, signal.SIGKILL)
        for rank, pid in self._pids.items():
            while not self._has_exited(rank):
                time.sleep(0.001)
            with contextlib.suppress(ProcessLookupError):  # nothing left in its process group
                os.killpg(pid, signal.SIGKILL)
            self._ranks[rank].close()
        end_children(but=self._earlier_children)


def children() -> set[int]:
    """Return the process ids of this process's children, adopted orphans included; an empty set
    without /proc.
    """
    try:
        pids = Path(f"/proc/self/task/{os.getpid()}/children").read_bytes()
    except OSError:
        return set()
    return set(map(int, pids.split()))


def end_children(*, but: Set[int]) -> None:
    """Kill and reap all children of this process except those in `but`. This includes orphans of
    the killed children, which become children of this process.
    """
    while strays := children() - but:
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def unserved_s(pid: int) -> float:
    """Return the seconds for which a process's main thread was ready, but had no processor.

    0 where the kernel does not count it in `/proc/PID/schedstat`, and for a process that has ended.
    """
    try:
        _, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_bytes().split()
    except (OSError, ValueError):
        return 0.0
    return int(waited_ns) / 1e9


def is_dumping(pid: int) -> bool:
    """Return whether `pid` was told to write its stacks and has not written all of them.

    The same text in two reads is no proof of the end: on a busy machine the next line may take
    long. The signal is pending until its handler begins, and blocked until the handler returns.
    False without a /proc, or for a process that has ended.
    """
    signals = 1 << (signal.SIGUSR1 - 1)
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # that thread has ended; another one may write
            for line in status.read_text(encoding="ascii", errors="replace").splitlines():
                name, _, mask = line.partition(":")
                if name in ("SigPnd", "ShdPnd", "SigBlk") and int(mask, 16) & signals:
                    return True
    return False


def _listening() -> socket.socket:
    """Return a listening socket on a port that the system chose."""
    return socket.create_server(("127.0.0.1", 0), backlog=128)


def main(connection_fd: int, modules: Sequence[str], device: Device = "cpu") -> None:
    """Run the launcher process: receive the caller's `sys.path` and its rewritten modules (`Call`),
    import `modules`, then serve a pool's calls until the connection closes.

    It turns the runtime on before the imports; for ranks on a GPU it leaves it off, and checks that
    no import starts the driver.
    """
    connection = Connection(connection_fd)
    set_for_process(_PR_SET_CHILD_SUBREAPER, 1)
    # In the background of the caller's terminal a program that asks it for input would be stopped,
    # and on some terminals one that writes; with these it gets an error, or writes.
    for number in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    # Imports make half a million objects that stay, so garbage is looked for less often. Not never:
    # what is freed late leaves holes, and ranks that fill them copy more pages.
    usual = gc.get_threshold()
    gc.set_threshold(*_WHILE_IMPORTING)
    with _reporting_failure(connection), _without_filelocks_hook():
        sys.path[:], rewritten = connection.recv()
        finder = RewritingFinder(rewritten)
        sys.meta_path.insert(0, finder)
        begin(device)
        for name in modules:
            _import(name)
            if device == "cuda":
                check_untouched(name)
        sys.meta_path.remove(finder)  # each call brings one of its own
        _read_ahead()
        _look_up_once()
    # Upstream reports every bucket and setting at level INFO; a call may lower the level again.
    logging.getLogger("megatron").setLevel(logging.ERROR)
    gc.set_threshold(*usual)
    lay_names_together()
    clear_tables_of_dynamo()
    gc.collect()
    fill_holes()
    # Ranks share these pages with the launcher until a collection writes into them.
    gc.freeze()
    connection.send("ready")
    _serve(connection)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # An orderly exit of torch and Megatron takes seconds, and Triton prints leaked objects.
    os._exit(0)


def _serve(connection: Connection, *, applied: bool = False) -> None:
    """Serve calls over the connection until it closes, then kill all children and what they
    started.

    `applied` is True if this process has the patches.
    """
    forks = 0
    child: Connection | None = None
    with contextlib.suppress(EOFError, PoolGone, ConnectionResetError, BrokenPipeError):
        while True:
            message = connection.recv_bytes()
            call = pickle.loads(message)
            forwards = call.already_applied and not applied
            if forwards and child is None:  # before pipes come, or it would hold their ends
                child = _with_patches(connection)
            pipes = receive_pipes(connection, call.world_size) if call.has_pipes else []
            if forwards and child is not None:
                child.send_bytes(message)
                send_pipes(child, pipes)
                for descriptor in pipes:
                    os.close(descriptor)
                if connection in wait([child, connection]):
                    raise PoolGone
                connection.send_bytes(child.recv_bytes())
                continue
            connection.send(ForkedCall(call, connection, pipes).run())
            forks_before, forks = forks, forks + call.world_size
            if forks_before < _FORKS_OF_A_LONG_LIFE <= forks:
                collapse_pages()
    end_children(but=set())


def _with_patches(inherited: Connection) -> Connection:
    """Fork a second launcher, which applies all patches and serves calls; return the connection to
    it.
    """
    parent_end, child_end = Pipe()
    if os.fork() == 0:
        die_with_the_parent()
        set_for_process(_PR_SET_CHILD_SUBREAPER, 1)
        inherited.close()
        parent_end.close()
        from megatron_idempotent.patching.api import apply

        apply()
        fill_holes()
        gc.freeze()
        _serve(child_end, applied=True)
        os._exit(0)
    child_end.close()
    return parent_end


def begin(device: Device) -> None:
    """Prepare this process for ranks on `device`, before it imports Megatron. Unless that is
    "cuda", turn the CPU runtime on.
    """
    if device == "cuda":
        prepare()
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        enable()


def die_with_the_parent() -> None:
    """Have the system kill this process when its parent ends; only on Linux."""
    set_for_process(_PR_SET_PDEATHSIG, signal.SIGKILL)


def yield_to_the_running() -> None:
    """Have the system treat this process as a batch job, which preempts nobody when it wakes up;
    only on Linux.

    A message wakes its receiver while the sender still holds a lock of gloo's. Where ranks
    outnumber processors, the receiver would take the sender's place, and the sender's loop thread
    would ask for that lock again and again: a twentieth of all processor time. Ranks in a
    session of their own would be interrupted all the same: Linux shares processors out among
    sessions (`sched_autogroup_enabled`), and takes one from a batch job, too, for another session.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def set_for_process(option: int, value: int) -> None:
    """Set an option of this process by prctl(2); only on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


@contextlib.contextmanager
def _reporting_failure(connection: Connection) -> Iterator[None]:
    """Send the pool a `RankFailure` if the block raises; the pool otherwise gets "ready" after the
    block. Then re-raise the error, or exit with status 1 after a `NoDeviceError`.
    """
    try:
        yield
    except BaseException as error:
        failure = describe(-1, error)
        if (name := replaced_name_in(error)) is not None:
            failure = replace(failure, message=f"{error}; the CPU runtime emulates {name}")
        connection.send(failure)
        if isinstance(error, NoDeviceError):
            raise SystemExit(1) from None  # the pool reports it; a traceback adds nothing
        raise


@contextlib.contextmanager
def _without_filelocks_hook() -> Iterator[None]:
    """Ignore the audit hook of filelock, which transformers imports, if the block installs it.

    Python calls it for each `id()`, import and opened file of a rank, which takes a twentieth of a
    rank's time. It refuses to fork while a lock changes hands, and the launcher takes no lock.
    """
    original = sys.addaudithook

    def addaudithook(hook: Any) -> None:
        if not str(getattr(hook, "__module__", "")).startswith("filelock"):
            original(hook)

    sys.addaudithook = addaudithook
    try:
        yield
    finally:
        sys.addaudithook = original


def _import(name: str) -> None:
    """Import a module; do nothing if the module, or a package that it imports, is not installed."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A pool without Megatron runs plain torch functions, and releases lack some of PRELOAD.
        missing = error.name or ""
        if not missing or not (
            f"{name}.".startswith(f"{missing}.")
            or importlib.util.find_spec(missing.partition(".")[0]) is None
        ):
            raise


def _read_ahead() -> None:
    """Read the source of the functions that patches replace, and check that it is the source that
    patches are made for, once in the launcher. Ranks inherit the results, which make `apply()`
    fast.
    """
    import wrapt  # noqa: F401  patches that wait for an import need it

    from megatron_idempotent.patching import catalog, decide, install
    from megatron_idempotent.patching.base import Conflict

    install.state.keeps_sources = True
    for patch in catalog.patches().values():
        verdict = decide.check_bodies(patch, named=False)
        if verdict.status is None:
            with contextlib.suppress(Conflict, AttributeError):  # apply() reports it
                install.check(patch, verdict)


def _look_up_once() -> None:
    """Cache two slow lookups in the launcher, the entry points of torch's process-group backends
    and the source of classes, so that each rank inherits the results.

    torch 2.15 reads the entry points of all installed packages for a backend whenever ranks join:
    30 ms, half of a rank's own time before its function begins. Megatron's parser takes help texts
    from the sources of its dataclasses: 150 ms, as Python 3.12 parses a module for each class.
    """
    cached_entry_points, cached_getsource = (
        functools.cache(metadata.entry_points),
        functools.cache(inspect.getsource),
    )

    def entry_points(**params: Any) -> Any:
        of_torch = params == {"group": "torch.distributed.backends"}
        return (cached_entry_points if of_torch else cached_entry_points.__wrapped__)(**params)

    def getsource(object: Any) -> str:
        # Equal code may stand in two files; a class is equal to itself alone.
        return (cached_getsource if isinstance(object, type) else cached_getsource.__wrapped__)(
            object
        )

    for module, replacement in ((metadata, entry_points), (inspect, getsource)):
        setattr(module, replacement.__name__, replacement)
    metadata.entry_points(group="torch.distributed.backends")
    if (arguments := sys.modules.get("megatron.training.arguments")) is not None:
        arguments.add_megatron_arguments(argparse.ArgumentParser())


# A rank: a process that the launcher has forked for one call, and that ends with it.


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSetup:
    """Holds a rank's number, and the connection, sockets and files that the launcher gives it."""

    rank: int
    #: The rank sends R and a result, or F and a failure; a message comes back once all are done.
    connection: Connection
    #: A listening socket for rank 0's store; its port is `store_port`.
    store_fd: int
    store_port: int
    #: A port that was free at the fork, for programs that initialise torch.distributed themselves.
    master_port: int
    stacks_fd: int
    #: The rank's end of a pipe of the caller's; -1 without one.
    pipe_fd: int


def run_rank(call: Call, setup: RankSetup) -> None:
    """Run the call as one rank and end the process; do not return."""
    # Its own process group, so that ending a rank ends what it started too.
    os.setpgrp()
    die_with_the_parent()
    if call.device != "cuda":  # there a rank feeds a GPU
        yield_to_the_running()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(setup.stacks_fd, "w", encoding="utf-8") as stacks:
        faulthandler.enable(file=stacks, all_threads=True)  # a crash in C
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)  # a hang
        try:
            kind, payload = b"R", dump_result(_called(call, setup), by_value=call.by_value)
        except BaseException as error:  # noqa: BLE001  SystemExit too: it is sent
            kind, payload = b"F", pickle.dumps(describe(setup.rank, error))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError, AttributeError):  # closed, or None
                stream.flush()
        setup.connection.send_bytes(kind)
        setup.connection.send_bytes(payload)
        if kind == b"R":
            # Rank 0 holds the store and every rank a socket that its peers may still read.
            setup.connection.recv_bytes()
        # Not sys.exit: exit handlers inherited from the launcher are not this process's to run.
        os._exit(0)


def _called(call: Call, setup: RankSetup) -> object:
    _settle(call, setup)
    function, args, kwargs = resolve(call)
    if call.distributed:
        _join_default_group(call, setup)
    if call.has_pipes:
        args = (socket.socket(fileno=setup.pipe_fd), *args)
    if call.device != "checked":
        return function(*args, **kwargs)
    from .placement import checking

    with checking():
        return function(*args, **kwargs)


def describe(rank: int, error: BaseException) -> RankFailure:
    """Return the `RankFailure` of an exception on a rank: its type, message and traceback."""
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = f"{kind.__module__}.{name}"
    began = error.__traceback__
    while began is not None and began.tb_frame.f_code.co_filename == __file__:
        began = began.tb_next  # frames of the launcher, before the function's
    text = "".join(traceback.format_exception(kind, error, began or error.__traceback__))
    return RankFailure(rank=rank, exception_type=name, message=str(error), traceback=text)


def _settle(call: Call, setup: RankSetup) -> None:
    mark = os.environ[MARK]
    os.environ.clear()
    os.environ.update(call.environ | {MARK: mark})
    os.environ.update(
        RANK=str(setup.rank),
        LOCAL_RANK=str(setup.rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_WORLD_SIZE=str(call.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(setup.master_port),
    )
    sys.path[:] = call.sys_path
    os.chdir(call.cwd)
    take_device(call.device, setup.rank, call.world_size, one_machine=True)


def take_device(device: Device, rank: int, ranks: int, *, one_machine: bool) -> None:
    """Select a rank's device, and set the environment variables and the number of threads that
    ranks need.

    `rank` and `ranks` count ranks of this machine; `one_machine` is True if there are no others.
    """
    if device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Megatron asks for 1 before it accepts tensor parallelism with overlap.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # Without it gloo resolves the host name, which may be slow or wrong in a container.
    if one_machine and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # For a log line torch looks up the name of each peer's address, which no hosts file has. A name
    # server that does not answer would cost 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1")

    import torch

    torch.set_num_threads(1)
    if device == "cuda":
        gpu.settle(rank, ranks)
    else:
        torch.cuda.set_device(rank)


def _join_default_group(call: Call, setup: RankSetup) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    # Longer than the deadline: a hang is the launcher's to report, with the stacks of all ranks.
    timeout = datetime.timedelta(seconds=call.longest_s + 60.0)
    is_master = setup.rank == 0
    store = TCPStore(
        "127.0.0.1",
        setup.store_port,
        call.world_size,
        is_master,
        timeout,
        wait_for_workers=False,
        master_listen_fd=setup.store_fd if is_master else None,
        use_libuv=False,
    )
    options = gpu.group_options(call.world_size) if call.device == "cuda" else {"backend": "gloo"}
    dist.init_process_group(
        store=store, rank=setup.rank, world_size=call.world_size, timeout=timeout, **options
    )
    # Rank 0 holds the store: if it raised and left while another rank still joins, that rank would
    # report a broken connection in place of its own error.
    dist.barrier()
