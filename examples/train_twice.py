"""Call Megatron's own `train()` three times: the second call fails unless Megatron is patched.

    python examples/train_twice.py

It runs `megatron.training` with overlapped reductions on two CPU ranks, and compares three calls of
two iterations with one call of six, bit for bit. It needs megatron-core 0.17.1 or later.
"""

from __future__ import annotations

import megatron_idempotent
from megatron_idempotent.proof import cpu


def run(calls: list[int], patched: bool) -> tuple[list[float], bytes]:
    """Call `train()` on a rank, once for each of `calls`; return all losses and parameter bits."""
    from megatron_idempotent.proof.cpu import program

    if patched:
        megatron_idempotent.apply()
    started = program.start(["--overlap-grad-reduce", "--overlap-param-gather"])
    for iterations in calls:
        started.train(iterations)
    return started.losses, started.parameters().numpy().tobytes()


def main() -> None:
    try:
        cpu.run_ranks(2, run, [2, 2, 2], False)
        print("stock:   three calls of train(2) went through")
    except cpu.RankError as error:
        failure = error.failures[0]
        print(f"stock:   {failure.exception_type}: {failure.message}")
    in_three = cpu.run_ranks(2, run, [2, 2, 2], True)
    in_one = cpu.run_ranks(2, run, [6], True)
    same = "the same bits as" if in_three == in_one else "OTHER BITS than"
    print(f"patched: three calls of train(2) have {same} one of train(6)")


if __name__ == "__main__":
    main()
