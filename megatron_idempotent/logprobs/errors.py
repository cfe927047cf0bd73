"""Words the errors of arguments that do not fit."""

from __future__ import annotations

from torch import Tensor


def misfit(caller: str, argument: str, remedy: str) -> ValueError:
    """Return the error of a function's argument, and of what to pass in its place."""
    return ValueError(f"{caller}() got {argument}: {remedy}")


def typed(tensor: Tensor) -> str:
    """Return a tensor's type and shape, as errors name them."""
    return f"{tensor.dtype} and shape {tuple(tensor.shape)}"


def one_of(caller: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise `ValueError` unless an option has one of its allowed values."""
    if value not in allowed:
        raise misfit(caller, f"{name}={value!r}", f"pass one of {', '.join(allowed)}")
