"""`token_logprobs` beside Megatron's cross entropy, and with `--peers` beside verl, Liger and TRL.

    python -m benchmarks.token_logprobs [--rounds 5] [--tokens 2048] [--vocabulary 32768] [--json]
    python -m benchmarks.token_logprobs --peers [--only "from hidden states" "grad"]
    python -m benchmarks.token_logprobs --device cuda [--tune] [--only ...] [--json]

To install the other libraries with torch 2.13.0 and megatron-core 0.19.2, and only the dependencies
that they import:

    pip install --no-deps verl==0.9.1 liger_kernel==0.8.5 trl==1.16.0
    pip install accelerate==1.15.0 datasets==5.2.0 pandas==3.1.1
    pip install ray==2.60.0 tensordict==0.10.0 transformers==5.23.0

The vocabulary is split over two gloo ranks, or on one rank, as most of the other libraries require.
In a case, all implementations compute the same outputs and gradients of the same inputs. These are
logits, of which each run gets a new copy that is the output of a layer; or hidden states and the
output layer's weight, where the time includes the matrix products. This library's implementations
are `borrow` and `consume` for logits and, for hidden states, `logits, …`, which computes all logits
first, and `hidden`, which computes a part of them at a time. Other libraries are called as in their
trainers, compiled if their trainers compile. A library that fails on a CPU is listed with its
error.

With `--device cuda` one GPU has a shard of the vocabulary, and times are compared with a copy and a
matrix product on the device in the same run. Other libraries run if they can be imported: SkyRL
from the checkout at SKYRL_SOURCE, verl also from VERL_SOURCE. `--tune` measures every shape of the
kernels. The results on CPU ranks are:

- time: the seconds of an implementation ÷ those of two of this library's; medians over rounds in
  which all implementations alternate
- memory: the peak of allocated memory, without the inputs and the gradients of hidden states and
  weight, ÷ the size of this rank's logits; 0 if logits are overwritten
- collectives: the number in forward and backward
- errors: differences from float64 on the first tokens: the largest of log-probs and of entropies,
  and the 2-norm of the gradient's difference ÷ the 2-norm of the gradient
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
    """Yield the cases of two ranks and then, if other libraries take part, those of one rank."""
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
            # Entropies are measured only with other libraries and without a token mask: they cost
            # little in comparison with the matrix products.
            for entropy in _ENTROPIES if options.peers and kept == 1 else ("none",):
                yield Case(form="hidden", entropy=entropy, tokens=tokens, kept=kept, **common)


def rows(case: Case, found: Found) -> Iterator[dict[str, Any]]:
    """Yield a table row for each implementation of a case, with its times ÷ the times of two of
    this library's implementations.
    """
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
    """Measure all cases; print a table for each, or all rows as JSON."""
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
    # Suppress the profiler's warnings about memory that was allocated before profiling began.
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
