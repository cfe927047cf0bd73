"""One value of the configuration: its type, its allowed range, and the error when it is outside."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_idempotent.trainer.errors import ConfigError

_KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """What a setting may be. `low` and `high` are inclusive, `above` is exclusive.

    Example: `Allowed(low=1, high=64).describe()` is `"1 to 64"`.
    """

    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """The range in words, for errors and for the reference table."""
        if self.choices:
            return " or ".join(self.choices)
        if self.low is not None and self.high is not None:
            return f"{self.low:.10g} to {self.high:.10g}"
        if self.above is not None and self.high is not None:
            return f"above {self.above:.10g}, up to {self.high:.10g}"
        if self.above is not None:
            return f"above {self.above:.10g}"
        return "any" if self.low is None else f"{self.low:.10g} or more"

    def admits(self, value: object) -> bool:
        """Whether a value of the right type lies in the range."""
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        # `not (value >= low)` and not `value < low`: NaN compares false and must be refused.
        return not (
            (self.low is not None and not value >= self.low)
            or (self.high is not None and not value <= self.high)
            or (self.above is not None and not value > self.above)
            or value in (float("inf"), float("-inf"))
        )


def setting(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with a default and an `Allowed` range, which `check_section` reads."""
    allowed = Allowed(low=low, high=high, above=above, choices=choices)
    return dataclasses.field(default=default, metadata={"allowed": allowed})


def kind_of(field: dataclasses.Field[Any]) -> type:
    """The Python type of a setting. Annotations are strings here, and only four are in use."""
    return _KINDS[str(field.type)]


def check_section(section: Any, name: str) -> None:
    """Check every field of one configuration section.

    Errors: `ConfigError` with the key, the value and the allowed range.
    """
    for field in dataclasses.fields(section):
        value, kind = getattr(section, field.name), kind_of(field)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)  # `lr = 1` in TOML is an integer
            object.__setattr__(section, field.name, value)  # frozen, and still being built
        if type(value) is not kind:
            raise ConfigError(
                f"{name}.{field.name} is {value!r}, a {type(value).__name__}; "
                f"give a {kind.__name__}, {field.metadata['allowed'].describe()}"
            )
        if not field.metadata["allowed"].admits(value):
            raise ConfigError(
                f"{name}.{field.name} is {value!r}; allowed: {field.metadata['allowed'].describe()}"
            )
