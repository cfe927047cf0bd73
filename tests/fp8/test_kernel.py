"""Triton's kernel, in its interpreter, makes the bytes that torch makes."""

from __future__ import annotations

import pytest
import torch

from megatron_idempotent.fp8 import triton_blockwise
from megatron_idempotent.fp8.blockwise import quantize_blockwise

pytestmark = pytest.mark.full

SHAPES = [(128, 128), (130, 40), (1, 300), (2, 257, 129), (3, 127, 1), (0, 5), (4, 0)]


def compared(weight, **options) -> None:
    """Codes and scales, byte for byte."""
    torchs, ours = (
        quantize_blockwise(weight, triton=triton, **options) for triton in (False, True)
    )
    assert torch.equal(torchs.codes.view(torch.uint8), ours.codes.view(torch.uint8)), options
    assert torch.equal(torchs.scale_inv.view(torch.int32), ours.scale_inv.view(torch.int32))


def all_shapes() -> None:
    """Runs on a rank: edges, experts, strides, types, and magnitudes of every kind."""
    launched = 0
    real = triton_blockwise.launch_quantize

    def counted(*given, **options):
        nonlocal launched
        launched += 1
        return real(*given, **options)

    triton_blockwise.launch_quantize = counted
    torch.manual_seed(0)
    for scales in ("float32", "ue8m0"):
        for shape in SHAPES:
            weight = torch.randn(*shape) * torch.rand(*shape[:-1], 1).mul(9).exp2()
            compared(weight.bfloat16(), scales=scales)
        weight = torch.randn(200, 300)
        compared(weight.half(), scales=scales)
        compared(weight, scales=scales)
        compared(weight, scales=scales, dtype=torch.float32)
        compared(weight, scales=scales, dtype=torch.float16)
        compared(weight.t().bfloat16().t(), scales=scales)
        compared(weight.bfloat16()[::2, ::3], scales=scales)
        compared(torch.zeros(130, 130).bfloat16(), scales=scales)
        for exponent in (-133, -126, -120, -30, 119):
            scaled = (weight.clamp(-3, 3) * 2.0**exponent).bfloat16()
            compared(scaled, scales=scales)
        # Every number of bfloat16 that is finite, next to each other in magnitude.
        numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        numbers = numbers[numbers.isfinite()]
        compared(numbers.sort().values.view(-1, 8), scales=scales)
        # Quotients at and beside the middle between two codes.
        steps = torch.arange(-464, 465, dtype=torch.float32)
        compared(torch.cat([steps, steps / 64, steps / 4096]).view(-1, 3)[:, :3], scales=scales)
    assert launched == 2 * (len(SHAPES) - 2 + 14)  # all but the empty ones


def test_the_same_bytes_for_all_shapes_types_and_magnitudes(kernel_ranks):
    kernel_ranks(1, all_shapes)


def not_finite() -> None:
    """Runs on a rank: the kernel tells of NaN too, which a maximum would pass over."""
    for value in (torch.nan, torch.inf, -torch.inf):
        weight = torch.ones(2, 300, 200)
        weight[1, 290, 131] = value
        with pytest.raises(ValueError, match=rf"up is {value} at \[1, 290, 131\]"):
            quantize_blockwise(weight, name="up", triton=True)


def test_values_that_are_not_finite_are_refused(kernel_ranks):
    kernel_ranks(1, not_finite)


def test_the_same_bytes_on_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("torch finds no CUDA device with E4M3")
    for scales in ("float32", "ue8m0"):
        for shape in SHAPES:
            weight = torch.randn(*shape, device="cuda") * torch.rand(1, device="cuda").exp2()
            compared(weight.bfloat16(), scales=scales)
            compared(weight, scales=scales)
