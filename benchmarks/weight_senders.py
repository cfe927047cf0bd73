"""Measures an update of weights that 1, 2 and 4 ranks send side by side, by the seconds of one.

    python -m benchmarks.weight_senders [--rounds 5] [--megabytes 256] [--json]

Four ranks are the pipeline stages of a float32 model. One process receives all buckets through
shared memory, files and gloo, like the worker of an engine. With one sender, the other stages first
send their weights to rank 0. The numbers of senders alternate, and results are medians over rounds.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks._record import options, tell
from benchmarks.weight_export import make_source
from megatron_idempotent.rl.sync import Exports, RemoteWeights
from megatron_idempotent.rl.weights.transports import (
    DiskSender,
    ProcessGroupSender,
    SharedMemorySender,
)
from megatron_idempotent.rl.workers import EmbeddedRanks, WorkerSpec

STAGES = 4
SENDERS = (1, 2, 4)
BUCKET_BYTES = 32 << 20


class Worker(Exports):
    """A rank's worker that exports a model's weights. The number of ranks that send can be changed
    between two exports.
    """

    def __init__(self, megabytes: int) -> None:
        self._sources = make_source(megabytes, {"pp": STAGES}, SENDERS)
        super().__init__(self._sources[0])

    def send_from(self, senders: int) -> int:
        """Set how many ranks send in the next exports; return the model's size in bytes."""
        self._export_source = self._sources[SENDERS.index(senders)]
        return sum(info.nbytes for info in self._export_source.tensors())


async def measure(rounds: int, megabytes: int, folder: Path) -> dict[str, Any]:
    """Measure the seconds of weight updates for each transport and number of sending ranks.

    Returns:
        Median seconds, and their ratios to those with one sender.
    """
    spec = WorkerSpec(factory="benchmarks.weight_senders:Worker", argument=megabytes)
    ranks = EmbeddedRanks(spec, STAGES, preload=("torch", "megatron.core"))
    await ranks.start()
    makers: dict[str, Any] = {
        "shared memory": SharedMemorySender,
        "files": functools.partial(DiskSender, folder),
        "gloo": ProcessGroupSender,
    }
    numbers: dict[str, Any] = {}
    for name, make in makers.items():
        weights = RemoteWeights(ranks, asyncio.get_running_loop(), transport=make)
        taken: dict[int, list[float]] = {senders: [] for senders in SENDERS}
        for _ in range(rounds + 1):
            for senders in SENDERS:
                numbers["mb"] = (await ranks.call("send_from", senders))[0] / 1e6
                started = time.perf_counter()
                buckets = weights.buckets(bucket_bytes=BUCKET_BYTES)
                await asyncio.to_thread(deque, buckets, 0)
                taken[senders].append(time.perf_counter() - started)
        medians = {senders: statistics.median(taken[senders][1:]) for senders in SENDERS}
        for senders, seconds in medians.items():
            numbers[f"{name}, {senders} senders, seconds"] = seconds
            if senders > 1:
                numbers[f"{name}, {senders} senders ÷ 1"] = seconds / medians[1]
    await ranks.close()
    return numbers


def main() -> None:
    """Print seconds and ratios by transport and number of senders."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tell(asyncio.run(measure(asked.rounds, asked.megabytes, Path(folder))), asked.json)


if __name__ == "__main__":
    main()
