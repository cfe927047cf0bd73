"""Group-relative advantages: how much better a sample is than its siblings."""

from __future__ import annotations

import math
from collections.abc import Sequence

# A group whose rewards differ by rounding alone must not be blown up to unit variance.
_SMALLEST_STD = 1e-4


def group_advantages(rewards: Sequence[float], *, normalize_std: bool) -> tuple[float, ...]:
    """Advantage = reward - mean of the group, divided by (std of the group + 1e-4) if asked.

    The standard deviation is the population's: its denominator is the group size. A group whose
    rewards are all equal says nothing about its samples, and gets zeros.

    Example: `group_advantages((1.0, 0.0), normalize_std=False)` is `(0.5, -0.5)`.
    """
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return tuple(centred)
    std = math.sqrt(math.fsum(value * value for value in centred) / len(rewards))
    return tuple(value / (std + _SMALLEST_STD) for value in centred)
