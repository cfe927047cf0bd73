"""Device memory that each phase of a rollout takes, and whether it gives it back.

A CPU rank has none: its resident set holds pages that it shares with its launcher, and does not
shrink when a tensor is freed, so no number of it would say what a phase took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_idempotent import cpu

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that the allocator has given out, has taken from the device, and gave out at most.

    Example: `Memory(allocated=0, reserved=2 << 20, peak=1 << 20)`.
    """

    allocated: int
    reserved: int
    peak: int


def read_device() -> Memory:
    """Memory of the current CUDA device, the peak since `reset_peak`. Waits for nothing."""
    return Memory(
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        peak=torch.cuda.max_memory_allocated(),
    )


def reader() -> Callable[[], Memory] | None:
    """Returns a function that reads this process's device memory; None without a device."""
    emulated = cpu.is_enabled()
    return None if emulated or not torch.cuda.is_available() else read_device


class MemoryLedger:
    """Memory before, at most during, and after each phase of one rollout.

    Example:
        ledger = MemoryLedger()
        with ledger.phase("generation"):
            ...
        kept_gib = ledger.metrics().get("memory/train/generation_kept_gib")
    """

    def __init__(
        self,
        read: Callable[[], Memory] | None = None,
        reset_peak: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            read: the memory now; None for this process's device.
            reset_peak: starts the next peak at what is allocated now.
        """
        self._read = read or reader()
        self._reset_peak = reset_peak or torch.cuda.reset_peak_memory_stats
        self._phases: dict[str, tuple[Memory, Memory]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enter a block; a phase that raises is not entered."""
        if self._read is None:
            yield
            return
        self._reset_peak()
        before = self._read()
        yield
        self._phases[name] = before, self._read()

    def metrics(self) -> dict[str, float]:
        """Per phase: GiB allocated and reserved at its end, allocated at most, and kept.

        Kept is what is allocated after a phase less what was before it: 0 where it gives back what
        it took.
        """
        found: dict[str, float] = {}
        for name, (before, after) in self._phases.items():
            found[f"memory/train/{name}_allocated_gib"] = after.allocated / _GIB
            found[f"memory/train/{name}_reserved_gib"] = after.reserved / _GIB
            found[f"memory/train/{name}_peak_gib"] = after.peak / _GIB
            found[f"memory/train/{name}_kept_gib"] = (after.allocated - before.allocated) / _GIB
        return found
