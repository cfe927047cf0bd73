"""The gradient of logits in one reading and one writing: a Triton kernel.

A program has one segment of one row, of all rows: masked tokens, those whose outputs have no
gradient, and padded columns are written as zeros in the same pass, without being read. It may
write where it reads, because it reads each element before it writes it, and no other program does.

Legend: N tokens that are computed, M rows of a matrix, T columns of a tile.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .slopes import Slopes
from .triton_blocks import Block, on_device_of
from .triton_math import exponential, scaled


@triton.jit
def gradient_kernel(
    logits: tl.tensor,
    into: tl.tensor,
    tokens: tl.tensor,
    local: tl.tensor,
    origins: tl.tensor,
    factors: tl.tensor,
    slopes: tl.tensor,
    of_targets: tl.tensor,
    temperatures: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    into_row_stride: tl.tensor,
    into_column_stride: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    temperature: tl.tensor,
    HAS_TOKENS: tl.constexpr,
    HAS_ORIGIN: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    UNIT: tl.constexpr,
    ADJACENT: tl.constexpr,
    SEGMENT: tl.constexpr,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Write exp(z)·(factor + slope·z), at the target `of_target`, and 0 from `columns` on."""
    TILE: tl.constexpr = UNROLL * LANES
    program = tl.program_id(0)
    segments = (width + SEGMENT - 1) // SEGMENT
    row, segment = program // segments, program % segments
    token = tl.load(tokens + row) if HAS_TOKENS else row
    # Tokens times columns passes 2³¹.
    base = logits + row.to(tl.int64) * row_stride
    into_base = into + row.to(tl.int64) * into_row_stride
    first = segment * SEGMENT
    end = tl.minimum(first + SEGMENT, width)
    offset_T = tl.arange(0, TILE)
    if token < 0:
        for start in range(first, end, TILE):
            column_T = start + offset_T
            place_T = column_T if ADJACENT else column_T.to(tl.int64) * into_column_stride
            zero_T = tl.zeros([TILE], into.dtype.element_ty)
            tl.store(into_base + place_T, zero_T, mask=column_T < end)
        return
    last = tl.maximum(tl.minimum(end, columns), first)
    whole = first + (last - first) // TILE * TILE
    if PER_TOKEN:
        temperature = tl.load(temperatures + token)
    inverse = tl.div_rn(1.0, temperature)
    origin = tl.load(origins + token) if HAS_ORIGIN else 0.0
    factor = tl.load(factors + token)
    slope = tl.load(slopes + token) if HAS_SLOPE else 0.0
    of_target = tl.load(of_targets + token)
    target = tl.load(local + token)
    apart = tl.where((target >= first) & (target < last), target, -1).to(tl.int32)
    for start in tl.range(first, whole, TILE, num_stages=STAGES):
        column_T = start + offset_T
        place_T = column_T if ADJACENT else column_T.to(tl.int64) * column_stride
        into_T = column_T if ADJACENT else column_T.to(tl.int64) * into_column_stride
        x_T = tl.load(base + place_T, eviction_policy="evict_first").to(tl.float32)
        z_T = scaled(x_T - origin, temperature, inverse, UNIT)
        factor_T = tl.fma(z_T, slope, factor) if HAS_SLOPE else factor
        gradient_T = exponential(z_T) * factor_T
        if (apart >= start) & (apart < start + TILE):
            gradient_T = tl.where(column_T == apart, of_target, gradient_T)
        tl.store(into_base + into_T, gradient_T.to(into.dtype.element_ty))
    for start in range(whole, end, TILE):
        column_T = start + offset_T
        there_T = column_T < last
        place_T = column_T if ADJACENT else column_T.to(tl.int64) * column_stride
        into_T = column_T if ADJACENT else column_T.to(tl.int64) * into_column_stride
        x_T = tl.load(base + place_T, mask=there_T, other=0.0).to(tl.float32)
        z_T = scaled(x_T - origin, temperature, inverse, UNIT)
        factor_T = tl.fma(z_T, slope, factor) if HAS_SLOPE else factor
        gradient_T = exponential(z_T) * factor_T
        gradient_T = tl.where(column_T == apart, of_target, gradient_T)
        # Padding, too.
        gradient_T = tl.where(there_T, gradient_T, 0.0)
        tl.store(into_base + into_T, gradient_T.to(into.dtype.element_ty), mask=column_T < end)


def launch_gradient(
    logits: Tensor,
    into: Tensor,
    token_M: Tensor | None,
    slopes: Slopes,
    temperature: Tensor | float,
    columns: int,
    block: Block,
) -> None:
    """Write all of `into` [M, ≥ columns], which may be `logits`.

    `token_M` says which token of `slopes` a row is, and -1 for rows of zeros; None for all in turn.
    """
    width = into.shape[1]
    per_token = isinstance(temperature, Tensor)
    some = slopes.factor
    with on_device_of(logits):
        gradient_kernel[(len(into) * block.segments(width),)](
            logits,
            into,
            slopes.local if token_M is None else token_M,
            slopes.local,
            some if slopes.origin is None else slopes.origin,
            slopes.factor,
            some if slopes.slope is None else slopes.slope,
            slopes.of_target,
            temperature if per_token else some,
            logits.stride(0),
            logits.stride(1),
            into.stride(0),
            into.stride(1),
            columns,
            width,
            1.0 if isinstance(temperature, Tensor) else float(temperature),
            HAS_TOKENS=token_M is not None,
            HAS_ORIGIN=slopes.origin is not None,
            HAS_SLOPE=slopes.slope is not None,
            PER_TOKEN=per_token,
            UNIT=not per_token and temperature == 1,
            ADJACENT=logits.stride(1) == 1 and into.stride(1) == 1,
            **block.constants(),
        )
