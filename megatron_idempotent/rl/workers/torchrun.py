"""Connects ranks that torchrun starts, and restarts, to one controller.

    if under_torchrun():
        sys.exit(run_rank(spec, directory, controller_command))

`TorchrunRanks` is the controller's side, and does not import torch; `TorchrunRank` is a rank's.

A rank that starts the controller may be ended and restarted. So another process waits for the
controller to end, and writes its exit code:

    python -m megatron_idempotent.rl.workers.torchrun DIRECTORY RUN_ID -- COMMAND…

It stays beside Ray and embedded ranks: a Slurm cluster without Ray has torchrun alone, and without
this an asynchronous run there could not leave one machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from . import wire
from .protocol import WorkerSpec, is_alive
from .socket_ranks import Connection, Server, SocketRanks
from .wire import RankConnection

#: The files that say where a controller listens, and how the last one ended.
FILE, EXIT_FILE = "controller.json", "controller-exit.json"
#: Variables of a controller that a rank started: the id that its exit is filed under, and the host
#: at which ranks on other machines find it.
RUN_ID, HOST = "MEGATRON_IDEMPOTENT_RUN_ID", "MEGATRON_IDEMPOTENT_HOST"
#: Seconds for a controller that was found to answer.
_PROBE_S = 5.0
#: Seconds for a controller to come to its end once it has said goodbye.
_EXIT_S = 600.0
#: Seconds for a controller that has lost a rank to end the others.
_TELL_S = 1.0
#: Seconds for all ranks to learn the exit code, before the one that may hold the store leaves.
_LEAVE_S = 20.0


def under_torchrun() -> bool:
    """Return whether this process is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def run_rank(
    spec: WorkerSpec,
    directory: Path,
    controller_command: Sequence[str],
    *,
    start_timeout_s: float = 300.0,
) -> int:
    """Serve the worker until the controller ends; every process of torchrun calls it.

    Global rank 0 looks into `directory` for the controller, and starts `controller_command` if
    there is none; that command makes a `TorchrunRanks` of the same directory. The other ranks learn
    of it through torchrun's store.

    Args:
        spec: the worker that each rank makes.
        directory: the run's directory; only rank 0's machine and the controller's need to see it.
        controller_command: the controller's program and arguments; it has to resume a run that has
            begun. Empty if it is started by hand: then ranks wait for it.
        start_timeout_s: seconds for the controller to listen, and for the ranks to find each other.

    Returns:
        The exit code for this process: that of the controller, on all ranks.

    Errors: `RendezvousError`, and whatever else keeps a rank from starting. A rank whose controller
        is lost, or ends it, does not return: the process ends with code 75, and torchrun starts
        all ranks again as often as `--max-restarts` allows.
    """
    return TorchrunRank(spec, directory, controller_command, start_timeout_s).run()


class TorchrunRanks(SocketRanks):
    """Implements `RankGroup`, in the controller, for the processes of one torchrun.

    This process neither starts nor kills them: `start` waits for them, also after a loss, when all
    of them end and torchrun restarts them.

    Example:
        ranks = TorchrunRanks(2, Path("runs/7"))
        await ranks.start()
    """

    _goodbye_s = 30.0

    def __init__(
        self,
        size: int,
        directory: Path,
        *,
        host: str = "",
        call_timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        """
        Args:
            size: the number of ranks on all machines.
            directory: the run's directory, where ranks look for the controller: see `run_rank`.
            host: the name by which ranks on other machines find this one; it then listens on all
                interfaces. Empty for the name that the rank which started this process gave, and
                for 127.0.0.1 if all ranks are on one machine.
            call_timeout_s: seconds for calls that give no `timeout_s`; None for no limit.
            start_timeout_s: seconds for all ranks to dial, and again for all workers to be made.
        """
        super().__init__(size, start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s)
        self._directory = directory
        self._host = host or os.environ.get(HOST, "")
        self._server: Server | None = None
        self._published: ControllerAddress | None = None

    async def _launch(self) -> list[Connection]:
        if self._server is None:  # ranks of every restart dial it, until `close`
            token = secrets.token_bytes(32)
            server = self._server = Server(self._size, token)
            interface = "0.0.0.0" if self._host else "127.0.0.1"
            address = server.listen((interface, 0), announce=self._host)
            self._published = ControllerAddress(
                address=address,
                token=token.hex(),
                node=socket.gethostname(),
                pid=os.getpid(),
                run_id=os.environ.get(RUN_ID, ""),
            )
            write_private(self._directory / FILE, dataclasses.asdict(self._published))
        remedy = "; torchrun starts lost ranks again as often as its --max-restarts says"
        return await self._complete(self._server, remedy=remedy)

    async def _ended(self, rank: int | None) -> str:
        return "torchrun says how it ended" if rank is not None else ""

    async def _release(self) -> None:
        if self._server is None:
            return
        with contextlib.suppress(RendezvousError):
            # Unless another controller has written its own.
            if ControllerAddress.read(self._directory) == self._published:
                (self._directory / FILE).unlink(missing_ok=True)
        await self._server.close()
        self._server = None


class RendezvousError(RuntimeError):
    """A controller cannot be found, or must not be trusted; the message names the file."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ControllerAddress:
    """Says where a controller is, and its token. Example: `ControllerAddress.read(directory)`."""

    address: wire.Address
    token: str
    """The token in hexadecimal."""
    node: str
    """The name of the controller's machine."""
    pid: int
    """The controller's process id on that machine."""
    run_id: str = ""
    """The id that the controller's exit is filed under; empty if the user started it."""

    @classmethod
    def read(cls, directory: Path) -> ControllerAddress | None:
        """Read what a controller wrote; None if there is no file.

        Errors: `RendezvousError` for a file of another user, one that others may read, and one that
            is not complete.
        """
        fields = read_private(directory / FILE)
        if fields is None:
            return None
        try:
            bytes.fromhex(fields["token"])
            host, port = fields["address"]
            return cls(**{**fields, "address": (host, port)})
        except (KeyError, TypeError, ValueError) as error:
            raise RendezvousError(
                f"{directory / FILE} does not say where a controller is ({error}); remove it"
            ) from error

    def dial(self, rank: int, generation: str | None, timeout_s: float = 60.0) -> RankConnection:
        """Connect a rank to the controller. Errors: those of `RankConnection`."""
        token = bytes.fromhex(self.token)
        return RankConnection(self.address, token, rank, generation, timeout_s=timeout_s)

    def begin(self) -> RankConnection | None:
        """Begin a start of all ranks, on rank 0; None if the controller is not there any more.

        Errors: `RendezvousError` if its process lives on this machine and does not answer: a second
            controller beside it would write into the same run.
        """
        try:
            return self.dial(0, None, _PROBE_S)
        except (wire.WireError, EOFError, ConnectionError, FileNotFoundError, socket.gaierror):
            return None  # its port may be another program's now
        except OSError as error:
            if not self.alive():
                return None
            raise RendezvousError(
                f"the controller with process id {self.pid} does not answer at {self.address} "
                f"within {_PROBE_S:g} s ({error}); end it, or let it go on"
            ) from error

    def alive(self) -> bool:
        """Return whether the controller's process lives, as far as this machine can see."""
        return self.node == socket.gethostname() and is_alive(self.pid)


def exit_code(directory: Path, run_id: str) -> int | None:
    """Return the exit code of the controller of that id; None if it has not ended.

    Errors: `RendezvousError`, as for `ControllerAddress.read`.
    """
    fields = read_private(directory / EXIT_FILE)
    if fields is None or fields.get("run_id") != run_id:
        return None
    return int(fields["code"])


def write_private(path: Path, fields: Mapping[str, Any]) -> None:
    """Write JSON that only this user can read: complete, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(fields, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def read_private(path: Path) -> dict[str, Any] | None:
    """Read what `write_private` wrote; None if there is no file. Errors: `RendezvousError`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RendezvousError(f"{path} cannot be read ({error}); remove it") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise RendezvousError(
                f"{path} is of user {status.st_uid}, and this is user {os.geteuid()}; choose a "
                "directory of your own"
            )
        if status.st_mode & 0o077:
            raise RendezvousError(
                f"{path} has mode {status.st_mode & 0o777:o}, so others may know what is in it; "
                "remove it"
            )
        try:
            fields = json.load(file)
        except ValueError as error:
            raise RendezvousError(f"{path} is not complete ({error}); remove it") from error
    if not isinstance(fields, dict):
        raise RendezvousError(f"{path} holds {type(fields).__name__}, not an object; remove it")
    return fields


#: Variables that torchrun sets for ranks; a controller is none.
_OF_RANKS = frozenset(
    f"{of}{what}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")
) | {"ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}


def start(
    directory: Path, run_id: str, command: Sequence[str], *, host: str = ""
) -> subprocess.Popen[bytes]:
    """Start a controller as a process that outlives this rank and its torchrun.

    It has this process's output, and its environment without the variables of a rank.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_RANKS and not name.startswith("TORCHELASTIC_")
    }
    environ |= {RUN_ID: run_id} | ({HOST: host} if host else {})
    program = [sys.executable, "-m", __name__, str(directory), run_id, "--", *command]
    # Its own session: what ends the ranks, such as Ctrl-C, is not the controller's end.
    return subprocess.Popen(program, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)


def main(argv: Sequence[str]) -> int:
    """Run the command to its end; return its exit code, with 128 + N for signal N."""
    directory, run_id, dashes, *command = argv
    if dashes != "--" or not command:
        raise ValueError(f"got arguments {list(argv)!r}; allowed: DIRECTORY RUN_ID -- COMMAND…")
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        sys.stderr.write(f"the controller cannot be started: {error}\n")
        code = 127
    else:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: child.send_signal(number))
        code = child.wait()
    code = 128 - code if code < 0 else code
    write_private(Path(directory) / EXIT_FILE, {"run_id": run_id, "code": code})
    return code


class TorchrunRank:
    """Runs one process of torchrun. Example: `TorchrunRank(spec, directory, command, 300.0)`."""

    def __init__(
        self, spec: WorkerSpec, directory: Path, command: Sequence[str], start_timeout_s: float
    ) -> None:
        self._spec, self._directory, self._command = spec, directory, list(command)
        self._start_timeout_s = start_timeout_s
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._one_machine = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]

    def run(self) -> int:
        """Serve until the controller ends; return its exit code."""
        self._cuda = _prepare(one_machine=self._one_machine)
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        timeout = datetime.timedelta(seconds=self._start_timeout_s)
        store, self._rank, self._size = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        self._store: Any = _prefixed("megatron-idempotent", store)
        there = self._tell() if self._rank == 0 else self._learn()
        if there is None:
            return 0  # the controller came to its end without ranks: nothing was left to do
        connection, self._controller = there
        self._store = _prefixed(connection.generation, self._store)
        connection.serve(self._spec, self._join)
        code = self._exit_code()
        if dist.is_initialized():
            dist.destroy_process_group()
        return code

    def _tell(self) -> tuple[RankConnection, ControllerAddress] | None:
        """Find the controller, on rank 0, and tell all ranks of it and of the id of this start."""
        there, said = self._find(), None
        if there is not None:
            connection, found = there
            said = {"found": dataclasses.asdict(found), "generation": connection.generation}
        self._store.set("controller", json.dumps(said))
        return there

    def _learn(self) -> tuple[RankConnection, ControllerAddress] | None:
        """Dial the controller that rank 0 has found; None for one that has ended with 0.

        The store outlives a restart, and with it what an earlier rank 0 has said. A controller lets
        nobody in with that, so it is read again until it is new.
        """
        until = time.monotonic() + self._start_timeout_s
        while True:
            said = json.loads(self._store.get("controller"))
            if said is None:
                return None
            found = ControllerAddress(**said["found"])
            try:
                return found.dial(self._rank, said["generation"]), found
            except (OSError, EOFError, wire.WireError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)

    def _find(self) -> tuple[RankConnection, ControllerAddress] | None:
        """Connect to the controller, started if there is none; None if that ended with 0.

        Errors: `RendezvousError` if it ended with another code, or does not answer in time.
        """
        process: subprocess.Popen[bytes] | None = None
        code: int | None = None
        until = time.monotonic() + self._start_timeout_s
        while True:
            found = ControllerAddress.read(self._directory)
            connection = found.begin() if found is not None else None
            if connection is not None and found is not None:
                return connection, found
            if code == 0:
                return None
            if code is not None:
                raise RendezvousError(
                    f"the controller ended with exit code {code} before it listened: "
                    f"{subprocess.list2cmdline(self._command)}"
                )
            if time.monotonic() > until:
                break
            if process is None and self._command:
                (self._directory / FILE).unlink(missing_ok=True)  # of one that is dead
                host = "" if self._one_machine else socket.gethostname()
                process = start(self._directory, secrets.token_hex(8), self._command, host=host)
            time.sleep(0.05)
            code = process.poll() if process is not None else None
        if process is not None:
            process.terminate()
        raise RendezvousError(
            f"no controller listens after {self._start_timeout_s:g} s: "
            f"{subprocess.list2cmdline(self._command) or 'it was to be started by hand'}"
        )

    def _join(self) -> None:
        """Make the default process group; all ranks enter."""
        import torch
        import torch.distributed as dist

        # Not before: until all ranks are here, a signal of torchrun says that one has failed.
        _leave_signals_to(self._controller if self._rank == 0 else None)
        torch.cuda.set_device(self._local_rank)
        dist.init_process_group(
            "nccl" if self._cuda else "gloo",
            store=_prefixed("group", self._store),
            rank=self._rank,
            world_size=self._size,
        )

    def _exit_code(self) -> int:
        """Return the controller's exit code, which all ranks learn from rank 0."""
        import torch.distributed as dist

        self._store.set_timeout(datetime.timedelta(seconds=_EXIT_S + _LEAVE_S))
        if self._rank == 0:
            code = self._await_exit()
            self._store.set("exit", str(code))
        else:
            try:
                code = int(self._store.get("exit"))
            except dist.DistError as error:
                sys.stderr.write(f"rank {self._rank}: how the controller ended is unknown: {error}")
                return 1
        left = self._store.add("left", 1)
        until = time.monotonic() + _LEAVE_S
        while self._rank == 0 and left < self._size and time.monotonic() < until:
            time.sleep(0.02)
            left = self._store.add("left", 0)
        return code

    def _await_exit(self) -> int:
        if not self._controller.run_id:
            return 0  # the user started it, and looks after it
        until = time.monotonic() + _EXIT_S
        while time.monotonic() < until:
            gone = not self._controller.alive()
            code = exit_code(self._directory, self._controller.run_id)
            if code is not None:
                return code
            if gone:
                until = min(until, time.monotonic() + _LEAVE_S)  # its supervisor writes the file
            time.sleep(0.05)
        sys.stderr.write(f"how the controller ended is not in {self._directory}\n")
        return 1


def _prefixed(prefix: str, store: Any) -> Any:
    import torch.distributed as dist

    kind: Any = vars(dist)["PrefixStore"]  # public, and not in torch's type information
    return kind(prefix, store)


def _prepare(*, one_machine: bool) -> bool:
    """Prepare what must precede Megatron's import; return whether there is CUDA."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    if torch.cuda.is_available():
        return True
    from megatron_idempotent.proof import cpu

    cpu.enable()
    torch.set_num_threads(1)
    # Without it gloo resolves the host name, which may be slow or wrong in a container.
    if one_machine and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return False


def _leave_signals_to(controller: ControllerAddress | None) -> None:
    """Leave signals that end torchrun to the controller, which says goodbye when it is done.

    Rank 0 tells it. torchrun sends SIGTERM to the peers of a lost rank too: they are gone by the
    time that it would be told, since the controller ends them.
    """

    def tell(number: int) -> None:
        if controller is not None and controller.node == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(controller.pid, number)

    def later(number: int, _: FrameType | None) -> None:
        timer = threading.Timer(_TELL_S, tell, (number,))
        timer.daemon = True
        timer.start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, later)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
