"""Properties that are computed once.

`functools.cached_property` has a lock before Python 3.12, and a class with one does not pickle by
value, which is how Ray's users send a package that workers do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class computed(Generic[_T]):
    """A property whose value is kept in the instance's `__dict__`.

    Two threads that ask at the same time may both compute it.

    Example:
        class Text:
            @computed
            def length(self) -> int:
                return 4
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> _T:
        value = vars(instance)[self._name] = self._compute(instance)
        return value
