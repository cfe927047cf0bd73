"""Measurements of a synchronous run: seconds and memory per phase, and means over all ranks.

A CPU rank has no device memory to measure: its resident set holds pages that it shares with its
launcher, and does not shrink when a tensor is freed, so no number of it would say what a phase
took.

`train/` and `evaluation/` hold what a repeated run reproduces bit for bit; everything that depends
on the clock is under `timing/train/`, and what a device's memory held under `memory/train/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_idempotent import cpu
from megatron_idempotent.controller import RolloutGroup
from megatron_idempotent.metrics.names import (
    GRAD_NORM,
    LOSS,
    POSITIONS,
    RESPONSE_TOKENS,
    TOKENS_PER_S,
    TOTAL_S,
)

from .batch import StepMetrics
from .rewards import evaluation_means, group_means, group_sums

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """Bytes that the allocator has given out, has taken from the device, and gave out at most.

    Example: `MemoryReading(allocated=0, reserved=2 << 20, peak=1 << 20)`.
    """

    allocated: int
    reserved: int
    peak: int


def read_device() -> MemoryReading:
    """Memory of the current CUDA device, the peak since `reset_peak`. Waits for nothing."""
    return MemoryReading(
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        peak=torch.cuda.max_memory_allocated(),
    )


def reader() -> Callable[[], MemoryReading] | None:
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
        read: Callable[[], MemoryReading] | None = None,
        reset_peak: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            read: the memory now; None for this process's device.
            reset_peak: starts the next peak at what is allocated now.
        """
        self._read = read or reader()
        self._reset_peak = reset_peak or torch.cuda.reset_peak_memory_stats
        self._phases: dict[str, tuple[MemoryReading, MemoryReading]] = {}

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


class Stopwatch:
    """Seconds and memory per phase of one rollout, on this rank.

    Example: `with watch.phase("generation"):`
    """

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}
        self._ledger = ledger or MemoryLedger()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block; a phase that raises is not recorded."""
        started = time.perf_counter()
        with self._ledger.phase(name):
            yield
        self._phases[name] = time.perf_counter() - started

    def memory(self) -> dict[str, float]:
        """GiB of device memory per phase; nothing on a CPU."""
        return self._ledger.metrics()

    def timings(self, tokens: int) -> dict[str, float]:
        """Seconds per phase and in all, and response tokens of all ranks per second."""
        total = time.perf_counter() - self._started
        named = {f"timing/train/{name}_s": seconds for name, seconds in self._phases.items()}
        return {**named, TOTAL_S: total, TOKENS_PER_S: tokens / total}


def summed(values: Mapping[str, float]) -> dict[str, float]:
    """Each value summed over all ranks, in float64. Collective: all ranks give the same names."""
    total = torch.tensor(
        list(values.values()), dtype=torch.float64, device=torch.cuda.current_device()
    )
    dist.all_reduce(total)
    return dict(zip(values, total.tolist(), strict=True))


def rollout_metrics(groups: Sequence[RolloutGroup], step: StepMetrics) -> dict[str, float]:
    """Means over all samples, or groups, of all ranks. Collective."""
    total = summed(group_sums(groups))
    return {
        **{f"train/{name}": value for name, value in group_means(total).items()},
        "train/response_length": step.response_tokens / total["samples"],
        RESPONSE_TOKENS: float(step.response_tokens),
        POSITIONS: float(step.positions),
        LOSS: step.loss,
        "train/kl": step.kl,
        "train/clip_fraction": step.clip_fraction,
        GRAD_NORM: step.grad_norm,
        "train/learning_rate": step.learning_rate,
        "train/optimizer_steps": float(step.optimizer_steps),
    }


def evaluation_metrics(groups: Sequence[RolloutGroup], *, seconds: float) -> dict[str, float]:
    """Mean reward and share of wholly right answers over held-out prompts. Collective."""
    return {
        **evaluation_means(summed(group_sums(groups))),
        "timing/train/evaluation_s": seconds,
    }
