"""Measures packs: how full and alike microbatches are, and a packed step ÷ a padded one.

    python -m benchmarks.packing [--seeds 10] [--ranks 8] [--sequences 512] [--budget 8192]
                                 [--rounds 15] [--hidden 256] [--json] [--only-bins]

The first table is about bins of sequences with log-normal lengths, with a mean of an eighth of the
budget and sigma 1. This library packs in three ways: the entire batch, by tokens or by work, with
bins distributed to ranks round-robin; and each rank's own sequences, with the same number of bins
on all ranks. The packers of NeMo-RL and verl pack the same lengths if NEMO_RL_SOURCE and
VERL_SOURCE name checkouts. The columns are:

    above      most tokens of a microbatch ÷ the budget; above 1 it may not fit into memory
    padding    fraction of padding if all microbatches are padded to the longest one
    waiting    fraction of the time that ranks wait, if all wait for the rank with most tokens in
               each microbatch
    by work    the same with the cost of attention: a token of a sequence of 24576 costs twice as
               much (verl's measure)
    given      `waiting` of perfect bins of each rank's own sequences, whose sums differ
    ms         time to compute the bins of all ranks

The second table is a step of `TrainStep` on one CPU rank, with the same sequences as padded rows
and as packs: the ratio of times, and the ratio of tokens. Times are the process's CPU time; the two
alternate, and the result is the median over rounds.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks._packing_peers import Packer, peers
from benchmarks._record import options, tell
from megatron_idempotent.proof import cpu
from megatron_idempotent.step import bin_sequences

WARM_UP = 2
#: The sequence length at which attention doubles a token's cost: 6 x a hidden size of 4096.
WORK = 24576
#: Positions of a row in the step.
T = 256


def lengths_of(seed: int, number: int, budget: int, longest: int) -> list[int]:
    """Draw `number` sequence lengths from a log-normal distribution with a mean of an eighth of
    `budget` and sigma 1, cut off at `longest`.
    """
    draw = random.Random(seed)
    location = math.log(budget / 8) - 0.5
    return [max(1, min(longest, int(draw.lognormvariate(location, 1)))) for _ in range(number)]


def whole(attention: float) -> Packer:
    """Return a packer that bins the entire batch and distributes the bins round-robin.

    `attention` is the argument of `bin_sequences`; 0 counts tokens alone.
    """

    def pack(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
        bins = bin_sequences(lengths, budget, multiple=ranks, attention=attention)
        return [[list(each) for each in bins[rank::ranks]] for rank in range(ranks)]

    return pack


def each_rank(lengths: Sequence[int], budget: int, ranks: int) -> list[list[list[int]]]:
    """Pack each rank's own sequences into the same number of bins on all ranks; return the bins of
    each rank.
    """
    shares = [list(range(rank, len(lengths), ranks)) for rank in range(ranks)]
    given = [[lengths[index] for index in share] for share in shares]
    number = max(len(bin_sequences(each, budget)) for each in given)
    return [
        [[share[place] for place in each] for each in bin_sequences(its, budget, bins=number)]
        for share, its in zip(shares, given, strict=True)
    ]


def measured(packer: Packer, lengths: Sequence[int], budget: int, ranks: int) -> dict[str, float]:
    """Run a packer once. Return measures of the result, by name: how full the microbatches are,
    what part of the time ranks wait for each other, and the milliseconds that packing took.
    """
    start = time.perf_counter()
    found = packer(lengths, budget, ranks)
    took = time.perf_counter() - start
    if sorted(index for rank in found for each in rank for index in each) != [*range(len(lengths))]:
        raise RuntimeError("a packer has lost a sequence, or made two of it")

    def waiting(cost: Any) -> float:
        loads = [[sum(cost(lengths[index]) for index in each) for each in rank] for rank in found]
        turns = list(zip(*loads, strict=True))
        return 1 - sum(map(sum, turns)) / (ranks * sum(map(max, turns)))

    tokens = [sum(lengths[index] for index in each) for rank in found for each in rank]
    return {
        "microbatches": len(tokens),
        "above": max(tokens) / budget,
        "padding": 1 - sum(tokens) / (len(tokens) * max(tokens)),
        "waiting": waiting(lambda length: length),
        "by work": waiting(lambda length: length * (1 + length / WORK)),
        "ms": 1000 * took,
    }


def bins(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure each packer on lengths drawn with several seeds. Return by packer the mean over the
    seeds of each number that `measured` returns, but the maximum of `above`, the fullest microbatch
    ÷ the budget; for a missing packer the reason.
    """
    sides: dict[str, Packer | str] = {
        "ours, of the whole batch": whole(0.0),
        "ours, of the whole batch, by work": whole(1 / WORK),
        "ours, of each rank's": each_rank,
        **peers(),
    }
    found: dict[str, Any] = {}
    for name, packer in sides.items():
        if isinstance(packer, str):
            found[name] = packer
            continue
        rounds = []
        for seed in range(arguments.seeds):
            budget = arguments.budget
            lengths = lengths_of(seed, arguments.sequences, budget, budget)
            rounds.append(measured(packer, lengths, budget, arguments.ranks))
            if packer is each_rank:
                sums = [sum(lengths[rank :: arguments.ranks]) for rank in range(arguments.ranks)]
                rounds[-1]["given"] = 1 - sum(sums) / (arguments.ranks * max(sums))
        found[name] = {
            key: (max if key == "above" else statistics.fmean)(each[key] for each in rounds)
            for key in rounds[0]
        }
    return found


class _Loss:
    """A loss for `TrainStep`: returns the sum of the negative log-probs of valid tokens, for padded
    rows and for packs.
    """

    kind = "token"

    def __init__(self) -> None:
        self.normalizers: dict[str, Any] = {}

    def __call__(self, output: Any, microbatch: Any) -> tuple[Any, dict[str, Any]]:
        import torch

        from megatron_idempotent import token_logprobs
        from megatron_idempotent.logprobs import shift_targets

        pack, tokens = microbatch.get("pack"), microbatch["input_ids"]
        targets = shift_targets(tokens, cu_seqlens=None if pack is None else pack.cu_seqlens)
        mask = torch.nn.functional.pad(microbatch["token_mask"][:, 1:], (0, 1)) > 0
        stats = token_logprobs(logits=output, targets=targets, token_mask=mask)
        return -stats.logprob.sum(), {}


def steps(hidden: int, rounds: int, rows: int) -> dict[str, float]:
    """Measure steps with packs and with padded rows on a rank. Return packs ÷ padded rows: the
    median ratio of CPU times, and the ratio of tokens.
    """
    import torch

    import megatron_idempotent
    from megatron_idempotent import TrainStep
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    model = tiny.build(
        exact_attention=True,
        sequence=T,
        config_overrides={"hidden_size": hidden, "calculate_per_token_loss": True},
    )
    step = TrainStep(model.chunks, model.optimizer)
    lengths = torch.tensor(lengths_of(1, rows, T * 2, T))
    tokens = torch.randint(0, tiny.VOCABULARY, (rows, T))
    mask = (torch.arange(T) < lengths[:, None]).float()
    batch = {"input_ids": tokens, "token_mask": mask, "lengths": lengths}
    sides = {"padded": {"micro_batch_size": 4}, "packed": {"max_tokens_per_microbatch": 4 * T}}

    def run(arguments: dict[str, int]) -> float:
        start = time.process_time()
        step_id = step.begin(_Loss(), global_batch_size=rows, **arguments)
        step.microbatch(step_id, batch)
        step.finish(step_id)
        return time.process_time() - start

    taken = [{name: run(side) for name, side in sides.items()} for _ in range(WARM_UP + rounds)]
    ratios = [each["packed"] / each["padded"] for each in taken[WARM_UP:]]
    share = float(lengths.sum()) / (rows * T)
    return {
        "tokens": share,
        "time": statistics.median(ratios),
        "time by tokens": statistics.median(ratios) / share,
    }


def main() -> None:
    """Print the measurements of all packers, and of packed steps ÷ padded ones."""
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--only-bins", action="store_true")
    asked = parser.parse_args()
    found: dict[str, Any] = {"bins": bins(asked)}
    if not asked.only_bins:
        sizes = asked.hidden, asked.rounds, asked.rows
        found["step"] = cpu.run_ranks(1, steps, *sizes, timeout_s=1200.0)[0]
    tell(found, asked.json)


if __name__ == "__main__":
    main()
