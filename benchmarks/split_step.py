"""Measures a step in pieces: `TrainStep` ÷ a plain Megatron step, and eight chunks ÷ one.

    python -m benchmarks.split_step [--rounds 4] [--hidden 256] [--json]
                                    [--latency-ms 2] [--gigabytes-per-s 0.2] [--only-steps]
                                    [--device cuda [--seconds 60]]

On CPU ranks, in one run per layout, by programs that take turns on one model and the same data:
a step of Megatron's alone, split ones with and without `last=True`, ones that are given a list
of their microbatches, and one with `order_stable=True`. Medians of each round's ratios, of wall
time and of the rank's CPU time, which a busy machine leaves more repeatable; and of the wall time
of the call alone, `microbatch` with the list ÷ Megatron's schedule.

On two pipeline stages each chunk fills and drains the pipeline, so that eight chunks cost what
those bubbles do: (microbatches + 8 x (stages - 1)) / (microbatches + stages - 1) slots of a forward
and a backward each. The wall ratio is printed beside it. No bubble is in the CPU time.

Then what is left of communication, with a delay in each reduction of two replicas, on microbatches
of 16 rows; and the most memory that a step holds, by the allocator's events. `--only-steps` leaves
both out, and so does `--device cuda`, which takes one rank, a model in bf16 at real sizes (hidden
2048 and rows of 2048 tokens by default), and waits for the device before each reading of the clock.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks._device import (
    Seconds,
    add_device,
    add_seconds,
    aim,
    fast_kernels,
    in_turn,
    real_sizes,
)
from benchmarks._record import options, progress, tell
from megatron_idempotent.proof import cpu

CHUNKS = 8
WARM_UP = 3
#: Measured together.
STEPS = 3
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    # Ranks, microbatches of each replica, options of the model.
    "one rank": (1, 8, {}),
    "two replicas": (2, 8, {"overlap_param_gather": True}),
    "two stages": (2, 16, {"pp": 2, "layers_per_stage": 1}),
    "interleaved": (2, 16, {"pp": 2, "vpp": 2, "layers_per_stage": 1}),
}
PAIRS = [
    ("one", "plain"),
    ("one, last", "plain"),
    ("eight", "one"),
    ("eight, last", "one, last"),
    ("list", "plain"),
    ("list, last", "plain"),
    ("order stable", "one"),
]
#: On a GPU, by the wall: a step in one piece, and in eight, over a plain one.
AIMS = {"(one, last)/(plain)": 1.02, "(eight, last)/(plain)": 1.05}
#: Of which the call alone is compared.
CALLS = [("list", "plain"), ("list, last", "plain")]


def _sides(hidden: int, microbatches: int, rows: int, **options: Any) -> Any:
    import logging

    from benchmarks._step_sides import Sides

    logging.disable(logging.WARNING)
    sides = Sides(hidden, microbatches, rows, **options)
    # On a model of its own, whose gradients are taken out of DDP's hands.
    stable = Sides(hidden, microbatches, rows, order_stable=True, **options)
    return sides, {
        "plain": sides.plain,
        "one": sides.split(1, last=False),
        "one, last": sides.split(1, last=True),
        "eight": sides.split(CHUNKS, last=False),
        "eight, last": sides.split(CHUNKS, last=True),
        "list": sides.ready(last=False),
        "list, last": sides.ready(last=True),
        "order stable": stable.split(1, last=False),
    }


def _in_turn(rounds: int, sides: Any, clocks: Any, limit_s: float | None = None) -> Seconds:
    """Measure steps after one that finds what the other side has left in the caches."""
    how = {"clocks": clocks, "steps": STEPS, "warm_up": WARM_UP, "limit_s": limit_s}
    return in_turn(rounds, sides, before=lambda name: sides[name](), **how)


def times(
    rounds: int,
    hidden: int,
    microbatches: int,
    options: dict[str, Any],
    rows: int = 2,
    limit_s: float | None = None,
) -> Seconds:
    """Runs on a rank; returns seconds of a step: wall, CPU, and wall in the call."""
    built, sides = _sides(hidden, microbatches, rows, **options)
    clocks = (time.perf_counter, time.process_time, lambda: built.call_s)
    return _in_turn(rounds, sides, clocks, limit_s)


def times_on_device(rounds: int, hidden: int, sequence: int, limit_s: float | None) -> Seconds:
    """Runs on a rank with a GPU; returns what `times` does, at real sizes."""
    fast_kernels()
    sizes = real_sizes(hidden, sequence=sequence, layers=4)
    return times(rounds, hidden, CHUNKS, sizes, rows=1, limit_s=limit_s)


def exposed(rounds: int, hidden: int, latency_s: float, bytes_per_s: float) -> tuple[Seconds, int]:
    """Runs on a rank; returns wall seconds, those in which nothing hid the network, and gradient
    bytes.
    """
    from benchmarks._network import Network

    built, sides = _sides(hidden, CHUNKS, 16)
    network = Network(latency_s=latency_s, bytes_per_s=bytes_per_s)
    network.install()
    size = sum(b.grad_data.nbytes for chunk in built.model.chunks for b in chunk.buffers)
    return _in_turn(rounds, sides, (time.perf_counter, lambda: network.exposed_s)), size


def memory(hidden: int) -> dict[str, float]:
    """Runs on a rank; returns the most bytes that a step of each side holds, in gradient
    buffers.
    """
    from megatron_idempotent.proof.cpu.probes import peak_bytes

    built, sides = _sides(hidden, CHUNKS, 2)
    size = sum(b.grad_data.nbytes for chunk in built.model.chunks for b in chunk.buffers)
    for step in sides.values():
        step()  # makes the optimizer's state
    return {name: peak_bytes(step) / size for name, step in sides.items()}


def main() -> None:
    """Print ratios of times, exposed communication, and memory."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--hidden", type=int, help="size of the hidden layers")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a row on a GPU")
    parser.add_argument("--only-steps", action="store_true", help="no network, no memory")
    add_device(parser)
    add_seconds(parser)
    parser.add_argument("--latency-ms", type=float, default=2.0)
    parser.add_argument("--gigabytes-per-s", type=float, default=0.2)
    asked = parser.parse_args()
    results: dict[str, Any] = {}
    for found in _on_ranks(asked) if asked.device == "cpu" else _on_device(asked):
        results |= found
        if not asked.json:
            tell(found)
    if asked.json:
        tell(results, True)


def _on_ranks(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    hidden = asked.hidden or 256
    for layout, (ranks, microbatches, model) in LAYOUTS.items():
        progress(layout)
        arguments = (asked.rounds, hidden, microbatches, model)
        seconds = cpu.run_ranks(ranks, times, *arguments, timeout_s=1200.0)[0]
        for clock, kind in enumerate(("wall", "CPU", "call")):
            yield {f"{layout}, {kind}": _ratios(seconds, clock, PAIRS if clock < 2 else CALLS)}
        stages = model.get("pp", 1)
        if stages > 1:
            slots = (microbatches + CHUNKS * (stages - 1)) / (microbatches + stages - 1)
            yield {f"{layout}, bubbles": slots}
    if asked.only_steps:
        return
    progress("a slow network")
    network = (asked.latency_ms / 1e3, asked.gigabytes_per_s * 1e9)
    (mine, size), (theirs, _) = cpu.run_ranks(
        2, exposed, asked.rounds, hidden, *network, timeout_s=1200.0
    )
    yield {"wire_ms": 1e3 * size / network[1]}
    for name in mine:
        # The rank that all wait for; it may be another one in each round.
        both = zip(mine[name], theirs[name], strict=True)
        found = {
            "wall_ms": 1e3 * statistics.median(wall for wall, _ in mine[name]),
            "exposed_ms": 1e3 * statistics.median(max(a[1], b[1]) for a, b in both),
        }
        yield {f"network, {name}": found}
    pairs = [("one, last", "one"), ("eight, last", "eight")]
    yield {"network, ratios": _ratios(mine, 0, pairs)}
    progress("memory")
    yield {"memory": cpu.run_ranks(2, memory, hidden, timeout_s=600.0)[0]}


def _on_device(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    arguments = (asked.rounds, asked.hidden or 2048, asked.sequence, asked.seconds)
    seconds = cpu.run_ranks(1, times_on_device, *arguments, timeout_s=600.0, device=asked.device)[0]
    pairs = [*PAIRS, ("eight, last", "plain"), ("eight", "plain")]
    yield {"plain_ms": 1e3 * statistics.median(each[0] for each in seconds["plain"])}
    for name, value in _ratios(seconds, 0, pairs).items():
        yield {name: aim(value, AIMS[name]) if name in AIMS else value}


def _ratios(seconds: Seconds, clock: int, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    return {
        f"({above})/({below})": statistics.median(
            a[clock] / b[clock] for a, b in zip(seconds[above], seconds[below], strict=True)
        )
        for above, below in pairs
    }


if __name__ == "__main__":
    main()
