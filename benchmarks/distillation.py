"""Log-probs of K targets, top-k and the divergence from it, beside plain PyTorch's.

    python -m benchmarks.distillation [--rounds 5] [--tokens 1024] [--vocabulary 32768] [--json]

One rank has the entire vocabulary, as plain PyTorch requires. PyTorch computes `log_softmax` in
float32 and the result from it; this library computes the same result with borrowed and with
consumed logits. Forward and backward run on a new copy of the same logits each time, and the
implementations alternate.

- time: the median over rounds of PyTorch's seconds ÷ this library's
- memory: the peak of allocated memory, without the logits, ÷ the size of the logits
- error: the difference from float64 on the first tokens: the largest of the outputs, and the 2-norm
  of the gradient's difference ÷ the 2-norm of the gradient
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

from benchmarks._logprob_cases import as_output
from benchmarks._record import options, tell
from megatron_idempotent.proof import cpu

_K = 64
_COMPARED = 64
#: An implementation: a function of the student's logits and the teacher's `vocab_topk`.
Run = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The time, memory and errors of one implementation (`side`) of one computation (`what`, such
    as top-k) in one dtype.

    Example:
        Row(what="K targets", side="PyTorch", seconds=1.2, memory=3.0, ...)
    """

    what: str
    dtype: str
    side: str
    seconds: float
    time: float
    """PyTorch's seconds ÷ this implementation's."""
    memory: float
    error: float
    gradient_error: float | None


def _torch(what: str) -> Run:
    """Return plain torch's implementation of the computation `what`, in float64 for float64 logits
    and else in float32.
    """
    import torch

    def run(logits_NV: Any, topk: Any) -> Any:
        ids_NK = topk.ids
        dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        s_NV = logits_NV.to(dtype).log_softmax(-1)
        if what == "K targets":
            return s_NV.gather(-1, ids_NK)
        if what == "top-k":
            return s_NV.topk(_K, -1).values
        t_NK, s_NK = topk.logprob.to(dtype), s_NV.gather(-1, ids_NK)
        rests = [torch.log1p(-each.exp().sum(-1)) for each in (t_NK, s_NK)]
        of_k = (t_NK.exp() * (t_NK - s_NK)).sum(-1)
        return of_k + rests[0].exp() * (rests[0] - rests[1])

    return run


def _ours(what: str, ownership: Literal["borrow", "consume"]) -> Run:
    from megatron_idempotent import token_logprobs
    from megatron_idempotent.logprobs import topk_kl, vocab_topk

    def run(logits_NV: Any, topk: Any) -> Any:
        if what == "top-k":
            return vocab_topk(logits=logits_NV, k=_K).logprob
        stats = token_logprobs(logits=logits_NV, targets=topk.ids, ownership=ownership)
        if what == "K targets":
            return stats.logprob
        return topk_kl(stats, topk.logprob, teacher_rest=topk.rest).kl

    return run


WHAT = ("K targets", "top-k", "KL, top-k and a tail")


def measured(what: str, dtype: str, tokens: int, vocabulary: int, rounds: int) -> list[Row]:
    """Measure all implementations of one computation on a rank, alternately; return their rows."""
    import torch

    from megatron_idempotent.logprobs import TopK, vocab_topk
    from megatron_idempotent.proof.cpu.probes import peak_bytes

    torch.manual_seed(1)
    logits_NV = 3 * torch.randn(tokens, vocabulary)
    teacher_NV = (logits_NV + torch.randn(tokens, vocabulary)).to(getattr(torch, dtype))
    logits_NV = logits_NV.to(teacher_NV.dtype)
    topk = vocab_topk(logits=teacher_NV, k=_K)
    sides = {"PyTorch": _torch(what), "borrow": _ours(what, "borrow")}
    if what != "top-k":  # which is not differentiated, so that ownership makes no difference
        sides["consume"] = _ours(what, "consume")

    def step(run: Run, logits: Any, of_teacher: Any) -> Any:
        if what == "top-k":
            with torch.no_grad():
                return run(logits, of_teacher), None
        gradients: list[Any] = []
        logits.register_hook(gradients.append)
        found = run(logits, of_teacher)
        found.sum().backward()
        return found.detach(), gradients[0]

    few = slice(0, _COMPARED)
    of_few = TopK(*(each[few] for each in topk))
    exact = step(_torch(what), as_output(logits_NV[few].double()), of_few)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items() if number % 2 else reversed(sides.items()):
            given = as_output(logits_NV)
            start = time.perf_counter()
            step(run, given, topk)
            if number:
                seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, run in sides.items():
        inputs = [as_output(logits_NV) for _ in range(2)]

        def once(run: Run = run, inputs: list[Any] = inputs) -> None:
            step(run, inputs.pop(), topk)

        held = peak_bytes(once, runs=2)
        found = step(run, as_output(logits_NV[few]), of_few)
        of_gradient = None
        if exact[1] is not None:
            of_gradient = float((found[1].double() - exact[1]).norm() / exact[1].norm())
        of_torch = zip(seconds["PyTorch"], seconds[name], strict=True)
        rows.append(
            Row(
                what=what,
                dtype=dtype,
                side=name,
                seconds=statistics.median(seconds[name]),
                time=statistics.median(other / ours for other, ours in of_torch),
                memory=held / logits_NV.nbytes,
                error=float((found[0].double() - exact[0]).abs().max()),
                gradient_error=of_gradient,
            )
        )
    return rows


def main() -> None:
    """Measure all computations and dtypes; print a table, or the rows as JSON."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="*", default=[], help="what a computation's name contains")
    asked = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    rows: list[dict[str, Any]] = []
    with cpu.RankPool(1) as pool:
        for dtype, what in itertools.product(asked.dtypes, WHAT):
            if all(word in what for word in asked.only):
                arguments = (what, dtype, asked.tokens, asked.vocabulary, asked.rounds)
                (found,) = pool.run(1, measured, *arguments, timeout_s=1200.0)
                rows += [dataclasses.asdict(row) for row in found]
                if not asked.json:
                    tell(rows[-len(found) :])
    if asked.json:
        tell(rows, True)


if __name__ == "__main__":
    main()
