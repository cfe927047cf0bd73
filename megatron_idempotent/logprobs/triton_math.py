"""Element-wise functions of Triton's kernels: scaled distances, and their exponentials.

The hardware's 2ˣ is as good as float32, but its argument is not: x·log₂e is rounded, and a rounding
of a large argument is a large factor. Two multiply-adds take that back, so that an exponential
costs what the hardware's does and has the error of a mathematical library's.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import triton
import triton.language as tl

from . import fused

#: In place of -inf, whose products with 0 are NaN.
FINITE = tl.constexpr(fused.FINITE)
_LOG2E = tl.constexpr(1.4426950408889634)
#: As float32, it is off by a twentieth of what a rounding is.
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exponential(z: tl.tensor) -> tl.tensor:
    """exp of finite z, 1 of 0; 0 where float32 has no normal number."""
    power = z * _LOG2E
    rest = tl.fma(power, -_LN2, z)
    found = tl.exp2(power)
    return tl.fma(found, rest, found)


@triton.jit
def scaled(
    distance: tl.tensor, temperature: tl.tensor, inverse: tl.tensor, UNIT: tl.constexpr
) -> tl.tensor:
    """distance / temperature, finite where the distance is -inf, and NaN where that is.

    The division is a product with 1 / temperature, whose remainder is divided once more: as exact
    as a division, which costs three times as much. With `UNIT` the temperature is 1.
    """
    if UNIT:
        return tl.maximum(distance, FINITE, propagate_nan=tl.PropagateNan.ALL)
    lowest = FINITE * tl.minimum(temperature, 1.0)  # so that the quotient is finite too
    distance = tl.maximum(distance, lowest, propagate_nan=tl.PropagateNan.ALL)
    quotient = distance * inverse
    return tl.fma(tl.fma(-quotient, temperature, distance), inverse, quotient)
