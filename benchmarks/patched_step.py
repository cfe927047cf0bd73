"""Measures what the patches cost a step that hits no hazard: patched ÷ stock, in one run.

    python -m benchmarks.patched_step [--rounds 40] [--ranks 2] [--hidden 256] [--json]
                                      [--device cuda [--seconds 60]]

A step is a window of microbatches through Megatron's schedule and an optimizer step, with
overlapped reductions and gathers, on one model. Each round measures it after `apply()` and after
`revert()`, in alternating order. The results are the medians of both and of their ratios, so that a
busy machine slows both down. The first step after a change is not measured, because `apply()` and
`revert()` search all modules, which displaces the processor's caches. CPU time of the rank's
process and lower quartiles are also printed, because a busy machine affects them less. With
`--hidden 64` steps are so short that they are mostly Python.

Then torch's profiler counts one step of each: the operators that the patches add and, on a GPU, the
kernel launches, waits of the host for the device, and copies to the host.

With `--device cuda` there is one rank with a bf16 model of realistic sizes (hidden 4096 by default,
rows of 4096 tokens), and the clock is read after waiting for the device.
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
#: Consecutive steps per measurement.
STEPS = 3
#: The target of patched / stock at realistic sizes.
AIM = 1.01


def measure(
    rounds: int, hidden: int, real: bool, limit_s: float | None
) -> tuple[Seconds, dict[str, Any]]:
    """Measure steps with and without the patches on a rank; return wall and CPU seconds, and counts
    of operators and launches.
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
    """Profile one patched and one stock step. Return the numbers of operators, kernel launches,
    waits and copies in each step, and those that the patches add.
    """
    seen = {}
    for name, side in sides.items():
        side()
        step()  # a first step also creates state that later steps reuse
        seen[name] = activity(step)
    return {
        **{name: found.totals() for name, found in seen.items()},
        "added": seen["patched"].added_to(seen["stock"]),
    }


def main() -> None:
    """Print the median times of patched and of stock steps, their median ratio, and how many
    operators, kernel launches, waits and copies each step has.
    """
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
