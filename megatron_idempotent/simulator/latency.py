"""Distributions of durations as records, each a function of one uniform number.

A draw is `quantile(uniform(seed, …))`, so it depends on what it is for and not on when it is made.
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
    """A distribution of seconds, or of tokens."""

    def quantile(self, share: float) -> float:
        """Return the value that a share (above 0, below 1) of all draws stays below."""
        ...


@settings(ValueError)
class Constant:
    """Always the same. Example: `Constant(value=2.0)`."""

    value: float = Field(ge=0)
    kind: Literal["constant"] = "constant"

    def quantile(self, share: float) -> float:
        return self.value


@settings(ValueError)
class LogNormal:
    """A long tail, by the value in the middle and that which one draw in a hundred passes.

    Example: `LogNormal(median=800, p99=8000)`.
    """

    median: float = Field(gt=0)
    p99: float = Field(gt=0)
    kind: Literal["lognormal"] = "lognormal"

    def __post_init__(self) -> None:
        if self.p99 < self.median:
            raise ValueError(f"p99 is {self.p99:g}; allowed: the median, {self.median:g}, or more")

    def quantile(self, share: float) -> float:
        sigma = math.log(self.p99 / self.median) / _NORMAL.inv_cdf(0.99)
        return self.median * math.exp(sigma * _NORMAL.inv_cdf(share))


@settings(ValueError)
class Pareto:
    """A tail so long that the longest draws weigh as much as all others, for an alpha near 1.

    Example: `Pareto(least=200, alpha=1.5, most=32000)`.
    """

    least: float = Field(gt=0)
    alpha: float = Field(gt=0)
    most: float = Field(default=math.inf, allow_inf_nan=True)
    """Longer draws are as long as this."""
    kind: Literal["pareto"] = "pareto"

    def __post_init__(self) -> None:
        if not self.most >= self.least:
            raise ValueError(f"most is {self.most:g}; allowed: the least, {self.least:g}, or more")

    def quantile(self, share: float) -> float:
        return min(self.least * math.pow(1 - share, -1 / self.alpha), self.most)


@settings(ValueError)
class Empirical:
    """Values that were measured, each as likely. Example: `Empirical(values=(310, 800, 4100))`."""

    values: tuple[Annotated[float, Field(ge=0)], ...] = Field(min_length=1, strict=False)
    kind: Literal["empirical"] = "empirical"

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(sorted(self.values)))

    def quantile(self, share: float) -> float:
        return self.values[int(share * len(self.values))]


def _part(given: Any) -> Any:
    """Return a share and what it is drawn from, out of one table."""
    if not isinstance(given, Mapping):
        return given
    return given.get("share"), {key: value for key, value in given.items() if key != "share"}


@settings(ValueError)
class Mixture:
    """One of several distributions per draw, such as a few stragglers among the many.

    Example: `Mixture(parts=((0.98, LogNormal(median=1, p99=3)), (0.02, Constant(value=30))))`.
    """

    parts: tuple[
        Annotated[tuple[Annotated[float, Field(gt=0)], AnyDistribution], BeforeValidator(_part)],
        ...,
    ] = Field(strict=False)
    """Shares, which sum to 1, and what is drawn from."""
    kind: Literal["mixture"] = "mixture"

    def __post_init__(self) -> None:
        total = sum(share for share, _ in self.parts)
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise ValueError(f"the shares of a mixture sum to {total:g}; allowed: 1")

    def quantile(self, share: float) -> float:
        """Not a quantile of the whole, but as good to draw from: the parts follow each other."""
        for weight, part in self.parts[:-1]:
            if share < weight:
                return part.quantile(share / weight)
            share -= weight
        weight, part = self.parts[-1]
        return part.quantile(min(max(share / weight, 1e-12), 1 - 1e-12))


class _FromTable:
    """Reads a distribution: a number, a table with its kind, or one of your own."""

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
"""The type of a setting that is a distribution."""
