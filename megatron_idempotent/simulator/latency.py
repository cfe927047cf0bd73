"""How long things take: distributions as records, each a function of one uniform number.

A draw is `quantile(uniform(seed, …))`, so it depends on what it is for and not on when it is made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, Protocol

_NORMAL = NormalDist()
_MASK = (1 << 64) - 1


def uniform(*seeds: int) -> float:
    """A number above 0 and below 1 that looks random: a hash of the seeds (splitmix64)."""
    state = 0x9E3779B97F4A7C15
    for seed in seeds:
        state = ((state ^ (seed & _MASK)) + 0x9E3779B97F4A7C15) & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return ((state >> 11) + 0.5) / (1 << 53)


class Distribution(Protocol):
    """Of seconds, or of tokens."""

    def quantile(self, share: float) -> float:
        """The value that a share (above 0, below 1) of all draws stays below."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """Always the same. Example: `Constant(value=2.0)`."""

    value: float

    def __post_init__(self) -> None:
        _above(self, "value", 0, or_equal=True)

    def quantile(self, share: float) -> float:
        return self.value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LogNormal:
    """A long tail, by the value in the middle and that which one draw in a hundred passes.

    Example: `LogNormal(median=800, p99=8000)`.
    """

    median: float
    p99: float

    def __post_init__(self) -> None:
        _above(self, "median", 0)
        _above(self, "p99", self.median, or_equal=True)

    def quantile(self, share: float) -> float:
        sigma = math.log(self.p99 / self.median) / _NORMAL.inv_cdf(0.99)
        return self.median * math.exp(sigma * _NORMAL.inv_cdf(share))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pareto:
    """A tail so long that the longest draws weigh as much as all others, for an alpha near 1.

    Example: `Pareto(least=200, alpha=1.5, most=32000)`.
    """

    least: float
    alpha: float
    most: float = math.inf
    """Longer draws are as long as this."""

    def __post_init__(self) -> None:
        _above(self, "least", 0)
        _above(self, "alpha", 0)
        _above(self, "most", self.least, or_equal=True)

    def quantile(self, share: float) -> float:
        return min(self.least * math.pow(1 - share, -1 / self.alpha), self.most)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Empirical:
    """Values that were measured, each as likely. Example: `Empirical(values=(310, 800, 4100))`."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(sorted(self.values)))
        if not self.values or self.values[0] < 0:
            raise ValueError(f"empirical has values={self.values}; some numbers, none below 0")

    def quantile(self, share: float) -> float:
        return self.values[int(share * len(self.values))]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """One of several distributions per draw, such as a few stragglers among the many.

    Example: `Mixture(parts=((0.98, LogNormal(median=1, p99=3)), (0.02, Constant(value=30))))`.
    """

    parts: tuple[tuple[float, Distribution], ...]
    """Shares, which sum to 1, and what is drawn from."""

    def __post_init__(self) -> None:
        total = sum(share for share, _ in self.parts)
        if any(share <= 0 for share, _ in self.parts) or not math.isclose(total, 1, abs_tol=1e-6):
            raise ValueError(f"mixture has shares that sum to {total:g}; above 0, and 1 in all")

    def quantile(self, share: float) -> float:
        """Not a quantile of the whole, but as good to draw from: parts lie behind each other."""
        for weight, part in self.parts[:-1]:
            if share < weight:
                return part.quantile(share / weight)
            share -= weight
        weight, part = self.parts[-1]
        return part.quantile(min(max(share / weight, 1e-12), 1 - 1e-12))


KINDS: Mapping[str, Callable[..., Distribution]] = {
    "constant": Constant,
    "lognormal": LogNormal,
    "pareto": Pareto,
    "empirical": Empirical,
    "mixture": Mixture,
}


def distribution(given: Any, name: str) -> Distribution:
    """A distribution from a number, or from a table with its `kind` and its fields.

    Example: `distribution({"kind": "lognormal", "median": 800, "p99": 8000}, "length")`.
    Errors: `ValueError` naming what was given under `name`, and what is allowed.
    """
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return Constant(value=given)
    if not isinstance(given, Mapping) or given.get("kind") not in KINDS:
        raise ValueError(
            f"{name} is {given!r}; a number, or a table with kind = one of {', '.join(KINDS)}"
        )
    fields = {key: value for key, value in given.items() if key != "kind"}
    if given["kind"] == "mixture":
        parts = [dict(each) for each in fields.get("parts", ())]
        fields["parts"] = tuple((each.pop("share", 0), distribution(each, name)) for each in parts)
    if given["kind"] == "empirical":
        fields["values"] = tuple(fields.get("values", ()))
    try:
        return KINDS[given["kind"]](**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {dict(given)!r}: {error}") from error


def _above(record: Any, name: str, low: float, *, or_equal: bool = False) -> None:
    value = getattr(record, name)
    if not (value > low or (or_equal and value == low)):
        least = "or more" if or_equal else "at least a little more"
        raise ValueError(f"{name} is {value!r}; {low:g} {least}")
