"""Makes `PerProcess` with weak keys, in a file of its own because importing weakref takes time."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakKeyDictionary

from .base import PerProcess

_K = TypeVar("_K")
_V = TypeVar("_V")


class PerProcessWeakKeys(PerProcess, WeakKeyDictionary[_K, _V]):
    """Maps objects to values, without keeping the objects alive.

    Example: `_order: WeakKeyDictionary[Any, int] = PerProcessWeakKeys(__name__, "_order")`.
    """

    def __init__(self, module: str, name: str) -> None:
        PerProcess.__init__(self, module, name)
        WeakKeyDictionary.__init__(self)
