"""Quantizes a weight by blocks of 128 × 128 with a Triton kernel that reads and writes it once.

A program quantizes one block. It compares the values' bits without the sign, as integers: these
have the order of the magnitudes, with infinity and NaN above all others, so that the host sees
infinity or NaN as the largest. The program divides by the scale, because multiplying by an inverse
would round some quotients differently.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Warps of a program, whose threads hold 64, 128 or 32 numbers; the first is the default, and
#: benchmarks can compare them.
WARPS = (8, 4, 16)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def quantize_kernel(
    weight: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    largest_of: tl.tensor,
    expert_stride: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    POWERS: tl.constexpr,
    ADJACENT: tl.constexpr,
    EXPORTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantize one block, that of this program: write its codes into `codes` [E, R, C], and its
    scale and largest magnitude into tensors [E, r, c], with one entry for each block.
    """
    row_blocks, column_blocks = tl.cdiv(rows, BLOCK), tl.cdiv(columns, BLOCK)
    program = tl.program_id(0)
    in_row = program % column_blocks
    in_column = program // column_blocks % row_blocks
    expert = (program // column_blocks // row_blocks).to(tl.int64)
    row_K1 = in_column * BLOCK + tl.arange(0, BLOCK)[:, None]
    column_1K = in_row * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside_KK = (row_K1 < rows) & (column_1K < columns)
    offset_1K = column_1K if ADJACENT else column_1K.to(tl.int64) * column_stride
    offset_KK = row_K1.to(tl.int64) * row_stride + offset_1K
    x_KK = tl.load(
        weight + expert * expert_stride + offset_KK,
        mask=inside_KK,
        other=0.0,
        eviction_policy="evict_first",
    )
    x_KK = x_KK.to(tl.float32).to(EXPORTED).to(tl.float32)
    bits = tl.max(tl.max(x_KK.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
    largest = bits.to(tl.float32, bitcast=True)
    if POWERS:
        # largest = m · 2ⁿ with m in [1, 2), and 464 = 1.8125 · 2⁸; 1.8125 has these bits below its
        # exponent.
        power = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x680000).to(tl.int32)
        power = tl.minimum(tl.maximum(power, 1), 254)
        scale = (power << 23).to(tl.float32, bitcast=True)
    else:
        # No scale is below the smallest normal number.
        scale = tl.maximum(tl.div_rn(largest, 448.0), 1.1754943508222875e-38)
    scale = tl.where(bits > 0, scale, 1.0)
    code_KK = tl.div_rn(x_KK, tl.broadcast_to(scale, [BLOCK, BLOCK])).to(tl.float8e4nv)
    into_KK = (expert * rows + row_K1) * columns + column_1K
    tl.store(codes + into_KK, code_KK, mask=inside_KK)
    tl.store(scales + program, scale)
    tl.store(largest_of + program, largest)


def launch_quantize(
    weight_ERC: Tensor,
    codes_ERC: Tensor,
    scale_Erc: Tensor,
    largest_Erc: Tensor,
    *,
    powers: bool,
    dtype: torch.dtype,
    block: int,
    warps: int = WARPS[0],
) -> None:
    """Quantize a weight into codes, scales and largest magnitudes, all without gaps in memory."""
    on_device = (
        torch.cuda.device(weight_ERC.device)
        if weight_ERC.device.type == "cuda"
        else contextlib.nullcontext()
    )
    with on_device:
        quantize_kernel[(scale_Erc.numel(),)](
            weight_ERC,
            codes_ERC,
            scale_Erc,
            largest_Erc,
            *weight_ERC.stride(),
            *weight_ERC.shape[1:],
            POWERS=powers,
            ADJACENT=weight_ERC.stride(2) == 1,
            EXPORTED=_TYPES[dtype],
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=True,
        )
