"""The device of a benchmark's ranks, and sizes that keep a GPU busy. Free of torch."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_idempotent.proof.cpu.gpu import DEVICES, chosen_device


def add_device(parser: argparse.ArgumentParser) -> None:
    """Take `--device`; without it the environment decides, and without that it is the CPU."""
    parser.add_argument("--device", choices=DEVICES, type=str, default=chosen_device())


def add_seconds(parser: argparse.ArgumentParser) -> None:
    """Take `--seconds`, after which a benchmark on a GPU starts no other round."""
    parser.add_argument("--seconds", type=float, help="on a GPU: start no round after these")


def rounds_within(rounds: int, seconds: float | None) -> Iterator[int]:
    """Yield the numbers of rounds, and end early once the seconds have passed, after three.

    Ranks read clocks of their own, so several of them may be given no limit.
    """
    started = time.monotonic()
    for number in range(rounds):
        if seconds is not None and number >= 3 and time.monotonic() - started > seconds:
            return
        yield number


Seconds = dict[str, list[tuple[float, ...]]]
"""Maps a side to what each clock has advanced in each round."""


def in_turn(
    rounds: int,
    sides: Mapping[str, Callable[[], object]],
    *,
    before: Callable[[str], object] = lambda name: None,
    clocks: Sequence[Callable[[], float]] = (time.perf_counter,),
    steps: int = 1,
    warm_up: int = 1,
    limit_s: float | None = None,
) -> Seconds:
    """Runs on a rank: measure all sides in each round, in another order each time.

    `before` is called with a side's name, and what it does is not measured. After that a side runs
    so many `steps`, over which its seconds are divided.
    """
    import torch

    found: Seconds = {name: [] for name in sides}
    names = list(sides)
    for number in rounds_within(rounds + warm_up, limit_s):
        first = number % len(names)
        order = names[first:] + names[:first]
        for name in order if number % 2 else order[::-1]:
            before(name)
            torch.distributed.barrier()
            torch.cuda.synchronize()
            start = [clock() for clock in clocks]
            for _ in range(steps):
                sides[name]()
            torch.cuda.synchronize()
            passed = tuple((c() - s) / steps for c, s in zip(clocks, start, strict=True))
            if number >= warm_up:
                found[name].append(passed)
    return found


def real_sizes(hidden: int, sequence: int, layers: int) -> dict[str, Any]:
    """Options of `tiny.build` for a model in bf16 whose matrix products are most of a step."""
    return {
        "dtype": "bf16",
        "layers_per_stage": layers,
        "sequence": sequence,
        "batch": 1,
        "vocabulary": min(32_000, 16 * sequence),  # smaller in a rehearsal
        "config_overrides": {
            "hidden_size": hidden,
            "num_attention_heads": hidden // 128,
            "use_cpu_initialization": False,  # one core would take longer than the benchmark
        },
        # A layer has 12 x hidden x hidden weights: several buckets, so that reductions overlap.
        "ddp_overrides": {"bucket_size": 12 * hidden * hidden},
    }


def fast_kernels() -> None:
    """Runs on a rank: chooses kernels as a training run has them, not the deterministic ones of
    tests.
    """
    import torch

    torch.use_deterministic_algorithms(False)


def aim(
    value: float, at_most: float | None = None, *, at_least: float | None = None
) -> dict[str, float]:
    """A number with what it should be at most, or at least, as it stands in a report."""
    bounds = {"at_most": at_most, "at_least": at_least}
    return {"value": value} | {name: each for name, each in bounds.items() if each is not None}
