"""Runs ranks on this machine, forked by a launcher that has torch and Megatron imported."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_idempotent.proof.cpu import PROGRAM_PRELOAD, RankPool
from megatron_idempotent.proof.cpu.errors import RankError, RankTimeout, describe_exit

from .pipes import PipeLink
from .protocol import RanksLost, WorkerSpec
from .ranks import Ranks
from .served import ENDED, Served, make_worker, serve_pipe

#: The longest life of ranks, which `poll(2)` limits: it takes milliseconds in an int.
_LIFE_S = 24 * 24 * 3600.0
#: Seconds for ranks to end once their pipes are closed, and then once they are killed.
_END_S, _KILL_S = 2.0, 10.0


class EmbeddedRanks(Ranks):
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

    async def _launch(self) -> list[PipeLink]:
        if self._pool is None:
            self._pool = RankPool(self._size, preload=self._preload, device=self._device)
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        pipes = [socket.socketpair() for _ in range(self._size)]
        links = [PipeLink(ours) for ours, _ in pipes]
        run = self._run = _Run(
            self._pool, self._size, (self._spec, self._log_dir), [theirs for _, theirs in pipes]
        )
        starting = asyncio.gather(*(link.ready() for link in links))
        try:
            waiting: set[asyncio.Future[Any]] = {starting, run.over}
            await asyncio.wait(
                waiting, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not starting.done():
                why = run.how() or f"they were not ready within {self._start_timeout_s:g} s"
                raise RanksLost(f"the ranks could not be started: {why}")
            run.pids = starting.result()
        except BaseException:
            starting.cancel()
            for link in links:
                link.shut()
            await self._end(None)
            await asyncio.gather(
                starting, *(link.closed() for link in links), return_exceptions=True
            )
            raise
        return links

    async def _end(self, rank: int | None) -> str:
        """Wait for the ranks, whose pipes are closed, to end, and kill those that do not."""
        run, self._run = self._run, None
        if run is None:
            return ""
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
        return "" if rank is None else run.how(rank)

    async def _release(self) -> None:
        if self._owns_pool and self._pool is not None:
            pool, self._pool = self._pool, None
            await asyncio.to_thread(pool.close)


class _Run:
    """Runs `RankPool.run` in a thread, until all ranks have ended.

    The thread is a daemon: a process that ends without `close()` must not wait for its ranks, which
    wait for it.
    """

    def __init__(
        self,
        pool: RankPool,
        size: int,
        arguments: tuple[object, ...],
        pipes: Sequence[socket.socket],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[BaseException | None] = loop.create_future()
        """A future of the error that `run` raised, or of None."""
        self.pids: list[int] = []

        def wait() -> None:
            error: BaseException | None = None
            try:
                pool.run(size, _serve, *arguments, timeout_s=_LIFE_S, pipes=pipes)
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


def _serve(pipe: socket.socket, spec: WorkerSpec, log_dir: Path | None) -> None:
    """Serve the worker on a rank, once its process group is up."""
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread adds up in one order
    rank = int(os.environ["RANK"])
    if log_dir is not None:
        with (log_dir / f"rank-{rank}.log").open("ab", buffering=0) as log:
            for descriptor in (1, 2):  # what C++ prints, too
                os.dup2(log.fileno(), descriptor)
    serve_pipe(pipe, Served(rank, lambda: make_worker(spec)))
