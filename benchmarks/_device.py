"""Chooses the device of a benchmark's ranks, and model sizes that keep a GPU busy.

Importing the module does not import torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_idempotent.proof.cpu.gpu import DEVICES, chosen_device


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option `--device` to an argument parser. Without the option the device is that of the
    variable MEGATRON_IDEMPOTENT_DEVICE, or else the CPU.
    """
    parser.add_argument("--device", choices=DEVICES, type=str, default=chosen_device())


def add_seconds(parser: argparse.ArgumentParser) -> None:
    """Add the option `--seconds` to a parser: the time after which a benchmark on a GPU starts no
    further round.
    """
    parser.add_argument("--seconds", type=float, help="on a GPU: start no round after these")


def rounds_within(rounds: int, seconds: float | None) -> Iterator[int]:
    """Yield the indices 0 to `rounds` - 1. Stop early once `seconds` have passed, but not before
    three indices were yielded.

    Pass None for `seconds` if there are several ranks: each has its own clock, so they could run
    different numbers of rounds.
    """
    started = time.monotonic()
    for number in range(rounds):
        if seconds is not None and number >= 3 and time.monotonic() - started > seconds:
            return
        yield number


Seconds = dict[str, list[tuple[float, ...]]]
"""Maps a program to a tuple per round: the difference of each clock."""


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
    """Time several programs, `sides`, on a rank. Each round runs all programs, in an order that
    changes from round to round. Return, for each program, a tuple per round: the seconds per step
    that each of `clocks` measured.

    `before` is called with a program's name before its measurement. The program then runs `steps`
    times, and the results are divided by `steps`. Results of `warm_up` rounds are dropped.
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
    """Return options of `tiny.build` for a bf16 model so large that its steps are mostly matrix
    products.
    """
    return {
        "dtype": "bf16",
        "layers_per_stage": layers,
        "sequence": sequence,
        "batch": 1,
        "vocabulary": min(32_000, 16 * sequence),  # smaller in a short trial run
        "config_overrides": {
            "hidden_size": hidden,
            "num_attention_heads": hidden // 128,
            "use_cpu_initialization": False,  # one core would take longer than the benchmark
        },
        # A layer has 12 x hidden x hidden weights: several buckets, so that reductions overlap.
        "ddp_overrides": {"bucket_size": 12 * hidden * hidden},
    }


def fast_kernels() -> None:
    """Allow nondeterministic kernels on this rank, as in training; tests use deterministic ones."""
    import torch

    torch.use_deterministic_algorithms(False)


def aim(
    value: float, at_most: float | None = None, *, at_least: float | None = None
) -> dict[str, float]:
    """Return a number together with its target, an upper or lower bound, as a dict for a report."""
    bounds = {"at_most": at_most, "at_least": at_least}
    return {"value": value} | {name: each for name, each in bounds.items() if each is not None}
