"""Measures what it costs to drive ranks in processes of their own, and to lose one.

    python -m benchmarks.workers [--calls 2000] [--rounds 7] [--megabytes 64] [--ray] [--json]

The controller's event loop drives two embedded ranks. Measured are: an empty call on both ranks; a
call that returns a tensor from rank 0, and one that sends a tensor to both; the time from SIGKILL
on one rank until `RanksLost` is raised and all ranks have ended; and the time to start new ranks.
The results are medians, and ratios to an empty call. With `--ray`, the ranks are in actors of a Ray
cluster on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks._record import options, tell
from megatron_idempotent.rl.workers import EmbeddedRanks, RankGroup, RanksLost, WorkerSpec

RANKS = 2


class Worker:
    """A worker for the ranks that are measured; the benchmark calls its methods on all ranks."""

    def __init__(self, megabytes: int) -> None:
        import torch

        self._tensor = torch.zeros(megabytes << 18)  # float32

    def nothing(self) -> None:
        """Do nothing: the benchmark measures an empty call."""

    def give(self) -> Any:
        """Return the tensor on rank 0, and None on other ranks."""
        return self._tensor if os.environ["RANK"] == "0" else None

    def take(self, tensor: Any) -> None:
        """Receive a tensor, and drop it."""

    def process(self) -> int:
        """Return the id of this rank's process."""
        return os.getpid()

    def wait(self) -> None:
        """Sleep for a minute; the benchmark kills a rank meanwhile."""
        time.sleep(60)


def make(megabytes: int) -> Worker:
    """Make the worker of a rank, with a tensor of `megabytes` MiB."""
    return Worker(megabytes)


async def measure(
    calls: int, rounds: int, megabytes: int, make_ranks: Callable[[WorkerSpec, int], RankGroup]
) -> dict[str, float]:
    """Measure calls on ranks, the time until the loss of a killed rank is reported, and restarts of
    all ranks; return medians in milliseconds.
    """
    import torch

    ranks = make_ranks(WorkerSpec(factory="benchmarks.workers:make", argument=megabytes), RANKS)
    await ranks.start()
    tensor = torch.zeros(megabytes << 18)
    found = {
        "empty call": await _median(calls, lambda: ranks.call("nothing")),
        f"{megabytes} MB from rank 0": await _median(rounds, lambda: ranks.call("give")),
        f"{megabytes} MB to both": await _median(rounds, lambda: ranks.call("take", tensor)),
    }
    lost, started = [], []
    for _ in range(rounds):
        victim = (await ranks.call("process"))[1]
        waiting = asyncio.ensure_future(ranks.call("wait"))
        await asyncio.sleep(0.05)
        begun = time.perf_counter()
        os.kill(victim, signal.SIGKILL)
        with contextlib.suppress(RanksLost):
            await waiting
        lost.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        await ranks.start()
        started.append(time.perf_counter() - begun)
    await ranks.close()
    found["killed rank to RanksLost"] = 1e3 * statistics.median(lost)
    found["fresh ranks after that"] = 1e3 * statistics.median(started)
    return found


async def _median(times: int, call: Callable[[], Awaitable[Any]]) -> float:
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        await call()
        taken.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(taken)


def main() -> None:
    """Print the milliseconds of each operation, and their ratios to an empty call."""
    parser = options(__doc__)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--ray", action="store_true")
    asked = parser.parse_args()
    make_ranks: Callable[[WorkerSpec, int], RankGroup] = EmbeddedRanks
    if asked.ray:
        import ray

        from megatron_idempotent.rl.workers import RayRanks

        ray.init("local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
        make_ranks = RayRanks
    found = asyncio.run(measure(asked.calls, asked.rounds, asked.megabytes, make_ranks))
    per_call = {f"{name} ÷ empty call": ms / found["empty call"] for name, ms in found.items()}
    tell(found | per_call, asked.json)


if __name__ == "__main__":
    main()
