"""Defines distributions of durations as records that turn a uniform number into a draw.

A draw is `quantile(uniform(seed, …))`: it depends on the seeds alone, not on the draws before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Annotated, Any, Literal, Protocol

from megatron_idempotent.settings import BeforeValidator, Field, settings

_NORMAL = NormalDist()
_MASK = (1 << 64) - 1


def uniform(*seeds: int) -> float:
    """Return a number above 0 and below 1 that looks random: a hash of the seeds (splitmix64)."""
    state = 0x9E3779B97F4A7C15
    for seed in seeds:
        state = ((state ^ (seed & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return ((state >> 11) + 0.5) / (1 << 53)


class Distribution(Protocol):
    """Defines how often a number of seconds or tokens is drawn."""

    def quantile(self, share: float) -> float:
        """Return the value below which a share of all draws lies; the share is above 0, below 1."""
        ...


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
class Pareto:
    """Draws from a Pareto distribution: `least` x u ** (-1 / `alpha`), for a uniform u.

    With an alpha near 1, the few longest draws add up to as much as all others.
    Example: `Pareto(least=200, alpha=1.5, most=32000)`.
    """

    least: float = Field(gt=0)
    """The smallest value, in seconds or tokens."""
    alpha: float = Field(gt=0)
    """The exponent; a smaller one makes longer tails."""
    most: float = Field(default=math.inf, allow_inf_nan=True)
    """The largest value; longer draws are cut to it."""
    kind: Literal["pareto"] = "pareto"

    def __post_init__(self) -> None:
        if not self.most >= self.least:
            raise ValueError(f"most is {self.most:g}; allowed: the least, {self.least:g}, or more")

    def quantile(self, share: float) -> float:
        return min(self.least * math.pow(1 - share, -1 / self.alpha), self.most)


@settings(ValueError)
class Empirical:
    """Draws one of several measured values, all equally likely.

    Example: `Empirical(values=(310, 800, 4100))`.
    """

    values: tuple[Annotated[float, Field(ge=0)], ...] = Field(min_length=1, strict=False)
    """The values, in seconds or tokens; sorted when the record is built."""
    kind: Literal["empirical"] = "empirical"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def quantile(self, share: float) -> float:
        return self.values[int(share * len(self.values))]


def _part(given: Any) -> Any:
    """Split a table into its share and the distribution; return anything else as it is."""
    if not isinstance(given, Mapping):
        return given
    return given.get("share"), {key: value for key, value in given.items() if key != "share"}


@settings(ValueError)
class Mixture:
    """Draws from one of several distributions, such as that of a few stragglers.

    Example: `Mixture(parts=((0.98, LogNormal(median=1, p99=3)), (0.02, Constant(value=30))))`.
    """

    parts: tuple[
        Annotated[tuple[Annotated[float, Field(gt=0)], AnyDistribution], BeforeValidator(_part)],
        ...,
    ] = Field(strict=False)
    """Pairs of a share and the distribution that this share of all draws comes from; the shares sum
    to 1."""
    kind: Literal["mixture"] = "mixture"

    def __post_init__(self) -> None:
        total = sum(share for share, _ in self.parts)
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise ValueError(f"the shares of a mixture sum to {total:g}; allowed: 1")

    def quantile(self, share: float) -> float:
        """Return a draw for a uniform number, which first selects the part and then its quantile.

        It is no quantile of the whole mixture, but draws have the same distribution.
        """
        for weight, part in self.parts[:-1]:
            if share < weight:
                return part.quantile(share / weight)
            share -= weight
        weight, part = self.parts[-1]
        return part.quantile(min(max(share / weight, 1e-12), 1 - 1e-12))


class _FromTable:
    """Has pydantic read a distribution: a number, a table with its kind, or an object of yours."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        del source
        from pydantic_core import core_schema

        tables = Annotated[
            Constant | LogNormal | Pareto | Empirical | Mixture, Field(discriminator="kind")
        ]
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
