"""A process of torchrun: it finds the controller, joins its group, and serves the worker."""

from __future__ import annotations

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

from . import handover, supervise, wire
from .handover import Handover, HandoverError
from .protocol import WorkerSpec
from .serve import Seat

#: For a controller to come to its end once it has said goodbye.
_EXIT_S = 600.0
#: For a controller that has lost a rank to end the others.
_TELL_S = 1.0
#: For all ranks to learn of it, before the one that may hold the store leaves.
_LEAVE_S = 20.0


class TorchrunRank:
    """One process. Example: `sys.exit(TorchrunRank(spec, directory, command, 300.0).run())`."""

    def __init__(
        self, spec: WorkerSpec, directory: Path, command: Sequence[str], start_timeout_s: float
    ) -> None:
        self._spec, self._directory, self._command = spec, directory, list(command)
        self._timeout = datetime.timedelta(seconds=start_timeout_s)
        self._start_timeout_s = start_timeout_s
        self._local_rank = int(os.environ["LOCAL_RANK"])
        self._one_machine = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]

    def run(self) -> int:
        """Serve until the controller ends; its exit code."""
        self._cuda = _prepare(self._local_rank, one_machine=self._one_machine)
        from torch.distributed.rendezvous import rendezvous

        store, self._rank, self._size = next(rendezvous("env://", timeout=self._timeout))
        store.set_timeout(self._timeout)
        self._store: Any = _prefixed("megatron-idempotent", store)
        if self._rank == 0:
            self._tell()
        seat, found, code = self._seat()
        if seat is None or found is None:
            return code  # the controller came to its end without ranks: nothing was left to do
        self._controller = found
        seat.serve(self._spec, self._join)
        code = self._exit_code(found)
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        return code

    def _tell(self) -> None:
        """Rank 0 finds the controller, and an id for this start of all ranks."""
        found, code = self._find()
        fields = found and {name: getattr(found, name) for name in Handover.__slots__}
        said = {"found": fields, "generation": wire.new_generation().hex(), "code": code}
        self._store.set("controller", json.dumps(said))

    def _seat(self) -> tuple[Seat | None, Handover | None, int]:
        """Dial the controller that rank 0 has found; or the exit code of one that has ended.

        The store outlives a restart, and with it what an earlier rank 0 has said. A controller lets
        nobody in with that, so it is read again until it is new.
        """
        until = time.monotonic() + self._start_timeout_s
        while True:
            said = json.loads(self._store.get("controller"))
            if said["found"] is None:
                return None, None, said["code"]
            found, generation = Handover(**said["found"]), bytes.fromhex(said["generation"])
            hello = wire.Hello(generation=generation, rank=self._rank, pid=os.getpid())
            try:
                seat = Seat(found.address, bytes.fromhex(found.token), hello)
            except (OSError, EOFError, wire.WireError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
                continue
            self._store = _prefixed(said["generation"], self._store)
            return seat, found, 0

    def _find(self) -> tuple[Handover | None, int]:
        """A controller that answers, started where there is none; or how it ended at once."""
        found = Handover.read(self._directory)
        if found is not None and found.answers():
            return found, 0
        process = self._start_controller() if self._command else None
        until = time.monotonic() + self._start_timeout_s
        while time.monotonic() < until:
            ended = process.poll() if process is not None else None
            found = Handover.read(self._directory)
            if found is not None and found.answers():
                return found, 0
            if ended == 0:
                return None, 0
            if ended is not None:
                raise HandoverError(
                    f"the controller ended with exit code {ended} before it listened: "
                    f"{subprocess.list2cmdline(self._command)}"
                )
            time.sleep(0.05)
        if process is not None:
            process.terminate()
        raise HandoverError(
            f"no controller listens after {self._start_timeout_s:g} s: "
            f"{subprocess.list2cmdline(self._command) or 'it was to be started by hand'}"
        )

    def _start_controller(self) -> subprocess.Popen[bytes]:
        (self._directory / handover.FILE).unlink(missing_ok=True)  # of one that is dead
        host = "" if self._one_machine else socket.gethostname()
        return supervise.start(self._directory, handover.new_life(), self._command, host=host)

    def _join(self) -> None:
        """Collective of all ranks: make the default process group."""
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

    def _exit_code(self, found: Handover) -> int:
        """Returns the controller's exit code, which all ranks learn from rank 0."""
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

    def _await_exit(self, found: Handover) -> int:
        if not found.life:
            return 0  # the user started it, and looks after it
        until = time.monotonic() + _EXIT_S
        while time.monotonic() < until:
            gone = not found.alive()
            code = handover.exit_code(self._directory, found.life)
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
    """Prepares what must precede Megatron's import; returns whether there is CUDA."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch

    if torch.cuda.is_available():
        return True
    from megatron_idempotent import cpu

    cpu.enable()
    torch.set_num_threads(1)
    # Without it gloo resolves the host name, which may be slow or wrong in a container.
    if one_machine and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return False


def _leave_signals_to(controller: Handover | None) -> None:
    """Leaves signals that end torchrun to the controller, which says goodbye when it is done.

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
