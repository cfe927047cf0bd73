"""Records what the CPU allocator gives and takes back while something runs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any


def allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes that are given (positive) and taken back (negative), in order of time.

    What gloo's threads free goes unseen, and counts as held.
    """
    from torch.profiler import ProfilerActivity, profile

    os.environ["KINETO_LOG_LEVEL"] = "99"  # it writes to stderr that it starts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    kineto = profiled.profiler
    assert kineto is not None
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak_bytes(run: Callable[[], Any], *, runs: int = 3) -> int:
    """Most bytes that `run` holds at a time, above what was held before; the least of some runs.

    Example:
        extra = peak_bytes(lambda: loss_of(logits).backward())
    """
    return min(max(itertools.accumulate(allocations(run)), default=0) for _ in range(runs))
