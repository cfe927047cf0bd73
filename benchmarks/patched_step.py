"""What the patches cost a training step that hits no hazard: patched ÷ stock, in one run.

    python -m benchmarks.patched_step [--rounds 40] [--ranks 2] [--hidden 256] [--json]

A window of microbatches through upstream's schedule and an optimizer step, on one model in one
process per rank, with overlapped reductions and gathers. Rounds alternate between `apply()` and
`revert()`, which side goes first alternates too, and medians of the sides and of the pairs' ratios
are printed, so a busy machine slows both down. The first step behind a change of sides is not
measured: it finds what looking through all modules has left in the caches. CPU time of the rank's
process beside wall time, and lower quartiles, because that is what a busy machine leaves
repeatable. `--hidden 64` has steps so short that Python is most of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import megatron_idempotent
from megatron_idempotent import cpu

MICROBATCHES = 8
WARM_UP = 3
#: Measured together.
STEPS = 3


def measure(rounds: int, hidden: int) -> dict[str, list[tuple[float, float]]]:
    """On a rank: wall and CPU seconds of each round per side."""
    import logging

    import torch

    from megatron_idempotent.cpu import tiny

    logging.disable(logging.WARNING)
    megatron_idempotent.apply()
    bench = tiny.build(
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        config_overrides={"hidden_size": hidden},
        ddp_overrides={"bucket_size": 20 * hidden * hidden},
    )
    sides = {"stock": megatron_idempotent.revert, "patched": megatron_idempotent.apply}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for round_number in range(rounds + WARM_UP):
        order = list(sides) if round_number % 2 else list(sides)[::-1]
        for name in order:
            sides[name]()
            _step(bench)
            torch.distributed.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                _step(bench)
            elapsed = (
                (time.perf_counter() - start) / STEPS,
                (time.process_time() - start_cpu) / STEPS,
            )
            if round_number >= WARM_UP:
                seconds[name].append(elapsed)
    return seconds


def _step(bench: Any) -> None:
    bench.forward_backward(MICROBATCHES, data_seed=0)
    bench.step()


def main() -> None:
    """Print the median step of both sides and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256, help="size of the hidden layers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seconds = cpu.run_ranks(
        options.ranks, measure, options.rounds, options.hidden, timeout_s=600.0
    )[0]
    results: dict[str, Any] = {}
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
    if options.json:
        print(json.dumps(results))
        return
    for kind, found in results.items():
        low, high = found["quartiles"]
        print(
            f"{kind:4} stock {found['stock_ms']:7.2f} ms, patched {found['patched_ms']:7.2f} ms "
            f"per step, ratio {found['ratio']:.3f} (quartiles {low:.3f} to {high:.3f}), "
            f"of lower quartiles {found['of_lower_quartiles']:.3f}"
        )


if __name__ == "__main__":
    main()
