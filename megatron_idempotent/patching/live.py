"""Finds modules, and the owners of functions in them, without waking what is lazy."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from .import_hooks import namespace

#: Do not import Megatron, and hold half of all names.
_NEVER = frozenset({"torch"}) | sys.stdlib_module_names


def modules(
    wanted: Callable[[str], bool] = lambda name: True, *, everywhere: bool = False
) -> Iterator[tuple[str, types.ModuleType]]:
    """Yield the modules that may have names of Megatron's functions, by name; wake no lazy one.

    Args:
        wanted: tells of a module's name whether it is yielded.
        everywhere: True for torch's modules and Python's own, too, which do not import Megatron.
    """
    for name in list(sys.modules):
        # By the name first: to look at a module copies its page of memory in a forked process.
        known = everywhere or name.partition(".")[0] not in _NEVER
        module = sys.modules.get(name) if known and wanted(name) else None
        # Not isinstance(): it believes what a proxy says it is, and asking wakes a lazy one.
        if module is not None and issubclass(type(module), types.ModuleType):
            yield name, module


def find_owner(module: types.ModuleType, qualname: str) -> Any:
    """Return the module, or the class in it, whose `__dict__` has the last part of `qualname`.

    Raises:
        AttributeError: there is no such class.
    """
    owner: Any = module
    for part in qualname.split(".")[:-1]:
        owner = namespace(owner).get(part)
        if not isinstance(owner, type):
            raise AttributeError(f"{module.__name__} has no {qualname}")
    return owner


def unbound(raw: Any) -> Any:
    """Return the function in a `staticmethod` or `classmethod`, and anything else as it is."""
    return raw.__func__ if type(raw) in (staticmethod, classmethod) else raw
