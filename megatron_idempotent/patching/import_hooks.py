"""Calls functions after modules are imported, and finds modules' source without importing them.

It uses wrapt's post-import hooks. Importing wrapt takes longer than the rest of `apply()`, so a
finder in `sys.meta_path` imports it when a program imports Megatron.
"""

from __future__ import annotations

import os
import sys

from .base import PerProcessDict, PerProcessLock, PerProcessSet

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    _Action = Callable[[], None]


_found: dict[str, str | None] = {}
_package_paths: dict[str, list[str] | None] = {}


def namespace(module: object) -> dict[str, Any]:
    """Return the `__dict__` of a module or other object; an empty one if it has none. A lazy module
    is not loaded, while `vars()` would load it.
    """
    try:
        namespace_dict: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}  # an object in sys.modules that is no module
    return namespace_dict


def forget() -> None:
    """Clear the caches of modules' paths, because `sys.path` may have changed since they were
    filled.
    """
    _found.clear()
    _package_paths.clear()


def find(module: str) -> str | None:
    """Return the path of `module`'s source file, or None, without importing any package."""
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
    """Return the folders in which a package's modules are searched; None if it is not a package."""
    if name not in _package_paths:
        _package_paths[name] = _search(name)
    return _package_paths[name]


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
        # Import-hook finders (wrapt's, ours) would import parents, or call hooks.
        if type(finder).__module__.startswith(("wrapt.", "megatron_idempotent.")):
            continue
        find_spec = getattr(finder, "find_spec", None)  # as importlib does: old ones have none
        try:
            spec = None if find_spec is None else find_spec(name, search)
        except KeyError:
            # A namespace package in a package that is not imported: the finder looks up the parent
            # in sys.modules, and fails.
            from importlib.machinery import ModuleSpec

            spec = ModuleSpec(name, None, is_package=True)
            folders = [os.path.join(folder, name.rpartition(".")[2]) for folder in search or ()]
            spec.submodule_search_locations = [f for f in folders if os.path.isdir(f)]
        if spec is not None:
            return spec
    return None


def _source(path: str | None) -> str | None:
    return path if path and path.endswith(".py") else None


#: The first Python whose import system was not reviewed for `_watch`.
_UNREAD = (3, 15)
_lock = PerProcessLock(__name__, "_lock")
# Top-level package that is not imported yet → its modules, and the function to call for each.
_waiting_packages: dict[str, dict[str, _Action]] = PerProcessDict(__name__, "_waiting_packages")
_hooked: set[str] = PerProcessSet(__name__, "_hooked")
# Modules whose import we cannot see end; each later import checks them.
_polled: dict[str, _Action] = PerProcessDict(__name__, "_polled")
# The module objects whose body has run to its end. Their spec still says "initializing" while a
# post-import hook runs.
_complete: dict[str, ModuleType] = PerProcessDict(__name__, "_complete")


def door_waits() -> bool:
    """Return whether the first import of Megatron will call `apply()`, because of an import hook.

    `megatron_idempotent.hook`, and the file that `hook install` writes, add finders that do so.
    """
    doors = ("_Watch", "MegatronIdempotentHook")
    return any(
        type(finder).__name__ in doors and getattr(finder, "waits", False)
        for finder in sys.meta_path
    )


def is_complete(name: str) -> bool:
    """Return whether the module is imported and its body has run, so that it has all functions."""
    module = sys.modules.get(name)
    if module is None:
        return False
    kind = type(module)
    if (kind.__module__, kind.__name__) == ("importlib.util", "_LazyModule"):
        return False  # its body runs when another module first reads an attribute
    return not _is_initializing(module) or _complete.get(name) is module


def under_way(names: Iterable[str]) -> list[str]:
    """Return the modules among `names`, and their parent packages, that are being imported now."""
    above = {
        ".".join(parts[:count])
        for parts in (name.split(".") for name in names)
        for count in range(1, len(parts) + 1)
    }
    return sorted(name for name in above if name in sys.modules and not is_complete(name))


def when_complete(names: Iterable[str], action: _Action) -> None:
    """Have `action` called once for each named module: when its import ends, or at once if it is
    imported already. `action` must not raise.

    The caller must not hold a lock that `action` takes: another thread's import may be calling
    `action`.
    """
    for name in names:
        package = name.partition(".")[0]
        if package not in sys.modules:
            with _lock:
                if not any(isinstance(finder, _ImportSentinel) for finder in sys.meta_path):
                    sys.meta_path.insert(0, _ImportSentinel())
                _waiting_packages.setdefault(package, {})[name] = action
            if package not in sys.modules:
                continue
            # Another thread has begun to import it since, and may have passed the finder before.
        _register(name, action)


def _register(name: str, action: _Action) -> None:
    with _lock:
        if name in _hooked:
            return
        _hooked.add(name)
    module = sys.modules.get(name)
    if module is not None:
        _imported(name, module, action)
        return
    import wrapt

    registering = True

    def imported(module: ModuleType) -> None:
        if registering and not is_complete(name):
            # An import began in another thread, and wrapt calls this before that import has ended.
            _imported(name, module, action)
            return
        # wrapt removes a hook when it has called it.
        _hooked.discard(name)
        _complete[name] = module
        action()

    wrapt.register_post_import_hook(imported, name)
    registering = False


def _imported(name: str, module: ModuleType, action: _Action) -> None:
    """Call `action` for a module in `sys.modules`: at once if its import has ended, else when it
    ends. If that end cannot be observed, check again when any module is imported later.
    """
    if is_complete(name):
        _hooked.discard(name)
        action()
    elif not _is_initializing(module) or not _watch(name, module, action):
        _hooked.discard(name)
        _polled[name] = action


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(namespace(module).get("__spec__"), "_initializing", False))


def _watch(name: str, module: ModuleType, action: _Action) -> bool:
    """Have `action` called when a module's running import ends; return False if impossible.

    No import hook reaches an import that has already begun. The last step of an import, successful
    or not, sets `spec._initializing`, so we make that a property until then. We do so only on
    Pythons whose import system was reviewed; on later ones the next `apply()` checks the module.
    """
    if sys.version_info >= _UNREAD:
        return False
    spec = namespace(module)["__spec__"]
    kind = type(spec)

    def done(spec: Any, value: bool) -> None:
        try:
            if not value and type(spec) is watched:
                spec.__class__ = kind
                _hooked.discard(name)
                if sys.modules.get(name) is module:
                    # Before other threads may use the module: they wait while it is "initializing".
                    _complete[name] = module
                    action()
                else:
                    _register(name, action)  # the import raised, and may be repeated
        finally:
            vars(spec)["_initializing"] = value

    def initializing(spec: Any) -> Any:
        return vars(spec).get("_initializing", False)

    watched = type(kind.__name__, (kind,), {"_initializing": property(initializing, done)})
    try:
        spec.__class__ = watched
    except TypeError:
        return False  # the spec's class is not the standard one, and has slots
    if not initializing(spec):
        done(spec, False)  # the import ended before the property was set
    return True


class _ImportSentinel:
    """A finder in `sys.meta_path`: when the import of a package begins, it registers the
    post-import hooks for the package's modules.

    It stays in `sys.meta_path`: removing a finder during an import makes that import skip the next
    finder.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for name in [name for name in _polled if is_complete(name)]:
            action = _polled.pop(name, None)
            if action is not None:
                action()
        waiting = _waiting_packages.pop(fullname.partition(".")[0], None)
        if waiting is None:
            return None
        for name, action in waiting.items():
            _register(name, action)
        if fullname not in waiting:
            return None
        # wrapt has put its finder before this one, and this import has already passed that place.
        import importlib.util

        return importlib.util.find_spec(fullname)
