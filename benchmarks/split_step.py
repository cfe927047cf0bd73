"""Measures a step in pieces: `TrainStep` ÷ a plain Megatron step, and eight chunks ÷ one.

    python -m benchmarks.split_step [--rounds 3] [--hidden 256] [--json]
                                    [--all [--latency-ms 2] [--gigabytes-per-s 0.2]]
                                    [--device cuda [--seconds 60]]

On one CPU rank and on two pipeline stages, ranks take steps in several ways on one model and the
same data, alternately: a step with Megatron alone; steps in one and in eight calls, with and
without `last=True`; steps that pass a list of all microbatches; and a step with
`order_stable=True`. The results are the medians over rounds of the ratios of wall time and of the
rank's CPU time, which a busy machine affects less. For the list, also of the wall time of the call
alone: `microbatch` ÷ Megatron's schedule.

On two pipeline stages each call fills and drains the pipeline, so that eight calls have more
bubbles: the expected ratio is (microbatches + 8 x (stages - 1)) / (microbatches + stages - 1). It
is printed next to the ratio of wall times. CPU time does not include bubbles.

`--all` takes some seven minutes. It adds two replicas and an interleaved pipeline; two replicas
with microbatches of 16 rows and a simulated network, which delays each reduction: the communication
time that computation does not hide; and the peak memory of a step, from the allocator's events.
`--device cuda` uses one rank with a bf16 model of realistic sizes (hidden 2048 and rows of 2048
tokens by default), and reads the clock after waiting for the device.
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
#: Consecutive steps per measurement.
STEPS = 3
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    # The number of ranks, the microbatches per replica, and options of `tiny.build`.
    "one rank": (1, 8, {}),
    "two replicas": (2, 8, {"overlap_param_gather": True}),
    "two stages": (2, 16, {"pp": 2, "layers_per_stage": 1}),
    "interleaved": (2, 16, {"pp": 2, "vpp": 2, "layers_per_stage": 1}),
}
#: Measured without `--all`, too.
ALWAYS = ("one rank", "two stages")
PAIRS = [
    ("one", "plain"),
    ("one, last", "plain"),
    ("eight", "one"),
    ("eight, last", "one, last"),
    ("eight, last", "plain"),
    ("list", "plain"),
    ("list, last", "plain"),
    ("order stable", "one"),
]
#: Targets for ratios of wall times on a GPU: a step in one call, and in eight, ÷ a plain step.
AIMS = {"(one, last)/(plain)": 1.02, "(eight, last)/(plain)": 1.05}
#: The pairs of which the wall time of the call alone is also compared.
CALLS = [("list", "plain"), ("list, last", "plain")]


def _sides(hidden: int, microbatches: int, rows: int, **options: Any) -> Any:
    import logging

    from benchmarks._step_sides import Sides

    logging.disable(logging.WARNING)
    sides = Sides(hidden, microbatches, rows, **options)
    # A separate model, because `order_stable` takes its gradients out of DDP.
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
    """Time the steps in `sides`, such as a plain one and one in eight calls, alternately. Before
    each measurement, the same step runs once unmeasured, to warm the caches.
    """
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
    """Time all steps of `_sides` on a rank. Return for each of them and each round: wall seconds,
    CPU seconds, and the wall seconds inside of Megatron's schedule or of `TrainStep.microbatch`.
    """
    built, sides = _sides(hidden, microbatches, rows, **options)
    clocks = (time.perf_counter, time.process_time, lambda: built.call_s)
    return _in_turn(rounds, sides, clocks, limit_s)


def times_on_device(rounds: int, hidden: int, sequence: int, limit_s: float | None) -> Seconds:
    """Measure as `times` does, on a rank with a GPU and at realistic sizes."""
    fast_kernels()
    sizes = real_sizes(hidden, sequence=sequence, layers=4)
    return times(rounds, hidden, CHUNKS, sizes, rows=1, limit_s=limit_s)


def exposed(rounds: int, hidden: int, latency_s: float, bytes_per_s: float) -> tuple[Seconds, int]:
    """Measure all kinds of steps on a rank with a simulated network. Return for each its wall time
    and the time of communication that computation does not hide; also return the bytes of the
    gradient buffers.

    Returns:
        Wall seconds and seconds of exposed communication of each kind of step, and the bytes of
        gradients.
    """
    from benchmarks._network import Network

    built, sides = _sides(hidden, CHUNKS, 16)
    network = Network(latency_s=latency_s, bytes_per_s=bytes_per_s)
    network.install()
    size = sum(b.grad_data.nbytes for chunk in built.model.chunks for b in chunk.buffers)
    return _in_turn(rounds, sides, (time.perf_counter, lambda: network.exposed_s)), size


def memory(hidden: int) -> dict[str, float]:
    """Measure the peak memory of each kind of step on a rank, ÷ the size of gradient buffers."""
    from megatron_idempotent.proof.cpu.probes import peak_bytes

    built, sides = _sides(hidden, CHUNKS, 2)
    size = sum(b.grad_data.nbytes for chunk in built.model.chunks for b in chunk.buffers)
    for step in sides.values():
        step()  # creates the optimizer's state
    return {name: peak_bytes(step) / size for name, step in sides.items()}


def main() -> None:
    """Print the ratios of step times, the exposed communication, and the memory of steps."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, help="size of the hidden layers")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a row on a GPU")
    parser.add_argument("--all", action="store_true", help="all layouts, a network, and memory")
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
    for layout in LAYOUTS if asked.all else ALWAYS:
        ranks, microbatches, model = LAYOUTS[layout]
        progress(layout)
        arguments = (asked.rounds, hidden, microbatches, model)
        seconds = cpu.run_ranks(ranks, times, *arguments, timeout_s=1200.0)[0]
        for clock, kind in enumerate(("wall", "CPU", "call")):
            yield {f"{layout}, {kind}": _ratios(seconds, clock, PAIRS if clock < 2 else CALLS)}
        stages = model.get("pp", 1)
        if stages > 1:
            slots = (microbatches + CHUNKS * (stages - 1)) / (microbatches + stages - 1)
            yield {f"{layout}, bubbles": slots}
    if not asked.all:
        return
    progress("a slow network")
    network = (asked.latency_ms / 1e3, asked.gigabytes_per_s * 1e9)
    (mine, size), (theirs, _) = cpu.run_ranks(
        2, exposed, asked.rounds, hidden, *network, timeout_s=1200.0
    )
    yield {"wire_ms": 1e3 * size / network[1]}
    for name in mine:
        # The larger value is that of the slowest rank, which may differ between rounds.
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
    pairs = [*PAIRS, ("eight", "plain")]
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
