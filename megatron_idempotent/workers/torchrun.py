"""Ranks that torchrun starts and restarts: they dial the same controller again.

    if under_torchrun():
        sys.exit(run_rank(spec, directory, controller_command))

The controller's side; free of torch. The ranks' is `torchrun_rank`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from . import handover, wire
from .connection import Connection
from .errors import RanksLost
from .group import SocketRanks
from .protocol import WorkerSpec
from .server import Server


def under_torchrun() -> bool:
    """Returns whether this process is a rank that torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def run_rank(
    spec: WorkerSpec,
    directory: Path,
    controller_command: Sequence[str],
    *,
    start_timeout_s: float = 300.0,
) -> int:
    """Serves the worker until the controller ends; every process of torchrun calls it.

    Global rank 0 looks into `directory` for the controller, and starts `controller_command` where
    there is none; that command makes a `TorchrunRanks` of the same directory. The other ranks learn
    of it through torchrun's store.

    Args:
        spec: the worker.
        directory: of the run. Only rank 0's machine and the controller's need to see it.
        controller_command: program and arguments; it resumes where there is something to resume.
            Empty where it is started by hand: then ranks wait for it.
        start_timeout_s: for the controller to listen, and for the ranks to find each other.

    Returns:
        The exit code for this process: that of the controller, on all ranks.

    Errors: `HandoverError`, and whatever else keeps a rank from starting. A rank whose controller
        is lost, or ends it, does not return: the process ends with code 75, and torchrun starts
        all ranks again as often as `--max-restarts` allows.
    """
    from .torchrun_rank import TorchrunRank

    return TorchrunRank(spec, directory, controller_command, start_timeout_s).run()


class TorchrunRanks(SocketRanks):
    """A `RankGroup` of the processes of one torchrun, in the controller.

    They are not this process's to start or to kill: `start` waits for them, also after a loss,
    when all of them end and torchrun restarts them.

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
            size: number of ranks, of all machines.
            directory: of the run, where ranks look for the controller: see `run_rank`.
            host: name of this machine that ranks on others find it by; then it listens on all
                interfaces. Empty for what the rank that started this process says, and for
                127.0.0.1 where all ranks are on one machine.
            call_timeout_s: for calls that give no `timeout_s`; None for no limit.
            start_timeout_s: for all ranks to dial, and again for all workers to be made.
        """
        super().__init__(size, start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s)
        self._directory = directory
        self._host = host or os.environ.get(handover.HOST, "")
        self._server: Server | None = None
        self._handover: handover.Handover | None = None

    async def _launch(self) -> list[Connection]:
        server = self._listening()
        try:
            return await server.complete(self._start_timeout_s)
        except asyncio.TimeoutError as late:
            raise RanksLost(
                f"{server.missing()} within {self._start_timeout_s:g} s; torchrun starts lost "
                "ranks anew as often as its --max-restarts says"
            ) from late

    def _listening(self) -> Server:
        """The server, which stays for as long as the group: ranks of every restart dial it."""
        if self._server is None:
            token = wire.new_token()
            server = Server(self._size, token)
            interface = "0.0.0.0" if self._host else "127.0.0.1"
            address = server.listen(f"tcp:{interface}:0", announce=self._host)
            self._server = server
            self._handover = handover.Handover.here(address, token)
            self._handover.write(self._directory)
        return self._server

    async def _ended(self, rank: int | None) -> str:
        return "torchrun says how it ended" if rank is not None else ""

    async def _release(self) -> None:
        if self._handover is not None:
            self._handover.remove(self._directory)
        if self._server is not None:
            await self._server.close()
        self._server = self._handover = None
