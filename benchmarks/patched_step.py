"""Measures what the patches cost a step that hits no hazard: patched ÷ stock, in one run.

    python -m benchmarks.patched_step [--rounds 40] [--ranks 2] [--hidden 256] [--json]
                                      [--device cuda [--seconds 60]]

A window of microbatches through upstream's schedule and an optimizer step, on one model in one
process per rank, with overlapped reductions and gathers. Rounds alternate between `apply()` and
`revert()`, which side goes first alternates too, and medians of the sides and of the pairs' ratios
are printed, so a busy machine slows both down. The first step after a change of sides is not
measured: it finds what looking through all modules has left in the caches. CPU time of the rank's
process beside wall time, and lower quartiles, because that is what a busy machine leaves
repeatable. `--hidden 64` has steps so short that Python is most of them.

Then one step of each side under torch's profiler: what patches add in operators, and on a GPU in
kernel launches, waits of the host for the device, and copies to the host.

With `--device cuda` it is one rank with a model in bf16 at real sizes (hidden 4096 by default, rows
of 4096 tokens), and a round waits for the device before each of its readings of the clock.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import megatron_idempotent
from benchmarks._device import (
    Seconds,
    add_device,
    add_seconds,
    aim,
    fast_kernels,
    in_turn,
    real_sizes,
)
from benchmarks._record import options, tell
from megatron_idempotent.proof import cpu
from megatron_idempotent.proof.cpu.probes import activity

MICROBATCHES = 8
WARM_UP = 3
#: Measured together.
STEPS = 3
#: Patched / stock at real sizes.
AIM = 1.01


def measure(
    rounds: int, hidden: int, real: bool, limit_s: float | None
) -> tuple[Seconds, dict[str, Any]]:
    """Runs on a rank; returns wall and CPU seconds of each round per side, and a profiled step's
    counts.
    """
    import logging

    from megatron_idempotent.proof.cpu import tiny

    logging.disable(logging.WARNING)
    megatron_idempotent.apply()
    if real:
        fast_kernels()
        sizes = real_sizes(hidden, sequence=4096, layers=4)
    else:
        sizes = {
            "config_overrides": {"hidden_size": hidden},
            "ddp_overrides": {"bucket_size": 20 * hidden * hidden},
        }
    bench = tiny.build(overlap_grad_reduce=True, overlap_param_gather=True, **sizes)
    sides = {"stock": megatron_idempotent.revert, "patched": megatron_idempotent.apply}

    step = functools.partial(bench.train_step, MICROBATCHES, data_seed=0)

    def change(name: str) -> None:
        sides[name]()
        step()

    seconds = in_turn(
        rounds,
        dict.fromkeys(sides, step),
        before=change,
        clocks=(time.perf_counter, time.process_time),
        steps=STEPS,
        warm_up=WARM_UP,
        limit_s=limit_s,
    )
    return seconds, _counts(step, sides)


def _counts(step: Callable[[], None], sides: dict[str, Any]) -> dict[str, Any]:
    """Count what one step of each side asks of the device, and what patches add to it by name."""
    seen = {}
    for name, side in sides.items():
        side()
        step()  # makes what is made once
        seen[name] = activity(step)
    return {
        **{name: found.totals() for name, found in seen.items()},
        "added": seen["patched"].added_to(seen["stock"]),
    }


def main() -> None:
    """Print the median step of both sides and the median ratio."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, help="size of the hidden layers")
    add_device(parser)
    add_seconds(parser)
    asked = parser.parse_args()
    real = asked.device == "cuda"
    seconds, counts = cpu.run_ranks(
        1 if real else asked.ranks,
        measure,
        asked.rounds,
        asked.hidden or (4096 if real else 256),
        real,
        asked.seconds if real else None,
        timeout_s=600.0,
        device=asked.device,
    )[0]
    results: dict[str, Any] = {"counts": counts}
    for clock, kind in enumerate(("wall", "CPU")):
        stock, patched = ([both[clock] for both in seconds[s]] for s in ("stock", "patched"))
        ratios = [p / s for p, s in zip(patched, stock, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        quarter = statistics.quantiles(patched, n=4)[0] / statistics.quantiles(stock, n=4)[0]
        results[kind] = {
            "stock_ms": statistics.median(stock) * 1e3,
            "patched_ms": statistics.median(patched) * 1e3,
            "ratio": statistics.median(ratios),
            "quartiles": [low, high],
            "of_lower_quartiles": quarter,
        }
    if real:
        results["wall"]["ratio"] = aim(results["wall"]["ratio"], AIM)
        added = counts["patched"].items()
        results["added"] = {name: aim(n - counts["stock"][name], 0) for name, n in added}
    tell(results, asked.json)


if __name__ == "__main__":
    main()
