"""Measures the cost of the CPU runtime: a Megatron GPT training step with the emulation on and off.

    python -m benchmarks.cpu_overhead [--rounds 15] [--json]

Both programs run the same model in one process: one window of microbatches through Megatron's
schedule, without an optimizer step. "Runtime" is the CPU runtime. For "plain", all functions with a
`device` argument are torch's own again. Two things remain: functions of `torch.cuda` are emulated,
because they fail on a CPU, and functions that create tensors ignore `device`. The two alternate in
each round and the medians are compared, so that a busy machine slows both down.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks._device import in_turn
from benchmarks._record import options, tell
from megatron_idempotent.proof import cpu

MICROBATCHES = 8


@contextlib.contextmanager
def bare() -> Iterator[None]:
    """Put torch's own functions back within the block, in place of those that the CPU runtime wraps
    to choose a device. `torch.cuda` stays emulated.
    """
    import torch

    from megatron_idempotent.proof.cpu import placement

    wrapped = [(torch, name) for name in placement.FACTORIES]
    wrapped += [(torch.Tensor, name) for name in (*placement.NEW_METHODS, "to")]
    before = [(owner, name, vars(owner)[name]) for owner, name in wrapped]
    for owner, name, wrapper in before:
        setattr(owner, name, wrapper.__wrapped__)
    # Megatron and the benchmark create tensors with device="cuda", which torch's own functions
    # cannot do without a GPU.
    for name in ("zeros", "empty", "ones", "arange", "tensor"):
        setattr(torch, name, _without_device(getattr(torch, name)))
    try:
        yield
    finally:
        for owner, name, wrapper in before:
            setattr(owner, name, wrapper)


def _without_device(original: Any) -> Any:
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return make


def measure(rounds: int) -> dict[str, float]:
    """Measure forward and backward of MICROBATCHES microbatches on a rank, with and without the
    emulation; return median milliseconds.
    """
    from megatron_idempotent.proof.cpu import tiny

    bench = tiny.build(with_optimizer=False, overlap_grad_reduce=False)

    def window(side: Any) -> None:
        with side():
            bench.forward_backward(MICROBATCHES, data_seed=0)

    sides = {"plain": bare, "runtime": contextlib.nullcontext}
    runs = {name: functools.partial(window, side) for name, side in sides.items()}
    seconds = in_turn(rounds, runs, warm_up=2)  # the first rounds fill caches
    return {name: statistics.median(s for (s,) in each) * 1e3 for name, each in seconds.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    [median_ms] = cpu.run_ranks(1, measure, asked.rounds, timeout_s=300.0)
    ratios = {name: value / median_ms["plain"] for name, value in median_ms.items()}
    tell({"median_ms": median_ms, "ratio": ratios}, asked.json)


if __name__ == "__main__":
    main()
