"""Measures a synchronous run: seconds and memory per phase, and means over all ranks.

Metrics under `train/` and `evaluation/` are the same, bit for bit, when a run is repeated. Those
under `timing/train/` depend on the clock, and those under `memory/train/` on the device.

On a CPU no memory is measured: a rank's resident set has pages that it shares with its launcher,
and does not shrink when a tensor is freed, so that it would not show what a phase took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_idempotent.proof import cpu
from megatron_idempotent.rl.controller import RolloutGroup
from megatron_idempotent.rl.metrics.names import (
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
    """Holds what torch's allocator says of a device, in bytes.

    Example: `MemoryReading(allocated=0, reserved=2 << 20, peak=1 << 20)`.
    """

    allocated: int
    """Bytes of all tensors."""
    reserved: int
    """Bytes that the allocator has taken from the device."""
    peak: int
    """The most bytes of all tensors at once."""


def read_device() -> MemoryReading:
    """Read the current CUDA device's memory, without waiting for its work.

    The peak is that since `torch.cuda.reset_peak_memory_stats`.
    """
    return MemoryReading(
        allocated=torch.cuda.memory_allocated(),
        reserved=torch.cuda.memory_reserved(),
        peak=torch.cuda.max_memory_allocated(),
    )


def reader() -> Callable[[], MemoryReading] | None:
    """Return a function that reads this process's device memory; None without a device."""
    emulated = cpu.is_enabled()
    return None if emulated or not torch.cuda.is_available() else read_device


class MemoryLedger:
    """Measures a device's memory before, during and after each phase of one rollout.

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
            read: returns the memory now; None for that of this process's device.
            reset_peak: has the peak start again at what is allocated now; None for this device's.
        """
        self._read = read or reader()
        self._reset_peak = reset_peak or torch.cuda.reset_peak_memory_stats
        self._phases: dict[str, tuple[MemoryReading, MemoryReading]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the memory of a block; leave out a block that raises."""
        if self._read is None:
            yield
            return
        self._reset_peak()
        before = self._read()
        yield
        self._phases[name] = before, self._read()

    def metrics(self) -> dict[str, float]:
        """Return, for each phase, GiB allocated and reserved at its end, peak, and kept.

        Kept is what is allocated after the phase minus what was before it; it is 0 for a phase that
        frees what it allocates.
        """
        found: dict[str, float] = {}
        for name, (before, after) in self._phases.items():
            found[f"memory/train/{name}_allocated_gib"] = after.allocated / _GIB
            found[f"memory/train/{name}_reserved_gib"] = after.reserved / _GIB
            found[f"memory/train/{name}_peak_gib"] = after.peak / _GIB
            found[f"memory/train/{name}_kept_gib"] = (after.allocated - before.allocated) / _GIB
        return found


class Stopwatch:
    """Measures seconds and memory of each phase of one rollout, on this rank.

    Example: `with watch.phase("generation"): …`
    """

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}
        self._ledger = ledger or MemoryLedger()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the seconds and the memory of a block; leave out a block that raises."""
        started = time.perf_counter()
        with self._ledger.phase(name):
            yield
        self._phases[name] = time.perf_counter() - started

    def memory(self) -> dict[str, float]:
        """Return metrics of device memory per phase, in GiB; nothing on a CPU."""
        return self._ledger.metrics()

    def timings(self, tokens: int) -> dict[str, float]:
        """Return seconds per phase, seconds in all, and tokens per second.

        `tokens` are the response tokens of all ranks.
        """
        total = time.perf_counter() - self._started
        named = {f"timing/train/{name}_s": seconds for name, seconds in self._phases.items()}
        return {**named, TOTAL_S: total, TOKENS_PER_S: tokens / total}


def summed(values: Mapping[str, float]) -> dict[str, float]:
    """Return each value summed over all ranks, in float64.

    Collective: all ranks give the same names, in the same order.
    """
    total = torch.tensor(
        list(values.values()), dtype=torch.float64, device=torch.cuda.current_device()
    )
    dist.all_reduce(total)
    return dict(zip(values, total.tolist(), strict=True))


def rollout_metrics(groups: Sequence[RolloutGroup], step: StepMetrics) -> dict[str, float]:
    """Return metrics of a rollout: means over the samples or groups of all ranks. Collective.

    `groups` are those that this rank sampled, and `step` has the measurements of training.
    """
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
    """Return the mean reward and the share of samples with a reward of 1, over all ranks' groups.

    Collective. `groups` are this rank's; `seconds` are those of the evaluation.
    """
    return {
        **evaluation_means(summed(group_sums(groups))),
        "timing/train/evaluation_s": seconds,
    }
