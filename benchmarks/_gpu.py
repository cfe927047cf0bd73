"""Describes the GPU for benchmarks, and measures its bandwidth, and time and memory of calls.

Times are measured with CUDA events around a call, so they include waits for the host; the result is
the median of several rounds. Before each round new inputs are made, and a buffer larger than the L2
cache is written.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

DEVICE = "cuda"
WARM_UP = 2
#: Several times the L2 cache of any GPU.
_FLUSH_BYTES = 512 << 20
_COPY_BYTES = 2 << 30
_PACKAGES = ("torch", "triton", "megatron-core", "liger_kernel", "verl")


def require_cuda(benchmark: str) -> None:
    """Exit with a message if torch finds no GPU."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"{benchmark} --device cuda: torch {torch.__version__} finds no CUDA device")


def about() -> dict[str, Any]:
    """Return a description of the GPU, its driver, and the versions of CUDA and of packages."""
    import torch

    found = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        driver = told.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "device": found.name,
        "memory_gb": found.total_memory / 1e9,
        "multiprocessors": found.multi_processor_count,
        "capability": list(torch.cuda.get_device_capability(0)),
        "driver": driver,
        "cuda": torch.version.cuda,
        **versions,
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The median and least time of a call on the GPU in milliseconds, and the peak memory that the
    call adds, in GB.

    Example:
        call = measured(make_inputs, lambda given: given[0].sum(), rounds=5)
    """

    ms: float
    """The median of the rounds."""
    fastest_ms: float
    beside_gb: float
    """The peak of allocated memory during the call, minus the memory allocated before it."""


def measured(prepare: Callable[[], Any], run: Callable[[Any], Any], rounds: int) -> Call:
    """Measure the time and memory of `run` on the GPU. In each round, `run` gets new inputs, which
    `prepare` returns.

    Freeing the result is not part of the measured time.
    """
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=DEVICE)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times, held = [], 0
    for number in range(WARM_UP + rounds):
        given = prepare()
        flush.zero_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start.record()
        result = run(given)
        end.record()
        end.synchronize()
        if number >= WARM_UP:
            times.append(start.elapsed_time(end))
            held = max(held, torch.cuda.max_memory_allocated() - before)
        del given, result
    return Call(ms=statistics.median(times), fastest_ms=min(times), beside_gb=held / 1e9)


def copied_bytes_per_s(rounds: int = 10) -> float:
    """Measure the bytes read and written per second by a copy within the device's memory."""
    import torch

    source = torch.ones(_COPY_BYTES, dtype=torch.int8, device=DEVICE)
    into = torch.empty_like(source)
    call = measured(lambda: None, lambda _: into.copy_(source), rounds)
    return 2 * _COPY_BYTES / call.ms * 1e3


def multiplied_flops_per_s(rounds: int = 5) -> float:
    """Measure the floating-point operations per second of an 8192 × 8192 product in bfloat16."""
    import torch

    side = 8192
    left, right = torch.randn(2, side, side, device=DEVICE, dtype=torch.bfloat16)
    call = measured(lambda: None, lambda _: left @ right, rounds)
    return 2 * side**3 / call.ms * 1e3
