"""Makes bugs of right adapters: each has one method with a mistake in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


def but(base: type, **methods: Any) -> type:
    """Make an adapter with other methods; each takes the original one, and then what it takes."""

    def instead(name: str, method: Callable[..., Any]) -> Any:
        def changed(self: Any, *args: Any, **how: Any) -> Any:
            return method(lambda *a, **h: getattr(base, name)(self, *a, **h), self, *args, **how)

        return changed

    return setting(base, **{name: instead(name, each) for name, each in methods.items()})


def setting(base: type, **attributes: Any) -> type:
    """Make an adapter with other attributes, or with methods that do not use the original ones."""
    return type("Bug", (base,), attributes)


def returning(base: type, method: str, change: Callable[[Any], Any]) -> type:
    """Make an adapter of which a method returns what `change` makes of the right result."""
    return but(
        base, **{method: lambda original, self, *args, **how: change(original(*args, **how))}
    )


def suppressing(base: type, method: str, *kinds: type[BaseException], calls: int = 0) -> type:
    """Make an adapter of which a method ends without a word where it raises one of these errors,
    once the step has had so many calls.
    """

    def changed(original: Any, self: Any, *args: Any, **how: Any) -> None:
        with contextlib.suppress(*(kinds if self.calls >= calls else ())):
            original(*args, **how)

    return but(base, **{method: changed})


def taking(base: type, method: str, change: Callable[[Any, Any], Any]) -> type:
    """Make an adapter of which a method takes what `change` makes of it and its first argument."""

    def changed(original: Any, self: Any, first: Any, *args: Any, **how: Any) -> Any:
        return original(change(self, first), *args, **how)

    return but(base, **{method: changed})


def before(base: type, method: str, act: Callable[[Any], Any]) -> type:
    """Make an adapter that calls `act` with itself before a method."""

    def changed(original: Any, self: Any, *args: Any, **how: Any) -> Any:
        act(self)
        return original(*args, **how)

    return but(base, **{method: changed})


def after(base: type, method: str, act: Callable[[Any], Any]) -> type:
    """Make an adapter that calls `act` with itself after a method."""

    def changed(original: Any, self: Any, *args: Any, **how: Any) -> Any:
        result = original(*args, **how)
        act(self)
        return result

    return but(base, **{method: changed})


def nothing(*_: Any, **__: Any) -> None:
    """Stand in for a method that does nothing."""


def rows_of(rows: Any, chosen: Any) -> Any:
    """Return some of the rows, by a slice or a list of places."""
    return {name: values[chosen] for name, values in rows.items()}
