"""Triton's kernels on a GPU, where there is one: the cases and bounds of the other paths."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from cases import Case, case, reference, summed, within_bounds

from megatron_idempotent import token_logprobs


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """torch, with a group of this one process."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", [None, "small"])
def test_cases_are_within_what_rounding_allows(gpu, shape):
    from kernels import in_blocks, launches

    seen: set[str] = set()
    with in_blocks(shape) if shape else contextlib.nullcontext():
        for seed in range(100):
            seen |= set(launches(within_bounds, case(seed, 1), seed, "cuda")[1])
    assert seen == {"launch_statistics", "launch_gradient"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [62080, 151643])
def test_long_rows_are_within_what_rounding_allows(gpu, columns, dtype):
    torch = gpu
    torch.manual_seed(0)
    whole = (torch.randn(9, columns) * 3).to(getattr(torch, dtype))
    arguments = {
        "targets": torch.randint(0, columns, (9,)),
        "vocab_size": None,
        "temperature": 0.7,
        "entropy": "grad",
        "ownership": "consume",
    }
    of_logprob, of_entropy = torch.randn(2, 9)
    within_bounds(Case(whole, arguments, "plain", of_logprob, of_entropy), columns, "cuda")


@pytest.mark.parametrize("fused", [False, True])
def test_from_hidden_states_as_from_logits(gpu, fused):
    torch = gpu
    torch.manual_seed(0)
    tokens, features, columns = 600, 256, 5000
    hidden = torch.randn(tokens, features, device="cuda").bfloat16()
    weight = (torch.randn(columns, features, device="cuda") / features**0.5).bfloat16()
    targets = torch.randint(0, columns, (tokens,), device="cuda")
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    # Logits are rounded to the type, as an output layer's are.
    made = (hidden @ weight.t()).double() - (exact[0] @ exact[1].t()).detach()
    logprob, entropy = reference(exact[0] @ exact[1].t() + made, targets)
    (logprob.sum() + entropy.sum()).backward()
    leaf, part = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    part.main_grad = torch.zeros(columns, features, device="cuda")
    stats = token_logprobs(
        hidden=leaf,
        weight=part,
        targets=targets,
        entropy="grad",
        gradient_accumulation_fusion=fused,
        workspace_bytes=200 * columns * 2,  # three parts
    )
    summed(stats).backward()
    of_weight = part.main_grad if fused else part.grad
    for found, wanted in ((leaf.grad, exact[0].grad), (of_weight, exact[1].grad)):
        error = (found.double() - wanted).norm() / wanted.norm()
        # The gradient of the logits is rounded to bfloat16, and so is what comes out of it.
        assert error <= 2 * 2.0**-8, error


def test_rows_lie_beyond_what_32_bits_address(gpu):
    torch = gpu
    columns = 62080
    tokens = 2**31 // columns + 9
    if torch.cuda.mem_get_info()[0] < 3 * 2 * tokens * columns:
        pytest.skip("less memory than logits of 2³¹ elements, their copy and gradient take")
    logits = torch.randn(1, columns, device="cuda").bfloat16().expand(tokens, -1).contiguous()
    leaf = logits.requires_grad_()
    targets = torch.full((tokens,), 7, device="cuda")
    stats = token_logprobs(logits=leaf, targets=targets)
    stats.logprob.sum().backward()
    assert (stats.logprob == stats.logprob[0]).all()
    assert torch.equal(leaf.grad[-1], leaf.grad[0])
    assert leaf.grad[0].any()
