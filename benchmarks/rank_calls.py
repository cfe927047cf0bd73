"""Measures a call on warm ranks against the first call, which starts the pool.

    python -m benchmarks.rank_calls [--json]

Two ranks all-reduce one number, so that the time is mostly that of forking, creating the process
group, returning the result and ending the ranks. The first call also imports torch and Megatron.
"""

from __future__ import annotations

import statistics
import time

from benchmarks._record import options, tell
from megatron_idempotent.proof.cpu import RankPool

CALLS = 10


def rank_sum() -> float:
    """Sum the numbers of all ranks by an all-reduce; return the sum on each rank."""
    import torch

    number = torch.tensor([float(torch.distributed.get_rank())])
    torch.distributed.all_reduce(number)
    return float(number)


def main() -> None:
    """Call ranks of a `RankPool`; print the first call's seconds, the median of the later ones, and
    the ratio.
    """
    asked = options(__doc__).parse_args()
    seconds = []
    with RankPool(2) as pool:
        for _ in range(CALLS + 1):
            started = time.perf_counter()
            assert pool.run(2, rank_sum) == [1.0, 1.0]
            seconds.append(time.perf_counter() - started)
    first, later = seconds[0], statistics.median(seconds[1:])
    tell({"first_s": first, "later_s": later, "ratio": later / first}, asked.json)


if __name__ == "__main__":
    main()
