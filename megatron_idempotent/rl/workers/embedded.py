"""Runs ranks on this machine, forked by a launcher that has already imported torch and Megatron."""

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

#: The longest lifetime of ranks; `poll(2)` takes milliseconds as an int.
_LIFE_S = 24 * 24 * 3600.0
#: Seconds for ranks to end after their pipes are closed, and then after they are killed.
_END_S, _KILL_S = 2.0, 10.0


class EmbeddedRanks(Ranks):
    """Implements `RankGroup` with forked processes on this machine, by default on the CPU.

    The first `start` waits some ten seconds for the launcher's imports; a later one, after a loss,
    only forks new ranks. Ranks and launcher end with this process, however it ends.

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
        """Keep the settings; `start` starts the ranks.

        Args:
            spec: the worker that each rank constructs.
            size: the number of ranks.
            log_dir: a folder for the output of rank N in `rank-N.log`; None for this process's
                output.
            call_timeout_s: seconds for calls without a `timeout_s`; None for no limit.
            start_timeout_s: seconds for all ranks to start, and again for all workers to be
                constructed.
            pool: an existing pool to use, by one group at a time; `close` leaves it open. None to
                make one.
            preload: modules that the launcher of a new pool imports before it forks ranks.
            device: the device of a new pool; see `RankPool`.
        """
        super().__init__(size, start_timeout_s=start_timeout_s, call_timeout_s=call_timeout_s)
        if pool is not None and pool.max_world_size < size:
            raise ValueError(
                f"there are {size} ranks, and the pool has up to {pool.max_world_size}; make it "
                "larger"
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
        links = [PipeLink(near_end) for near_end, _ in pipes]
        run = self._run = _Run(
            self._pool, self._size, (self._spec, self._log_dir), [far_end for _, far_end in pipes]
        )
        starting = asyncio.gather(*(link.ready() for link in links))
        try:
            waiting: set[asyncio.Future[Any]] = {starting, run.over}
            await asyncio.wait(
                waiting, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not starting.done():
                reason = run.end_of() or f"they were not ready within {self._start_timeout_s:g} s"
                raise RanksLost(f"the ranks could not be started: {reason}")
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
        """Wait until all ranks have ended, and kill those that take too long. Return a text that
        says how rank `rank` ended; "" if that is unknown, or if `rank` is None.

        The ranks' pipes are already closed, which makes a rank end by itself.
        """
        run, self._run = self._run, None
        if run is None:
            return ""
        await asyncio.wait([run.over], timeout=_END_S)
        if not run.over.done() and run.pids:
            for pid in run.pids:  # a stopped rank does not end by itself
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.wait([run.over], timeout=_KILL_S)
        if not run.over.done() and self._pool is not None:
            # Close the launcher, which may still be importing; its ranks end with it.
            await asyncio.to_thread(self._pool.close)
            await asyncio.wait([run.over], timeout=_KILL_S)
        return "" if rank is None else run.end_of(rank)

    async def _release(self) -> None:
        if self._owns_pool and self._pool is not None:
            pool, self._pool = self._pool, None
            await asyncio.to_thread(pool.close)


class _Run:
    """Runs `RankPool.run`, which serves the ranks, in a thread until all ranks have ended.

    The thread is a daemon: without `close()`, the process would wait for its ranks at exit, and the
    ranks for the process.
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
        """A future of the error of `run`, or of None."""
        self.pids: list[int] = []

        def wait() -> None:
            error: BaseException | None = None
            try:
                pool.run(size, _serve, *arguments, timeout_s=_LIFE_S, pipes=pipes)
            except BaseException as raised:  # noqa: BLE001 (reported by `end_of`)
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self.over.set_result, error)

        threading.Thread(target=wait, name="ranks", daemon=True).start()

    def end_of(self, rank: int | None = None) -> str:
        """Return a text that says how rank `rank` ended, or if `rank` is None how the whole run
        ended; empty if unknown.
        """
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
    """Run on each rank, once its process group is up: construct the worker, and execute the
    controller's calls from `pipe`.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # one thread: sums have a fixed order
    rank = int(os.environ["RANK"])
    if log_dir is not None:
        with (log_dir / f"rank-{rank}.log").open("ab", buffering=0) as log:
            for descriptor in (1, 2):  # including output of C++
                os.dup2(log.fileno(), descriptor)
    serve_pipe(pipe, Served(rank, lambda: make_worker(spec)))
