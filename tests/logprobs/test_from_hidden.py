"""Log-probs from hidden states and a weight equal those from logits, which are never built."""

from __future__ import annotations

from typing import Any

import pytest

H = 16


def _case(seed: int, size: int, dtype: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Whole hidden states and weight, and the other arguments; the same on all ranks."""
    import random

    import torch

    draw = random.Random(seed)
    torch.manual_seed(seed)
    shape = draw.choice([(8,), (4, 3), (0, 2), (4, 1, 2)])
    vocabulary = size * draw.choice([3, 40, 300])
    real = vocabulary - draw.choice([0, 2])
    hidden = torch.randn(*shape, H, dtype=torch.float64).to(dtype)
    weight = (torch.randn(vocabulary, H, dtype=torch.float64) / H**0.5).to(dtype)
    arguments = {
        "targets": torch.randint(0, real, shape),
        "vocab_size": real,
        "temperature": draw.choice([1.0, 0.7, torch.rand(shape) + 0.5]),
        "entropy": draw.choice(["none", "metric", "grad"]),
        "token_mask": torch.rand(shape) < draw.choice([0.0, 0.5, 1.0]),
        "workspace_bytes": draw.choice([1, 5000, None]),
    }
    return hidden, weight, arguments


def _total(stats: Any, entropy: str, seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    total = (stats.logprob * torch.randn(stats.logprob.shape)).sum()
    if entropy == "grad":
        total = total + (stats.entropy * torch.randn(stats.entropy.shape)).sum()
    return total


def against_logits(cases: int, layout: str) -> list[bytes]:
    """Runs on a rank: in float64, where only the order of sums differs; what it found, as bytes."""
    import torch
    import torch.distributed as dist

    from megatron_idempotent import token_logprobs

    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for seed in range(cases):
        hidden, weight, arguments = _case(seed, size, torch.float64)
        leaf, matrix = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        expected = token_logprobs(logits=leaf @ matrix.t(), **arguments)
        _total(expected, arguments["entropy"], seed).backward()

        ours = hidden.chunk(size)[rank] if layout == "sequence_parallel" else hidden
        ours = ours.clone().requires_grad_()
        part = weight.chunk(size)[rank].clone().requires_grad_()
        stats = token_logprobs(
            hidden=ours,
            weight=part,
            tp_group=dist.group.WORLD,
            hidden_layout=layout,
            **arguments,
        )
        _total(stats, arguments["entropy"], seed).backward()
        of_hidden = leaf.grad.chunk(size)[rank] if ours.shape != leaf.shape else leaf.grad
        close = {"rtol": 1e-11, "atol": 1e-13}
        for value, wanted in zip(stats[:3], expected[:3], strict=True):
            torch.testing.assert_close(value, wanted, **close)
        torch.testing.assert_close(ours.grad, of_hidden, **close)
        torch.testing.assert_close(part.grad, matrix.grad.chunk(size)[rank], **close)
        found += [each.detach().numpy().tobytes() for each in stats if each is not None]
    return found


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, "replicated"),
        (2, "replicated"),
        (4, "replicated"),
        (2, "sequence_parallel"),
        (4, "sequence_parallel"),
    ],
)
def test_as_from_logits_and_alike_on_all_ranks(megatron_ranks, ranks, layout):
    first, *others = megatron_ranks(ranks, against_logits, 40, layout)
    assert all(other == first for other in others)


def rounded(name: str) -> None:
    """Runs on a rank: in the type of a model, against float64 of the same values."""
    import torch

    from megatron_idempotent import token_logprobs

    dtype = getattr(torch, name)
    # Logits are rounded to the type: relative to the largest. Their gradient, and what comes out,
    # are rounded to it as well; products of H and of V terms are added up in float32.
    unit = torch.finfo(dtype).eps / 2
    for seed in range(20):
        hidden, weight, arguments = _case(seed, 1, dtype)
        if not arguments["token_mask"].any():
            continue
        exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
        expected = token_logprobs(logits=exact[0] @ exact[1].t(), **arguments)
        _total(expected, arguments["entropy"], seed).backward()
        given = [hidden.requires_grad_(), weight.requires_grad_()]
        stats = token_logprobs(hidden=given[0], weight=given[1], **arguments)
        _total(stats, arguments["entropy"], seed).backward()
        largest = float((hidden.double() @ weight.double().t()).abs().max())
        sums = (H + weight.shape[0]) * 2.0**-24
        of_logits = (unit * largest + H * 2.0**-24 * largest + 4 * 2.0**-24) / 0.5
        assert (stats.logprob - expected.logprob).abs().max() <= 2 * of_logits + sums
        for value, wanted in zip(given, exact, strict=True):
            error = (value.grad.double() - wanted.grad).norm() / wanted.grad.norm()
            # A gradient of p is off by as much as the logits, times what entropy multiplies.
            assert error <= 8 * of_logits + 3 * unit + sums


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_within_the_rounding_of_the_type(megatron_ranks, dtype):
    megatron_ranks(1, rounded, dtype)


def what_is_needed() -> None:
    """Runs on a rank: nothing is computed for who asks for no gradient, or for no logits."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.proof.cpu.probes import peak_bytes

    class Products(TorchDispatchMode):
        shapes: list[tuple[int, ...]]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            if func._opname in ("mm", "addmm_", "addmm"):
                self.shapes.append(tuple(result.shape))
            return result

    tokens, columns = 512, 4096
    targets = torch.arange(tokens)
    mask = torch.arange(tokens) % 4 == 0

    def run(of_hidden: bool, of_weight: bool, share: float = 1.0, **more: Any) -> int:
        hidden = torch.randn(tokens, H, requires_grad=of_hidden)
        weight = torch.randn(columns, H, requires_grad=of_weight)
        counted = Products()
        counted.shapes = []
        with counted:
            stats = token_logprobs(hidden=hidden, weight=weight, targets=targets, **more)
            if of_hidden or of_weight:
                stats.logprob[: int(share * tokens)].sum().backward()
        assert (hidden.grad is not None, weight.grad is not None) == (of_hidden, of_weight)
        return sum(shape[0] * shape[1] for shape in counted.shapes)

    forward = tokens * columns
    assert run(False, False) == forward
    assert run(True, False) == 2 * forward + run_parts(tokens, columns) * tokens * H
    assert run(False, True) == 2 * forward + columns * H
    # A quarter has a gradient: half of the work is in the backward's products, but for the parts.
    backward = run(True, True) - forward
    assert run(True, True, share=0.25) - forward <= 0.4 * backward + columns * H
    masked = run(True, True, token_mask=mask)
    assert masked <= run(True, True) / 4 + columns * H
    logits_bytes = tokens * columns * 4
    hidden, weight = torch.randn(tokens, H), torch.randn(columns, H)

    def step() -> None:
        leaf = hidden.clone().requires_grad_()
        stats = token_logprobs(
            hidden=leaf, weight=weight, targets=targets, workspace_bytes=1 << 20, entropy="grad"
        )
        (stats.logprob.sum() + stats.entropy.sum()).backward()

    assert peak_bytes(step) <= 0.4 * logits_bytes  # of logits and their gradient: 0.2


def run_parts(tokens: int, columns: int) -> int:
    """Count the parts in which the backward makes the logits."""
    import torch

    from megatron_idempotent.logprobs.sources import ProductParts

    return len(list(ProductParts(8 << 20, False, False).of_columns(tokens, columns, torch.float32)))


def test_only_what_is_asked_for_is_multiplied_and_held(megatron_ranks):
    megatron_ranks(1, what_is_needed)
