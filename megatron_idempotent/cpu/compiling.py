"""Compiled functions, which run eagerly while the runtime is on.

`torch.compile` and `torch.compiler.disable` import the compiler, a quarter of the time that the
import of Megatron takes, which decorates functions with both. The runtime calls none of them
compiled, so a plain function is decorated in its first call after the runtime is off. Imports
torch; loaded by `enable()` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch


def replacements() -> list[tuple[Any, str, Any]]:
    return [
        (torch, "compile", _later(torch.compile)),
        (torch.compiler, "disable", _later(torch.compiler.disable)),
    ]


def _later(decorate: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator, put off for plain functions; of modules and classes as it is."""

    @functools.wraps(decorate)
    def decorator(*args: Any, **options: Any) -> Any:
        if not args and not options.keys() & {"model", "fn"}:
            return functools.partial(decorator, **options)
        if len(args) != 1 or type(args[0]) is not FunctionType:
            return decorate(*args, **options)
        return _Function(decorate, args[0], options).called()

    return decorator


class _Function:
    def __init__(
        self, decorate: Callable[..., Any], plain: FunctionType, options: dict[str, Any]
    ) -> None:
        self._decorate, self._plain, self._options = decorate, plain, options
        self._decorated: Callable[..., Any] | None = None

    def called(self) -> Callable[..., Any]:
        """A function, so that it binds as a method and pickles by its name."""

        @functools.wraps(self._plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._now()(*args, **kwargs)

        return call

    def _now(self) -> Callable[..., Any]:
        from megatron_idempotent.cpu.runtime import is_enabled

        if is_enabled():
            return self._plain
        if self._decorated is None:
            self._decorated = self._decorate(self._plain, **self._options)
        return self._decorated
