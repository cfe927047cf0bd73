"""`token_logprobs` beside Megatron's cross entropy, and with `--peers` beside verl, Liger and TRL.

    python -m benchmarks.token_logprobs [--rounds 5] [--tokens 2048] [--vocabulary 32768] [--json]
    python -m benchmarks.token_logprobs --peers [--only "from hidden states" "grad"]
    python -m benchmarks.token_logprobs --device cuda [--tune] [--only ...] [--json]

Peers, beside torch 2.13.0 and megatron-core 0.19.2, with what their imports need and no more:

    pip install --no-deps verl==0.9.1 liger_kernel==0.8.5 trl==1.16.0
    pip install accelerate==1.15.0 datasets==5.2.0 pandas==3.1.1
    pip install ray==2.60.0 tensordict==0.10.0 transformers==5.23.0

Two gloo ranks share the vocabulary, or one has it whole, as most peers want it. In a case all sides
compute the same outputs of the same inputs, and the gradient: of logits, which each side is given
fresh, as the output of a layer; or of hidden states and the output layer's weight, products
included, where `logits` makes them all, and `hidden` a part of them at a time. `borrow` and
`consume` are ours, and so are `hidden` and `logits, ...`. Peers are called as their trainers do,
compiled where they compile, and one that does not run on a CPU is listed with what it says.

With `--device cuda` one GPU has a shard of the vocabulary, and times are beside those of the
device's own copy and product in the same run; peers take part as far as they import, SkyRL's from
the checkout that SKYRL_SOURCE names, verl's also from VERL_SOURCE. `--tune` times every shape that
the kernels may have. On ranks of a CPU:

- time: medians, of rounds in which all sides take turns, of a side's seconds ÷ those of two of ours
- memory: the most that is held beside the inputs, and beside the gradients of hidden states and
  weight, by the allocator's events ÷ this rank's logits. 0 where logits are overwritten.
- collectives: of forward and backward
- errors, against float64, of the first tokens: the largest of log-probs and of entropies, and the
  2-norm of the gradient's ÷ the gradient's
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks import _gpu, _logprob_device, _logprob_peers
from benchmarks._logprob_cases import Case, Entropy
from benchmarks._logprob_rounds import Found, Measured, measured
from benchmarks._record import options, tell
from megatron_idempotent.proof import cpu

_ENTROPIES: tuple[Entropy, ...] = ("none", "metric", "grad")


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Return the cases that two ranks are shown first, and with peers those of one rank."""
    for ranks, dtype in itertools.product((2, 1) if options.peers else (2,), options.dtypes):
        common: dict[str, Any] = {
            "ranks": ranks,
            "dtype": dtype,
            "vocabulary": options.vocabulary,
            "features": options.features,
        }
        for entropy in _ENTROPIES:
            yield Case(form="logits", entropy=entropy, tokens=options.tokens, **common)
        for tokens, kept in itertools.product(options.hidden_tokens, (1.0, 0.4)):
            # What is computed of a part of the logits costs little beside the products.
            for entropy in _ENTROPIES if options.peers and kept == 1 else ("none",):
                yield Case(form="hidden", entropy=entropy, tokens=tokens, kept=kept, **common)


def rows(case: Case, found: Found) -> Iterator[dict[str, Any]]:
    """Return the table's row for each side."""
    references = [found[name] for name in case.references]
    for name, side in found.items():
        row: dict[str, Any] = {"side": name}
        if isinstance(side, Measured):
            row.update(dataclasses.asdict(side), seconds=statistics.median(side.seconds))
            row["time"] = [
                statistics.median(a / b for a, b in zip(side.seconds, other.seconds, strict=True))
                for other in references
                if isinstance(other, Measured)
            ]
        else:
            row["refused"] = side
        yield row


def main() -> None:
    """Print one table per case."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden-tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peers", nargs="*", choices=list(_logprob_peers.SIDES))
    parser.add_argument("--only", nargs="*", default=[], help="what a case's line is to contain")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--device-tokens", type=int, nargs="+", default=[8192, 65536, 262144])
    parser.add_argument("--tune", action="store_true", help="on a GPU: every shape of the kernels")
    asked = parser.parse_args()
    if asked.device == "cuda":
        _gpu.require_cuda("benchmarks.token_logprobs")
        _logprob_device.main(asked)
        return
    if asked.peers == []:
        asked.peers = list(_logprob_peers.SIDES)
    # Quiet about logits that were there before their memory was watched, and are freed in it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    results = []
    with cpu.RankPool(2) as pool:
        for case in cases(asked):
            if not all(word in str(case) for word in asked.only):
                continue
            arguments = (case, asked.rounds, asked.peers or ())
            found = [*rows(case, pool.run(case.ranks, measured, *arguments, timeout_s=1200.0)[0])]
            results += [{**dataclasses.asdict(case), **row} for row in found]
            if not asked.json:
                tell({str(case): found})
    if asked.json:
        tell(results, True)


if __name__ == "__main__":
    main()
