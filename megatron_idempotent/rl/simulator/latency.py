"""Defines distributions of durations as records that turn a uniform number into a draw.

A draw is `quantile(uniform(seed, …))`: it depends on the seeds alone, not on the draws before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Annotated, Any, Literal, Protocol

from megatron_idempotent.rl.engines.protocol import split_mix
from megatron_idempotent.settings import Field, settings

_NORMAL = NormalDist()
_MASK = (1 << 64) - 1


def uniform(*seeds: int) -> float:
    """Return a number above 0 and below 1 that looks random: a hash of the seeds (splitmix64)."""
    state = 0x9E3779B97F4A7C15
    for seed in seeds:
        state = split_mix((state ^ (seed & _MASK)) + 0x9E3779B97F4A7C15)
    return ((state >> 11) + 0.5) / (1 << 53)


class Distribution(Protocol):
    """Defines how often a number of seconds or tokens is drawn."""

    def quantile(self, share: float) -> float:
        """Return the value below which a share of all draws lies; the share is above 0, below 1."""


@settings(ValueError)
class Constant:
    """Draws the same value every time. Example: `Constant(value=2.0)`."""

    value: float = Field(ge=0)
    """The value, in seconds or tokens."""
    kind: Literal["constant"] = "constant"

    def quantile(self, share: float) -> float:
        return self.value


@settings(ValueError)
class LogNormal:
    """Draws from a log-normal distribution, given by its median and its 99th percentile.

    Example: `LogNormal(median=800, p99=8000)`.
    """

    median: float = Field(gt=0)
    """The value that half of all draws exceed."""
    p99: float = Field(gt=0)
    """The value that one draw in a hundred exceeds; the median or more."""
    kind: Literal["lognormal"] = "lognormal"

    def __post_init__(self) -> None:
        if self.p99 < self.median:
            raise ValueError(f"p99 is {self.p99:g}; allowed: the median, {self.median:g}, or more")

    def quantile(self, share: float) -> float:
        sigma = math.log(self.p99 / self.median) / _NORMAL.inv_cdf(0.99)
        return self.median * math.exp(sigma * _NORMAL.inv_cdf(share))


@settings(ValueError)
class Empirical:
    """Draws one of several measured values, all equally likely.

    A value that stands there several times is drawn as often.
    Example: `Empirical(values=(310, 800, 4100))`.
    """

    values: tuple[Annotated[float, Field(ge=0)], ...] = Field(min_length=1, strict=False)
    """The values, in seconds or tokens; sorted when the record is built."""
    kind: Literal["empirical"] = "empirical"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def quantile(self, share: float) -> float:
        return self.values[int(share * len(self.values))]


class _FromTable:
    """Has pydantic read a distribution: a number, a table with its kind, or an object of yours."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        del source
        from pydantic_core import core_schema

        tables = Annotated[Constant | LogNormal | Empirical, Field(discriminator="kind")]
        return core_schema.no_info_wrap_validator_function(_made, handler.generate_schema(tables))


def _made(given: Any, build: Callable[[Any], Any]) -> Any:
    if hasattr(given, "quantile"):
        return given
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        given = {"kind": "constant", "value": given}
    if not isinstance(given, Mapping):
        raise ValueError(f"{given!r} is no distribution; give a number, or a table with its kind")
    return build(given)


AnyDistribution = Annotated[Distribution, _FromTable]
"""The type of a setting that is a distribution: a number, a table with its kind, or an object with
`quantile`."""
