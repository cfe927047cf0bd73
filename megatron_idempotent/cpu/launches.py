"""Counts what a program asks of the device: operators, and on a GPU launches and waits."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Calls in which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
_OPERATORS = ("aten::", "c10d::")


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Counts of what ran. Example: `activity(step).operators["aten::mm"] == 12`."""

    #: torch's operators and collectives, by name.
    operators: Counter[str]
    #: Kernels and graphs that were launched; 0 on a CPU.
    launches: int
    #: Calls in which the host waits for the device; 0 on a CPU.
    waits: int
    #: Copies from the device to the host; 0 on a CPU.
    copies_to_host: int

    def totals(self) -> dict[str, int]:
        """The four numbers."""
        return {
            "operators": self.operators.total(),
            "launches": self.launches,
            "waits": self.waits,
            "copies_to_host": self.copies_to_host,
        }

    def added_to(self, other: Activity) -> dict[str, int]:
        """Returns what this has more than another, operators by name; empty if nothing."""
        more = {name: n - other.operators[name] for name, n in self.operators.items()}
        theirs = other.totals()
        more |= {k: v - theirs[k] for k, v in self.totals().items() if k != "operators"}
        return {name: number for name, number in more.items() if number > 0}


def activity(run: Callable[[], Any]) -> Activity:
    """Run under torch's profiler, which sees all threads of this process, and count."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from megatron_idempotent.cpu.runtime import is_enabled

    os.environ["KINETO_LOG_LEVEL"] = "99"  # it writes to stderr that it starts
    on_device = torch.cuda.is_available() and not is_enabled()
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=kinds) as profiled:
        run()
        torch.cuda.synchronize()
    kineto = profiled.profiler
    assert kineto is not None
    names = Counter(event.name() for event in kineto.kineto_results.events())
    # The one above.
    waits = sum(names[name] for name in WAITS) - int(on_device)
    return Activity(
        operators=Counter({n: count for n, count in names.items() if n.startswith(_OPERATORS)}),
        launches=sum(n for name, n in names.items() if name.startswith(_LAUNCHES)),
        waits=waits,
        copies_to_host=sum(n for name, n in names.items() if name.startswith("Memcpy DtoH")),
    )
