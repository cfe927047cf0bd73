"""Helpers with which wrappers read the call that they wrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def arguments(
    original: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The call's arguments by upstream's parameter names, defaults included.

    Raises:
        TypeError: the call does not fit the signature; the same error that upstream would raise.
    """
    import inspect  # here, because apply() before Megatron's import has no use for it

    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments
