"""Measures how fast each transport takes weights to another process, beside a copy within memory.

    python -m benchmarks.weight_transports [--rounds 5] [--megabytes 64] [--json] [--device cuda]

Rank 0 sends buckets with one matrix, and rank 1 receives them into its own memory. A bucket is
announced once the previous one has arrived, and checksums are not computed. With `--device cuda`
the matrix is on a GPU that both ranks share, and CUDA IPC is also measured; the other transports
deliver to host memory. The results are medians over rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks._device import add_device
from benchmarks._record import options, tell
from megatron_idempotent.proof import cpu


def measure(name: str, rounds: int, megabytes: int) -> list[float]:
    """Send buckets from rank 0 to rank 1 by the transport `name`. Return on rank 0 the GB/s of each
    bucket except the first, and on rank 1 [].
    """
    import torch
    import torch.distributed as dist

    from megatron_idempotent.rl.weights import Bucket, WeightUpdate
    from megatron_idempotent.rl.weights.transports import receiver

    group = dist.new_group(backend="gloo")

    def told(source: int, what: Any = None) -> Any:
        box = [what]
        dist.broadcast_object_list(box, src=source, group=group)
        return box[0]

    if dist.get_rank() == 1:
        inbound = receiver(told(0), rank=1)
        for _ in range(rounds + 1):
            inbound.receive(told(0))
            told(1)
        inbound.close()
        return []

    async def send() -> list[float]:
        weights = torch.ones(_rows(megabytes), 1024, device="cuda")
        sender = _sender(name)
        told(0, await sender.open(WeightUpdate(id="run/1", version=1)))
        rates = []
        for index in range(rounds + 1):
            bucket = Bucket(index=index, tensors={"w": weights}, checksums={})
            started = time.perf_counter()
            told(0, await sender.announce(bucket))
            await sender.transmit(bucket)
            told(1)
            rates.append(bucket.nbytes / (time.perf_counter() - started) / 1e9)
            await sender.release(bucket)
        await sender.close()
        return rates[1:]

    return asyncio.run(send())


def _rows(megabytes: int) -> int:
    """Return the number of rows of 1,024 float32 elements in `megabytes` MiB."""
    return megabytes * 256


def copied(rounds: int, megabytes: int) -> float:
    """Measure copies of a matrix within the memory of a rank's device; return the median GB/s."""
    import torch

    source = torch.ones(_rows(megabytes), 1024, device="cuda")
    target = torch.empty_like(source)
    rates = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        rates.append(source.nbytes / (time.perf_counter() - started) / 1e9)
    return statistics.median(rates[2:])


def _sender(name: str) -> Any:
    from megatron_idempotent.rl.weights import transports

    makers: dict[str, Callable[[], Any]] = {
        "shared_memory": transports.SharedMemorySender,
        "gloo": transports.ProcessGroupSender,
        "cuda_ipc": transports.CudaIpcSender,
    }
    return makers[name]()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=64, help="of a bucket")
    add_device(parser)
    asked = parser.parse_args()
    names = ["shared_memory", "gloo", *(["cuda_ipc"] if asked.device == "cuda" else [])]
    found: dict[str, Any] = {"mb": asked.megabytes}
    with cpu.RankPool(2, device=asked.device) as pool:
        (copy,) = pool.run(1, copied, asked.rounds, asked.megabytes, timeout_s=120.0)
        found["copy_gb_per_s"] = copy
        for name in names:
            rates, _ = pool.run(2, measure, name, asked.rounds, asked.megabytes, timeout_s=300.0)
            rate = statistics.median(rates)
            found[name] = {"gb_per_s": rate, "of_a_copy": rate / copy}
    tell(found, asked.json)


if __name__ == "__main__":
    main()
