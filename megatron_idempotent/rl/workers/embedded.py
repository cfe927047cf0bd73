"""Runs ranks on this machine, forked by a launcher that has torch and Megatron imported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from megatron_idempotent.proof.cpu import PROGRAM_PRELOAD, RankPool
from megatron_idempotent.proof.cpu.errors import RankError, RankTimeout, describe_exit

from .protocol import WorkerSpec
from .socket_ranks import Connection, Server, SocketRanks
from .wire import ENDED, RankConnection

#: The longest life of ranks, which `poll(2)` limits: it takes milliseconds in an int.
_LIFE_S = 24 * 24 * 3600.0
#: Seconds for ranks to end once their connection is closed, and then once they are killed.
_END_S, _KILL_S = 2.0, 10.0


class EmbeddedRanks(SocketRanks):
    """Implements `RankGroup` with processes on this machine, on the CPU unless told otherwise.

    A launcher pays for the imports with the first `start` (some ten seconds); a later one, after
    a loss, forks fresh ranks. Ranks and launcher end with this process, however it ends.

    Example:
        ranks = EmbeddedRanks(WorkerSpec(factory="package.module:make", argument=job), 2)
        await ranks.start()
        losses = await ranks.call("train", batch)
        await ranks.close()
    """

    def __init__(
        self,
        spec: WorkerSpec,
        size: int,
        *,
        log_dir: Path | None = None,
        call_timeout_s: float | None = None,
        start_timeout_s: float = 300.0,
        pool: RankPool | None = None,
        preload: Sequence[str] = PROGRAM_PRELOAD,
        device: str | None = None,
    ) -> None:
        """
        Args:
            spec: the worker that each rank makes.
            size: the number of ranks.
            log_dir: a folder for `rank-N.log`, to which rank N prints; None for this process's
                output.
            call_timeout_s: seconds for calls that give no `timeout_s`; None for no limit.
            start_timeout_s: seconds for all ranks to be there, and again for all workers to be
                made.
            pool: a pool whose launcher is used, by one group at a time, and which `close` leaves;
                None to make one.
            preload: modules that the launcher of such a pool imports before it forks ranks.
            device: the device of such a pool; see `RankPool`.
        """
        super().__init__(size, start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s)
        if pool is not None and pool.max_world_size < size:
            raise ValueError(
                f"{size} ranks, and the pool is of up to {pool.max_world_size}; make it larger"
            )
        self._spec, self._log_dir, self._preload = spec, log_dir, preload
        self._pool, self._owns_pool, self._device = pool, pool is None, device
        self._run: _Run | None = None

    async def _launch(self) -> list[Connection]:
        if self._pool is None:
            self._pool = RankPool(self._size, preload=self._preload, device=self._device)
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        token = secrets.token_bytes(32)
        server = Server(self._size, token)
        connections: list[Connection] = []
        with contextlib.ExitStack() as stack:
            try:
                address = server.listen(_address(stack))
                arguments = (self._spec, address, token, self._log_dir)
                run = self._run = _Run(self._pool, self._size, arguments)
                connections += await self._complete(server, [run.over], run.how)
                run.pids = [connection.hello.pid for connection in connections]
                await server.close()
            except BaseException:
                server.drop(connections)
                await server.close()  # ranks that wait, or have yet to dial, end on it
                await self._end()
                raise
        return connections

    async def _ended(self, rank: int | None) -> str:
        run = self._run
        await self._end()
        return "" if run is None or rank is None else run.how(rank)

    async def _end(self) -> None:
        """Wait for the ranks, whose connections are closed, to end, and kill those that do not."""
        run, self._run = self._run, None
        if run is None:
            return
        await asyncio.wait([run.over], timeout=_END_S)
        if not run.over.done() and run.pids:
            for pid in run.pids:  # such as stopped ones
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.wait([run.over], timeout=_KILL_S)
        if not run.over.done() and self._pool is not None:
            # The launcher itself, which may still be importing; its ranks end with it.
            await asyncio.to_thread(self._pool.close)
            await asyncio.wait([run.over], timeout=_KILL_S)

    async def _release(self) -> None:
        if self._owns_pool and self._pool is not None:
            pool, self._pool = self._pool, None
            await asyncio.to_thread(pool.close)


class _Run:
    """Runs `RankPool.run` in a thread, until all ranks have ended.

    The thread is a daemon: a process that ends without `close()` must not wait for its ranks, which
    wait for it.
    """

    def __init__(self, pool: RankPool, size: int, arguments: tuple[object, ...]) -> None:
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[BaseException | None] = loop.create_future()
        """A future of the error that `run` raised, or of None."""
        self.pids: list[int] = []

        def wait() -> None:
            error: BaseException | None = None
            try:
                pool.run(size, _serve, *arguments, timeout_s=_LIFE_S)
            except BaseException as raised:  # noqa: BLE001 (told where the ranks are waited for)
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self.over.set_result, error)

        threading.Thread(target=wait, name="ranks", daemon=True).start()

    def how(self, rank: int | None = None) -> str:
        """Say what the launcher knows of a rank's end, or of all; empty if it knows nothing."""
        error = self.over.result() if self.over.done() else None
        if isinstance(error, RankTimeout):
            return "the launcher gave up waiting for it"
        if rank is None or not isinstance(error, RankError):
            return "" if error is None else str(error)
        for failure in error.failures:
            if failure.rank == rank and failure.exit_code not in (None, ENDED):
                return f"it ended with {describe_exit(failure.exit_code)}"
            if failure.rank == rank and failure.exit_code is None:
                return f"it raised {failure.exception_type}: {failure.message}"
        return ""


def _serve(spec: WorkerSpec, address: str, token: bytes, log_dir: Path | None) -> None:
    """Serve the worker on a rank, once its process group is up."""
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread adds up in one order
    rank = int(os.environ["RANK"])
    if log_dir is not None:
        with (log_dir / f"rank-{rank}.log").open("ab", buffering=0) as log:
            for descriptor in (1, 2):  # what C++ prints, too
                os.dup2(log.fileno(), descriptor)
    RankConnection(address, token, rank).serve(spec)


def _address(stack: contextlib.ExitStack) -> str:
    """Return an address for a Unix socket; what it needs of the disk goes with the stack."""
    if sys.platform == "linux":  # without a file, which a controller that is killed would leave
        return f"\0megatron-idempotent-{secrets.token_hex(16)}"
    usual = tempfile.gettempdir()
    folder = usual if len(os.fsencode(usual)) < 70 else "/tmp"  # a path has 107 bytes at most
    return stack.enter_context(tempfile.TemporaryDirectory(prefix="ranks-", dir=folder)) + "/ranks"
