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

import asyncio
import contextlib
import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from . import rendezvous, wire
from .protocol import RanksLost, WorkerSpec
from .rendezvous import EXIT_FILE, HOST, RUN_ID, ControllerAddress, RendezvousError, write_private
from .serve import RankConnection
from .server import Server
from .socket_ranks import Connection, SocketRanks


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
        self._host = host or os.environ.get(rendezvous.HOST, "")
        self._server: Server | None = None
        self._published: rendezvous.ControllerAddress | None = None

    async def _launch(self) -> list[Connection]:
        server = self._listening()
        try:
            return await server.complete(self._start_timeout_s)
        except asyncio.TimeoutError as late:
            raise RanksLost(
                f"{server.missing()} within {self._start_timeout_s:g} s; torchrun starts lost "
                "ranks again as often as its --max-restarts says"
            ) from late

    def _listening(self) -> Server:
        """Return the server, which ranks of every restart dial; `close` ends it."""
        if self._server is None:
            token = wire.new_token()
            server = Server(self._size, token)
            interface = "0.0.0.0" if self._host else "127.0.0.1"
            address = server.listen(f"tcp:{interface}:0", announce=self._host)
            self._server = server
            self._published = rendezvous.ControllerAddress.here(address, token)
            self._published.write(self._directory)
        return self._server

    async def _ended(self, rank: int | None) -> str:
        return "torchrun says how it ended" if rank is not None else ""

    async def _release(self) -> None:
        if self._published is not None:
            self._published.remove(self._directory)
        if self._server is not None:
            await self._server.close()
        self._server = self._published = None


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
    environ[RUN_ID] = run_id
    if host:
        environ[HOST] = host
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
        code = _wait(child)
    code = 128 - code if code < 0 else code
    write_private(Path(directory) / EXIT_FILE, {"run_id": run_id, "code": code})
    return code


def _wait(child: subprocess.Popen[bytes]) -> int:
    def hand_on(number: int, _: FrameType | None) -> None:
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    return child.wait()


#: Seconds for a controller to come to its end once it has said goodbye.
_EXIT_S = 600.0
#: Seconds for a controller that has lost a rank to end the others.
_TELL_S = 1.0
#: Seconds for all ranks to learn the exit code, before the one that may hold the store leaves.
_LEAVE_S = 20.0


class TorchrunRank:
    """Runs one process of torchrun. Example: `TorchrunRank(spec, directory, command, 300.0)`."""

    def __init__(
        self, spec: WorkerSpec, directory: Path, command: Sequence[str], start_timeout_s: float
    ) -> None:
        self._spec, self._directory, self._command = spec, directory, list(command)
        self._timeout = datetime.timedelta(seconds=start_timeout_s)
        self._start_timeout_s = start_timeout_s
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._one_machine = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]

    def run(self) -> int:
        """Serve until the controller ends; return its exit code."""
        self._cuda = _prepare(self._local_rank, one_machine=self._one_machine)
        from torch.distributed.rendezvous import rendezvous

        store, self._rank, self._size = next(rendezvous("env://", timeout=self._timeout))
        store.set_timeout(self._timeout)
        self._store: Any = _prefixed("megatron-idempotent", store)
        if self._rank == 0:
            self._tell()
        connection, found, code = self._connect()
        if connection is None or found is None:
            return code  # the controller came to its end without ranks: nothing was left to do
        self._controller = found
        connection.serve(self._spec, self._join)
        code = self._exit_code(found)
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        return code

    def _tell(self) -> None:
        """Find the controller, on rank 0, and tell all ranks of it and of an id for this start."""
        found, code = self._find()
        fields = found and {name: getattr(found, name) for name in ControllerAddress.__slots__}
        said = {"found": fields, "generation": wire.new_generation().hex(), "code": code}
        self._store.set("controller", json.dumps(said))

    def _connect(self) -> tuple[RankConnection | None, ControllerAddress | None, int]:
        """Dial the controller that rank 0 has found; returns the connection and its address.

        For a controller that has ended it returns the exit code instead. The store outlives a
        restart, and with it what an earlier rank 0 has said. A controller lets nobody in with that,
        so it is read again until it is new.
        """
        until = time.monotonic() + self._start_timeout_s
        while True:
            said = json.loads(self._store.get("controller"))
            if said["found"] is None:
                return None, None, said["code"]
            found, generation = (
                ControllerAddress(**said["found"]),
                bytes.fromhex(said["generation"]),
            )
            hello = wire.Hello(generation=generation, rank=self._rank, pid=os.getpid())
            try:
                connection = RankConnection(found.address, bytes.fromhex(found.token), hello)
            except (OSError, EOFError, wire.WireError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
                continue
            self._store = _prefixed(said["generation"], self._store)
            return connection, found, 0

    def _find(self) -> tuple[ControllerAddress | None, int]:
        """Return a controller that answers, started if there is none; None if that ended with 0.

        Errors: `RendezvousError` if it ended with another code, or does not answer in time.
        """
        found = ControllerAddress.read(self._directory)
        if found is not None and found.answers():
            return found, 0
        process = self._start_controller() if self._command else None
        until = time.monotonic() + self._start_timeout_s
        while time.monotonic() < until:
            ended = process.poll() if process is not None else None
            found = ControllerAddress.read(self._directory)
            if found is not None and found.answers():
                return found, 0
            if ended == 0:
                return None, 0
            if ended is not None:
                raise RendezvousError(
                    f"the controller ended with exit code {ended} before it listened: "
                    f"{subprocess.list2cmdline(self._command)}"
                )
            time.sleep(0.05)
        if process is not None:
            process.terminate()
        raise RendezvousError(
            f"no controller listens after {self._start_timeout_s:g} s: "
            f"{subprocess.list2cmdline(self._command) or 'it was to be started by hand'}"
        )

    def _start_controller(self) -> subprocess.Popen[bytes]:
        (self._directory / rendezvous.FILE).unlink(missing_ok=True)  # of one that is dead
        host = "" if self._one_machine else socket.gethostname()
        return start(self._directory, rendezvous.new_run_id(), self._command, host=host)

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

    def _exit_code(self, found: ControllerAddress) -> int:
        """Return the controller's exit code, which all ranks learn from rank 0."""
        import torch.distributed as dist

        self._store.set_timeout(datetime.timedelta(seconds=_EXIT_S + _LEAVE_S))
        if self._rank == 0:
            code = self._await_exit(found)
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

    def _await_exit(self, found: ControllerAddress) -> int:
        if not found.run_id:
            return 0  # the user started it, and looks after it
        until = time.monotonic() + _EXIT_S
        while time.monotonic() < until:
            gone = not found.alive()
            code = rendezvous.exit_code(self._directory, found.run_id)
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


def _prepare(local_rank: int, *, one_machine: bool) -> bool:
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
