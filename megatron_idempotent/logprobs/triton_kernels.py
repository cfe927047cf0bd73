"""Holds Triton's kernels for statistics of logits and for their gradient; each reads logits once.

A program handles one segment of one row. The width of segments depends only on the block's shape,
so that a token's bits do not depend on the number of tokens.

In the kernel of statistics each lane keeps the largest logit of its columns, Σ exp(z) and
Σ exp(z)·z relative to it. So nothing crosses lanes until the end, and one exponential in `UNROLL`
rescales.

The kernel of gradients takes all rows. It writes zeros for masked tokens, for tokens whose outputs
have no gradient and for padded columns in the same pass, without reading them. It may write where
it reads, because it reads each element before it writes it, and no other program does either.

The hardware's 2ˣ is as exact as float32, but its argument is not: x·log₂e is rounded, and a
rounding of a large argument is a large factor. Two multiply-adds correct that, so that an
exponential costs what the hardware's does and has the error of a mathematical library's.

The first block shape of each kernel is used until a benchmark has said otherwise: `python -m
benchmarks.token_logprobs --device cuda --tune` times all of them.

Legend: N tokens that are computed, M rows of a matrix, P segments, U rows of a tile of L lanes,
T columns of a tile.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import statistics
from .statistics import GradCoefficients, TokenBatch, is_unit_temperature

#: In place of -inf, whose products with 0 are NaN.
FINITE = tl.constexpr(statistics.FINITE)
_LOG2E = tl.constexpr(1.4426950408889634)
#: Rounded to float32, it is off by a twentieth of a rounding.
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exponential(z: tl.tensor) -> tl.tensor:
    """Return exp(z) of a finite z: exactly 1 for z = 0, and 0 below float32's normal numbers."""
    power = z * _LOG2E
    remainder = tl.fma(power, -_LN2, z)
    rounded = tl.exp2(power)
    return tl.fma(rounded, remainder, rounded)


@triton.jit
def scaled(
    distance: tl.tensor, temperature: tl.tensor, inverse: tl.tensor, UNIT: tl.constexpr
) -> tl.tensor:
    """Return distance / temperature: a finite number for a distance of -inf, NaN for NaN.

    It multiplies by 1 / temperature, and adds the remainder times that: as exact as a division,
    which costs three times as much. With `UNIT` the temperature is 1.
    """
    if UNIT:
        return tl.maximum(distance, FINITE, propagate_nan=tl.PropagateNan.ALL)
    lowest = FINITE * tl.minimum(temperature, 1.0)  # so that the quotient is finite too
    distance = tl.maximum(distance, lowest, propagate_nan=tl.PropagateNan.ALL)
    quotient = distance * inverse
    return tl.fma(tl.fma(-quotient, temperature, distance), inverse, quotient)


#: What a thread loads at once; loads of a warp are then 512 bytes that follow each other.
_LOAD_BYTES = 16
_WARP = 32


class Shape(NamedTuple):
    """Says how a Triton kernel's work is divided: warps, loads in flight, columns per program."""

    warps: int
    """The number of warps of a program, of 32 threads each."""
    unroll: int
    """The number of loads that each thread has in flight."""
    stages: int
    """The number of tiles that are loaded ahead into shared memory; 1 leaves the waiting time to
    other programs."""
    segment: int = 32768
    """The number of columns of a program, on which the results' last bits depend."""
    lanes: int | None = None
    """The number of columns that a program loads at once; None for 16 bytes of each thread."""

    def segments(self, columns: int) -> int:
        """Return the number of programs that compute one row of logits."""
        return -(-columns // self.segment)

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the constants that the kernels are compiled for, for logits of this type."""
        return {
            "SEGMENT": self.segment,
            "UNROLL": self.unroll,
            "LANES": self.lanes or self.warps * _WARP * _LOAD_BYTES // dtype.itemsize,
            "STAGES": self.stages,
            "num_warps": self.warps,
            # Triton 3.10 turns it off by default, and other roundings are other bits.
            "enable_fp_fusion": True,
        }


Kernel = Literal["statistics", "gradient"]

#: A thread of 8 warps and 4 loads has 64 bytes in flight; 4 such programs fit a multiprocessor of
#: 64 Ki registers, 64 KiB in flight, several times the amount that hides the memory's latency.
SHAPES: dict[Kernel, tuple[Shape, ...]] = {
    "statistics": (Shape(8, 4, 1), Shape(8, 2, 1), Shape(4, 4, 1), Shape(8, 2, 3)),
    "gradient": (Shape(8, 2, 1), Shape(8, 4, 1), Shape(4, 4, 1), Shape(8, 2, 3)),
}
#: The shape that each kernel uses now.
IN_USE: dict[Kernel, Shape] = {kernel: shapes[0] for kernel, shapes in SHAPES.items()}


@contextlib.contextmanager
def using(**shapes: Shape) -> Iterator[None]:
    """Run Triton's kernels with other shapes in a block, for benchmarks: `using(gradient=Shape(4,
    2, 1))`.
    """
    previous = dict(IN_USE)
    IN_USE.update(shapes)  # type: ignore[arg-type]
    try:
        yield
    finally:
        IN_USE.update(previous)


def temperature_arguments(batch: TokenBatch, like: Tensor) -> dict[str, Any]:
    """Return a kernel's arguments for the temperature, a number or a tensor.
    For a number, `like` is passed as the tensor, which the kernel then does not read.
    """
    if isinstance(batch.temperature, Tensor):
        return {"temperatures": batch.temperature, "temperature": 1.0, "PER_TOKEN": True}
    return {"temperatures": like, "temperature": float(batch.temperature), "PER_TOKEN": False}


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context that makes the tensor's GPU the current one, on which Triton launches."""
    return (
        torch.cuda.device(tensor.device)
        if tensor.device.type == "cuda"
        else contextlib.nullcontext()
    )


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
    """Update each lane's running largest logit, sum and moment with the lane's U logits of a tile
    [U, L]; return the three, each [L].
    """
    previous_L = largest_L
    largest_L = tl.maximum(previous_L, tl.max(x_UL, 0))
    z_UL = scaled(x_UL - largest_L[None, :], temperature, inverse, UNIT)
    exponential_UL = exponential(z_UL)
    behind_L = scaled(previous_L - largest_L, temperature, inverse, UNIT)
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
    into: tl.tensor,
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
    """Write the fields of `Partial` of this program's segment and token into [P, N, 4]."""
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
    tiles_end = first + (last - first) // TILE * TILE
    target = tl.load(local + token)
    has_target = (target >= first) & (target < last)
    apart = tl.where(has_target, target, -1).to(tl.int32)
    offset_UL = tl.arange(0, UNROLL)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest_L = tl.full([LANES], FINITE, tl.float32)
    sum_L = tl.zeros([LANES], tl.float32)
    moment_L = tl.zeros([LANES], tl.float32)
    for start in tl.range(first, tiles_end, TILE, num_stages=STAGES):
        column_UL = start + offset_UL
        address_UL = column_UL if ADJACENT else column_UL.to(tl.int64) * column_stride
        x_UL = tl.load(base + address_UL, eviction_policy="evict_first").to(tl.float32)
        # The sums leave the target out; only the target's tile does extra work for that.
        if (apart >= start) & (apart < start + TILE):
            x_UL = tl.where(column_UL == apart, float("-inf"), x_UL)
        largest_L, sum_L, moment_L = _absorb(
            x_UL, largest_L, sum_L, moment_L, temperature, inverse, UNIT, ENTROPY
        )
    if tiles_end < last:
        column_UL = tiles_end + offset_UL
        address_UL = column_UL if ADJACENT else column_UL.to(tl.int64) * column_stride
        inside_UL = column_UL < last
        x_UL = tl.load(base + address_UL, mask=inside_UL, other=float("-inf")).to(tl.float32)
        x_UL = tl.where(column_UL == apart, float("-inf"), x_UL)
        largest_L, sum_L, moment_L = _absorb(
            x_UL, largest_L, sum_L, moment_L, temperature, inverse, UNIT, ENTROPY
        )
    target_offset = target if ADJACENT else target * column_stride
    logit = tl.load(base + target_offset, mask=has_target, other=float("-inf")).to(tl.float32)
    origin = tl.maximum(tl.max(largest_L, 0), logit, propagate_nan=tl.PropagateNan.ALL)
    behind_L = scaled(largest_L - origin, temperature, inverse, UNIT)
    weight_L = exponential(behind_L)
    of_token = into + (segment.to(tl.int64) * tokens + token) * 4
    tl.store(of_token, origin)
    tl.store(of_token + 1, tl.sum(weight_L * sum_L, 0))
    moment = tl.sum(weight_L * (moment_L + behind_L * sum_L), 0) if ENTROPY else 0.0
    tl.store(of_token + 2, moment)
    z = logit - origin if UNIT else tl.div_rn(logit - origin, temperature)
    tl.store(of_token + 3, tl.where(has_target, z, 0.0))


def launch_statistics(
    logits: Tensor, row_N: Tensor | None, batch: TokenBatch, shape: Shape
) -> Tensor:
    """Compute the fields of `Partial` per segment and token, [P, N, 4].

    `logits` is a matrix [rows, ≥ columns]; `row_N` has the tokens' rows, None for all of them.
    """
    local_N, columns = batch.local, batch.columns.real
    tokens, segments = len(local_N), shape.segments(columns)
    into_PN4 = local_N.new_empty(segments, tokens, 4, dtype=torch.float32)
    with on_device_of(logits):
        statistics_kernel[(tokens * segments,)](
            *(logits, local_N if row_N is None else row_N, local_N),
            into=into_PN4,
            row_stride=logits.stride(0),
            column_stride=logits.stride(1),
            columns=columns,
            tokens=tokens,
            HAS_ROWS=row_N is not None,
            UNIT=is_unit_temperature(batch.temperature),
            ADJACENT=logits.stride(1) == 1,
            ENTROPY=batch.options.entropy,
            **temperature_arguments(batch, into_PN4),
            **shape.constants(logits.dtype),
        )
    return into_PN4


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
    """Write the logits' gradient of one segment of a row: exp(z)·(factor + slope·z), but
    `of_target` in the target's column, and 0 from `columns` on.
    """
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
            address_T = column_T if ADJACENT else column_T.to(tl.int64) * into_column_stride
            zero_T = tl.zeros([TILE], into.dtype.element_ty)
            tl.store(into_base + address_T, zero_T, mask=column_T < end)
        return
    last = tl.maximum(tl.minimum(end, columns), first)
    tiles_end = first + (last - first) // TILE * TILE
    if PER_TOKEN:
        temperature = tl.load(temperatures + token)
    inverse = tl.div_rn(1.0, temperature)
    origin = tl.load(origins + token) if HAS_ORIGIN else 0.0
    factor = tl.load(factors + token)
    slope = tl.load(slopes + token) if HAS_SLOPE else 0.0
    of_target = tl.load(of_targets + token)
    target = tl.load(local + token)
    apart = tl.where((target >= first) & (target < last), target, -1).to(tl.int32)
    for start in tl.range(first, tiles_end, TILE, num_stages=STAGES):
        column_T = start + offset_T
        address_T = column_T if ADJACENT else column_T.to(tl.int64) * column_stride
        into_T = column_T if ADJACENT else column_T.to(tl.int64) * into_column_stride
        x_T = tl.load(base + address_T, eviction_policy="evict_first").to(tl.float32)
        z_T = scaled(x_T - origin, temperature, inverse, UNIT)
        factor_T = tl.fma(z_T, slope, factor) if HAS_SLOPE else factor
        gradient_T = exponential(z_T) * factor_T
        if (apart >= start) & (apart < start + TILE):
            gradient_T = tl.where(column_T == apart, of_target, gradient_T)
        tl.store(into_base + into_T, gradient_T.to(into.dtype.element_ty))
    for start in range(tiles_end, end, TILE):
        column_T = start + offset_T
        inside_T = column_T < last
        address_T = column_T if ADJACENT else column_T.to(tl.int64) * column_stride
        into_T = column_T if ADJACENT else column_T.to(tl.int64) * into_column_stride
        x_T = tl.load(base + address_T, mask=inside_T, other=0.0).to(tl.float32)
        z_T = scaled(x_T - origin, temperature, inverse, UNIT)
        factor_T = tl.fma(z_T, slope, factor) if HAS_SLOPE else factor
        gradient_T = exponential(z_T) * factor_T
        gradient_T = tl.where(column_T == apart, of_target, gradient_T)
        # Padding, too.
        gradient_T = tl.where(inside_T, gradient_T, 0.0)
        tl.store(into_base + into_T, gradient_T.to(into.dtype.element_ty), mask=column_T < end)


def launch_gradient(
    logits: Tensor,
    into: Tensor,
    token_M: Tensor | None,
    slopes: GradCoefficients,
    batch: TokenBatch,
    shape: Shape,
) -> None:
    """Write the logits' gradient into `into` [M, ≥ columns], zeros in padding; it may be `logits`.

    `token_M` has each row's token in `slopes`, with -1 for rows of zeros. None means that the
    rows are the tokens in turn.
    """
    local_N, width, factor_N = batch.local, into.shape[1], slopes.factor
    with on_device_of(logits):
        gradient_kernel[(len(into) * shape.segments(width),)](
            *(logits, into, local_N if token_M is None else token_M, local_N),
            origins=factor_N if slopes.origin is None else slopes.origin,
            factors=factor_N,
            slopes=factor_N if slopes.slope is None else slopes.slope,
            of_targets=slopes.of_target,
            row_stride=logits.stride(0),
            column_stride=logits.stride(1),
            into_row_stride=into.stride(0),
            into_column_stride=into.stride(1),
            columns=batch.columns.real,
            width=width,
            HAS_TOKENS=token_M is not None,
            HAS_ORIGIN=slopes.origin is not None,
            HAS_SLOPE=slopes.slope is not None,
            UNIT=is_unit_temperature(batch.temperature),
            ADJACENT=logits.stride(1) == 1 and into.stride(1) == 1,
            **temperature_arguments(batch, factor_N),
            **shape.constants(logits.dtype),
        )
