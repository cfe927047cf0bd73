"""Records what a program does while it runs: allocations, collectives, operators and launches."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


def allocations(run: Callable[[], Any]) -> list[int]:
    """Run a function; return the bytes of its allocations (positive) and frees (negative), in
    order.

    Memory that gloo's threads free counts as held: the profiler does not see them.
    """
    events = [event for event in _events(run, profile_memory=True) if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def _events(run: Callable[[], Any], *, on_device: bool = False, **options: Any) -> list[Any]:
    from torch.profiler import ProfilerActivity, profile

    os.environ["KINETO_LOG_LEVEL"] = "99"  # kineto writes to stderr that it starts
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=kinds, **options) as profiled:
        run()
    assert profiled.profiler is not None
    return list(profiled.profiler.kineto_results.events())


def peak_bytes(run: Callable[[], Any], *, runs: int = 3) -> int:
    """Call `run` several times (`runs`), and return the least of the peaks: the most bytes that a
    call has allocated and not yet freed at one time. Memory that was allocated before the call does
    not count.

    Example:
        extra = peak_bytes(lambda: loss_of(logits).backward())
    """
    return min(max(itertools.accumulate(allocations(run)), default=0) for _ in range(runs))


@contextlib.contextmanager
def watching_collectives(see: Callable[[str, list[Any]], None]) -> Iterator[None]:
    """Call `see` before each collective of torch in the block, with its operation and arguments.

    Messages between two ranks count, too. The arguments come as one list of leaves: tensors, the
    process group, options. It sees torch's dispatcher, on this thread and in backwards.

    Example:
        names = []
        with watching_collectives(lambda name, _: names.append(name)):
            model.step()
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                see(func._opname, tree_leaves((args, kwargs)))
            return func(*args, **(kwargs or {}))

    with Watching():  # type: ignore[no-untyped-call]
        yield


#: Calls in which the host waits for the device.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
_OPERATORS = ("aten::", "c10d::")


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Counts what a program ran: operators, launches, waits, copies. Example:
    `activity(step).operators["aten::mm"] == 12`.
    """

    #: The number of calls of each of torch's operators and collectives, by name.
    operators: Counter[str]
    #: The number of kernels and graphs that were launched; 0 on a CPU.
    launches: int
    #: The number of calls in which the host waits for the device; 0 on a CPU.
    waits: int
    #: The number of copies from the device to the host; 0 on a CPU.
    copies_to_host: int

    def totals(self) -> dict[str, int]:
        """Return the counts of operators, launches, waits and copies as a dict. The count of
        operators is the sum over all operators' names.
        """
        return {
            "operators": self.operators.total(),
            "launches": self.launches,
            "waits": self.waits,
            "copies_to_host": self.copies_to_host,
        }

    def added_to(self, base: Activity) -> dict[str, int]:
        """Return how many more of each operator, launch, wait and copy this `Activity` counts than
        `base` does. Counts that are not larger are left out, as is the total of operators.
        """
        more = {name: n - base.operators[name] for name, n in self.operators.items()}
        base_totals = base.totals()
        more |= {k: v - base_totals[k] for k, v in self.totals().items() if k != "operators"}
        return {name: number for name, number in more.items() if number > 0}


def activity(run: Callable[[], Any]) -> Activity:
    """Run a function under torch's profiler, which sees all threads; return the counts of what ran
    as an `Activity`.
    """
    import torch

    from .runtime import is_enabled

    def to_the_end() -> None:
        run()
        torch.cuda.synchronize()

    on_device = torch.cuda.is_available() and not is_enabled()
    names = Counter(event.name() for event in _events(to_the_end, on_device=on_device))
    # Without the synchronize() above.
    waits = sum(names[name] for name in WAITS) - int(on_device)
    return Activity(
        operators=Counter({n: count for n, count in names.items() if n.startswith(_OPERATORS)}),
        launches=sum(n for name, n in names.items() if name.startswith(_LAUNCHES)),
        waits=waits,
        copies_to_host=sum(n for name, n in names.items() if name.startswith("Memcpy DtoH")),
    )
