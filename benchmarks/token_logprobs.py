"""`token_logprobs` ÷ Megatron's own cross entropy: time, memory and collectives.

    python -m benchmarks.token_logprobs [--rounds 5] [--tokens 2048] [--vocabulary 32768] [--json]

Two gloo ranks share the vocabulary. Each side is given fresh logits, as the output of a layer, and
computes log-probs, in some rows entropies too, and the gradient. Ratios are medians of rounds in
which all sides take turns; memory is the most that is held beside the logits, in their size, by the
allocator's events. Megatron's fused cross entropy computes log-probs only, and overwrites logits of
float32, as its other one does.

Then the same from hidden states and the output layer's weight, products included: `logits` makes
them and consumes them, `hidden` makes a part of them at a time, of all tokens and of 40 % of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from megatron_idempotent import cpu

WARM_UP = 1
Side = Callable[[Any], Any]


def _tensor_parallel_group() -> Any:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return parallel_state.get_tensor_model_parallel_group()


def _sides(targets_N: Any, group: Any) -> dict[str, Side]:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_idempotent import token_logprobs

    def ours(entropy: str, ownership: str) -> Side:
        def run(logits_NV: Any) -> Any:
            stats = token_logprobs(
                logits=logits_NV,
                targets=targets_N,
                tp_group=group,
                entropy=entropy,
                ownership=ownership,
            )
            return stats.logprob.sum() + (stats.entropy.sum() if entropy == "grad" else 0.0)

        return run

    sides = {
        f"{ownership}, entropy {entropy}": ours(entropy, ownership)
        for ownership in ("borrow", "consume")
        for entropy in ("none", "metric", "grad")
    }
    sides["Megatron"] = lambda logits_NV: (
        -vocab_parallel_cross_entropy(logits_NV[:, None], targets_N[:, None]).sum()
    )
    sides["Megatron, fused"] = lambda logits_NV: (
        -fused_vocab_parallel_cross_entropy(logits_NV[:, None], targets_N[:, None], group).sum()
    )
    return sides


def measured(rounds: int, tokens: int, vocabulary: int, dtype: str) -> dict[str, Any]:
    """On a rank: seconds in each round, memory, and collectives of each side."""
    import torch

    from megatron_idempotent.cpu.allocations import peak_bytes

    torch.manual_seed(1)
    sides = _sides(torch.randint(0, vocabulary, (tokens,)), _tensor_parallel_group())
    torch.manual_seed(torch.distributed.get_rank())
    whole_NV = torch.randn(tokens, vocabulary // 2).to(getattr(torch, dtype))

    class Output(torch.autograd.Function):
        """As of a layer: no leaf and no view, and its gradient is freed when it has come."""

        @staticmethod
        def forward(_ctx: Any, _weight: Any) -> Any:
            return whole_NV.clone()

        @staticmethod
        def backward(_ctx: Any, _gradient_NV: Any) -> Any:
            return torch.zeros(())

    def fresh() -> Any:
        return Output.apply(torch.zeros((), requires_grad=True))

    def step(side: Side, logits_NV: Any) -> None:
        side(logits_NV).backward()

    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + WARM_UP):
        names = list(sides)
        for name in names if number % 2 else names[::-1]:
            logits_NV = fresh()
            torch.distributed.barrier()
            start = time.perf_counter()
            step(sides[name], logits_NV)
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    found: dict[str, Any] = {}
    for name, side in sides.items():
        given = [fresh() for _ in range(2)]
        held = peak_bytes(lambda side=side, given=given: step(side, given.pop()), runs=2)
        found[name] = (seconds[name], held / whole_NV.nbytes, _collectives(step, side, fresh()))
    return found


def from_hidden(rounds: int, tokens: int, vocabulary: int, features: int, dtype: str) -> Any:
    """On a rank: seconds in each round, and the most memory in bytes, of each side."""
    import torch
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.cpu.allocations import peak_bytes

    group = _tensor_parallel_group()
    torch.manual_seed(torch.distributed.get_rank())
    kind = getattr(torch, dtype)
    weight_VH = (torch.randn(vocabulary // 2, features) / features**0.5).to(kind).requires_grad_()
    torch.manual_seed(0)
    hidden_NH = torch.randn(tokens, features).to(kind).requires_grad_()
    targets_N = torch.randint(0, vocabulary, (tokens,))
    mask_N = torch.rand(tokens) < 0.4
    both: dict[str, Any] = {"targets": targets_N, "tp_group": group}

    def logits() -> Any:
        shared_NH = copy_to_tensor_model_parallel_region(hidden_NH)
        logits_NV = shared_NH @ weight_VH.t()
        return token_logprobs(logits=logits_NV, ownership="consume", **both).logprob.sum()

    def hidden(mask: Any = None) -> Any:
        stats = token_logprobs(hidden=hidden_NH, weight=weight_VH, token_mask=mask, **both)
        return stats.logprob.sum()

    sides = {"logits": logits, "hidden": hidden, "hidden, 40 %": lambda: hidden(mask_N)}

    def step(side: Callable[[], Any]) -> None:
        torch.autograd.grad(side(), (hidden_NH, weight_VH))

    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + WARM_UP):
        names = list(sides)
        for name in names if number % 2 else names[::-1]:
            torch.distributed.barrier()
            start = time.perf_counter()
            step(sides[name])
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    # The gradients are what all sides are there for.
    wanted = weight_VH.nbytes + hidden_NH.nbytes
    return {n: (seconds[n], peak_bytes(lambda r=r: step(r)) - wanted) for n, r in sides.items()}


def _collectives(step: Any, side: Side, logits_NV: Any) -> int:
    from megatron_idempotent.cpu.dispatched import watching_collectives

    seen: list[str] = []
    with watching_collectives(lambda name, _: seen.append(name)):
        step(side, logits_NV)
    return len(seen)


def main() -> None:
    """Print one row per side."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--hidden-tokens", type=int, default=1024)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        arguments = (options.rounds, options.tokens, options.vocabulary, dtype)
        found = cpu.run_ranks(2, measured, *arguments, timeout_s=1200.0)[0]
        base = found["Megatron, fused"][0]
        for name, (seconds, memory, collectives) in found.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
            results[f"{dtype}, {name}"] = {
                "time": ratio,
                "memory": memory,
                "collectives": collectives,
            }
            if not options.json:
                print(
                    f"{dtype:8} {name:24} time {ratio:5.2f} x fused, memory {memory:5.2f} x "
                    f"logits, collectives {collectives}",
                    flush=True,
                )
        arguments = (options.rounds, options.hidden_tokens, options.vocabulary, options.features)
        found = cpu.run_ranks(2, from_hidden, *arguments, dtype, timeout_s=1200.0)[0]
        base_s, base_bytes = found["logits"]
        for name, (seconds, held) in found.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, base_s, strict=True))
            results[f"{dtype}, from {name}"] = {"time": ratio, "memory": held / base_bytes}
            if not options.json:
                print(
                    f"{dtype:8} from {name:19} time {ratio:5.2f} x logits, memory "
                    f"{held / base_bytes:5.2f} x theirs",
                    flush=True,
                )
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
