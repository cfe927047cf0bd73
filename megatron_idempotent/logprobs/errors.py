"""Words the errors of arguments that do not fit."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def misfit(caller: str, argument: str, remedy: str) -> ValueError:
    """Return a `ValueError`: `caller` got `argument`, and what to pass instead is `remedy`."""
    return ValueError(f"{caller}() got {argument}: {remedy}")


def typed(tensor: Tensor) -> str:
    """Return a tensor's type and shape, as errors name them."""
    return f"{tensor.dtype} and shape {tuple(tensor.shape)}"


def one_of(caller: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise `ValueError` unless an option has one of its allowed values."""
    if value not in allowed:
        raise misfit(caller, f"{name}={value!r}", f"pass one of {', '.join(allowed)}")


def not_dense(value: Any) -> str | None:
    """Return None for a dense tensor with values; for any other value, a text that describes it."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    if value.layout not in (torch.strided, torch.jagged):
        return f"a tensor of layout {value.layout}"
    return "a tensor on the meta device, which has no values" if value.is_meta else None


def dense(caller: str, name: str, value: Any) -> None:
    """Raise `ValueError` if the value is not a tensor, is sparse, or is on the meta device."""
    if (kind := not_dense(value)) is not None:
        raise misfit(caller, f"as {name} {kind}", "pass a dense torch.Tensor")


def within(
    caller: str, name: str, value: Any, kinds: Any, bounds: tuple[float, float], remedy: str
) -> None:
    """Raise `ValueError` unless the value is of these kinds, no bool, and within the bounds."""
    lowest, highest = bounds
    if isinstance(value, bool) or not isinstance(value, kinds) or not lowest <= value <= highest:
        raise misfit(caller, f"{name}={value!r}", remedy)


def integer(caller: str, name: str, value: Any) -> None:
    """Raise `ValueError` unless the value is an int."""
    within(caller, name, value, Integral, (-math.inf, math.inf), "pass an int, such as -100")


def number(caller: str, temperature: Any) -> None:
    """Raise `ValueError` unless the temperature is a number or a dense tensor."""
    if isinstance(temperature, Tensor):
        dense(caller, "temperature", temperature)
    elif not isinstance(temperature, Real):
        remedy = "pass a positive number, or a tensor with one for each token"
        raise misfit(caller, f"temperature={temperature!r}", remedy)
