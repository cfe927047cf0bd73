"""Statistics of logits in one reading of them: a Triton kernel.

A program reads one segment of one row. Each lane keeps the largest logit of its columns, Σ exp(z)
and Σ exp(z)·z relative to it, so nothing crosses lanes until the end, and one exponential in
`UNROLL` rescales. Segments have a width that depends on nothing but the block's shape, so that a
token's bits do not depend on the number of tokens.

Legend: N tokens, P segments, U rows of a tile of L lanes.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .triton_blocks import Block, on_device_of
from .triton_math import FINITE, exponential, scaled


@triton.jit
def _absorb(
    x_UL: tl.tensor,
    largest_L: tl.tensor,
    sum_L: tl.tensor,
    moment_L: tl.tensor,
    temperature: tl.tensor,
    inverse: tl.tensor,
    UNIT: tl.constexpr,
    ENTROPY: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a tile to what the lanes know."""
    before_L = largest_L
    largest_L = tl.maximum(before_L, tl.max(x_UL, 0))
    z_UL = scaled(x_UL - largest_L[None, :], temperature, inverse, UNIT)
    exponential_UL = exponential(z_UL)
    behind_L = scaled(before_L - largest_L, temperature, inverse, UNIT)
    weight_L = exponential(behind_L)
    if ENTROPY:
        moved_L = weight_L * (moment_L + behind_L * sum_L)
        moment_L = moved_L + tl.sum(exponential_UL * z_UL, 0)
    sum_L = weight_L * sum_L + tl.sum(exponential_UL, 0)
    return largest_L, sum_L, moment_L


@triton.jit
def statistics_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    local: tl.tensor,
    temperatures: tl.tensor,
    found: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    columns: tl.tensor,
    tokens: tl.tensor,
    temperature: tl.tensor,
    HAS_ROWS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    UNIT: tl.constexpr,
    ADJACENT: tl.constexpr,
    ENTROPY: tl.constexpr,
    SEGMENT: tl.constexpr,
    UNROLL: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Write [P, N, 4], the fields of `Partial`, of segment and token `program_id`."""
    TILE: tl.constexpr = UNROLL * LANES
    program = tl.program_id(0)
    segments = (columns + SEGMENT - 1) // SEGMENT
    token, segment = program // segments, program % segments
    row = tl.load(rows + token) if HAS_ROWS else token
    # Tokens times columns passes 2³¹.
    base = logits + row.to(tl.int64) * row_stride
    if PER_TOKEN:
        temperature = tl.load(temperatures + token)
    inverse = tl.div_rn(1.0, temperature)
    first = segment * SEGMENT
    last = tl.minimum(first + SEGMENT, columns)
    whole = first + (last - first) // TILE * TILE
    target = tl.load(local + token)
    here = (target >= first) & (target < last)
    apart = tl.where(here, target, -1).to(tl.int32)
    offset_UL = tl.arange(0, UNROLL)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest_L = tl.full([LANES], FINITE, tl.float32)
    sum_L = tl.zeros([LANES], tl.float32)
    moment_L = tl.zeros([LANES], tl.float32)
    for start in tl.range(first, whole, TILE, num_stages=STAGES):
        column_UL = start + offset_UL
        place_UL = column_UL if ADJACENT else column_UL.to(tl.int64) * column_stride
        x_UL = tl.load(base + place_UL, eviction_policy="evict_first").to(tl.float32)
        # The target is no part of the sums; its tile alone pays for that.
        if (apart >= start) & (apart < start + TILE):
            x_UL = tl.where(column_UL == apart, float("-inf"), x_UL)
        largest_L, sum_L, moment_L = _absorb(
            x_UL, largest_L, sum_L, moment_L, temperature, inverse, UNIT, ENTROPY
        )
    if whole < last:
        column_UL = whole + offset_UL
        place_UL = column_UL if ADJACENT else column_UL.to(tl.int64) * column_stride
        there_UL = column_UL < last
        x_UL = tl.load(base + place_UL, mask=there_UL, other=float("-inf")).to(tl.float32)
        x_UL = tl.where(column_UL == apart, float("-inf"), x_UL)
        largest_L, sum_L, moment_L = _absorb(
            x_UL, largest_L, sum_L, moment_L, temperature, inverse, UNIT, ENTROPY
        )
    place = target if ADJACENT else target * column_stride
    logit = tl.load(base + place, mask=here, other=float("-inf")).to(tl.float32)
    origin = tl.maximum(tl.max(largest_L, 0), logit, propagate_nan=tl.PropagateNan.ALL)
    behind_L = scaled(largest_L - origin, temperature, inverse, UNIT)
    weight_L = exponential(behind_L)
    of_token = found + (segment.to(tl.int64) * tokens + token) * 4
    tl.store(of_token, origin)
    tl.store(of_token + 1, tl.sum(weight_L * sum_L, 0))
    moment = tl.sum(weight_L * (moment_L + behind_L * sum_L), 0) if ENTROPY else 0.0
    tl.store(of_token + 2, moment)
    z = logit - origin if UNIT else tl.div_rn(logit - origin, temperature)
    tl.store(of_token + 3, tl.where(here, z, 0.0))


def launch_statistics(
    logits: Tensor,
    rows_N: Tensor | None,
    local_N: Tensor,
    temperature: Tensor | float,
    columns: int,
    entropy: bool,
    block: Block,
) -> Tensor:
    """Compute [P, N, 4] of a matrix [rows, ≥ columns], of all its rows or of those in `rows_N`."""
    tokens, segments = len(local_N), block.segments(columns)
    found_PN4 = local_N.new_empty(segments, tokens, 4, dtype=block.computed)
    per_token = isinstance(temperature, Tensor)
    with on_device_of(logits):
        statistics_kernel[(tokens * segments,)](
            logits,
            local_N if rows_N is None else rows_N,
            local_N,
            temperature if per_token else found_PN4,
            found_PN4,
            logits.stride(0),
            logits.stride(1),
            columns,
            tokens,
            1.0 if isinstance(temperature, Tensor) else float(temperature),
            HAS_ROWS=rows_N is not None,
            PER_TOKEN=per_token,
            UNIT=not per_token and temperature == 1,
            ADJACENT=logits.stride(1) == 1,
            ENTROPY=entropy,
            **block.constants(),
        )
    return found_PN4
