"""Makes `PerProcess` with weak keys, in a file of its own because importing weakref takes time."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakKeyDictionary

from .base import PerProcess

_K = TypeVar("_K")
_V = TypeVar("_V")


class PerProcessWeakKeys(PerProcess, WeakKeyDictionary[_K, _V]):
    """A dictionary with weak keys that is pickled as a reference to a module's global, so that each
    process has its own.

    Example: `_order: WeakKeyDictionary[Any, int] = PerProcessWeakKeys(__name__, "_order")`.
    """

    def __init__(self, module: str, name: str) -> None:
        PerProcess.__init__(self, module, name)
        WeakKeyDictionary.__init__(self)
