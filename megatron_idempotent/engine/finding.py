"""Finds a module's source without importing it, or waking a lazy one."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_found: dict[str, str | None] = {}
_packages: dict[str, list[str] | None] = {}


def namespace(module: object) -> dict[str, Any]:
    """The module's `__dict__`, also of a lazy one: `vars()` and `hasattr()` would load that."""
    try:
        found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}  # somebody put an object that is no module into sys.modules
    return found


def forget() -> None:
    """Forget where modules were found: `sys.path` may have changed since the last public call."""
    _found.clear()
    _packages.clear()


def find(module: str) -> str | None:
    """The source file of `module`, or None. Imports nothing, not even parent packages."""
    if module not in _found:
        _found[module] = _find(module)
    return _found[module]


def _find(module: str) -> str | None:
    loaded = sys.modules.get(module)
    if loaded is not None and namespace(loaded).get("__file__"):
        return _source(str(namespace(loaded)["__file__"]))
    parent = module.rpartition(".")[0]
    search = _package(parent) if parent else None
    if parent and search is None:
        return None
    if "__path__" in namespace(loaded):
        return _source(namespace(loaded).get("__file__"))
    spec = _spec(module, search)
    return None if spec is None else _source(spec.origin)


def _package(name: str) -> list[str] | None:
    """Returns the folders of a package, or None if it is none."""
    if name not in _packages:
        _packages[name] = _search(name)
    return _packages[name]


def _search(name: str) -> list[str] | None:
    loaded = namespace(sys.modules.get(name))
    if "__path__" in loaded:
        return list(loaded["__path__"])
    parent = name.rpartition(".")[0]
    search = _package(parent) if parent else None
    if parent and search is None:
        return None
    spec = _spec(name, search)
    if spec is None or spec.submodule_search_locations is None:
        return None
    return list(spec.submodule_search_locations)


def _spec(name: str, search: Sequence[str] | None) -> Any:
    for finder in list(sys.meta_path):
        # Import-hook finders (wrapt's, ours) would import parents or wake hooks to answer.
        if type(finder).__module__.startswith(("wrapt.", "megatron_idempotent.")):
            continue
        find_spec = getattr(finder, "find_spec", None)  # as importlib does: old ones have none
        try:
            spec = None if find_spec is None else find_spec(name, search)
        except KeyError:
            # A namespace package in one that is not imported: its parent is looked up, in vain, in
            # sys.modules.
            from importlib.machinery import ModuleSpec

            spec = ModuleSpec(name, None, is_package=True)
            folders = [os.path.join(folder, name.rpartition(".")[2]) for folder in search or ()]
            spec.submodule_search_locations = [f for f in folders if os.path.isdir(f)]
        if spec is not None:
            return spec
    return None


def _source(path: str | None) -> str | None:
    return path if path and path.endswith(".py") else None
