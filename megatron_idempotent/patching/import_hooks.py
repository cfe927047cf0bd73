"""Waits for modules that are not imported yet, and finds their source without importing them.

wrapt's post-import hooks do the waiting. Importing wrapt takes longer than all else that `apply()`
does, so a finder in `sys.meta_path` puts that off until somebody imports Megatron.
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
    """Return the module's `__dict__`; a lazy module is not loaded, while `vars()` would load it."""
    try:
        namespace_dict: dict[str, Any] = object.__getattribute__(module, "__dict__")
    except AttributeError:
        return {}  # somebody put an object that is no module into sys.modules
    return namespace_dict


def forget() -> None:
    """Forget where modules were found: `sys.path` may have changed since the last public call."""
    _found.clear()
    _package_paths.clear()


def find(module: str) -> str | None:
    """Return the source file of `module`, or None. Imports nothing, not even parent packages."""
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


#: The first Python whose import system nobody has read, see `_watch`.
_UNREAD = (3, 15)
_lock = PerProcessLock(__name__, "_lock")
# By top-level package that nobody has imported yet: the modules of it that are waited for.
_waiting_packages: dict[str, dict[str, _Action]] = PerProcessDict(__name__, "_waiting_packages")
_hooked: set[str] = PerProcessSet(__name__, "_hooked")
# Modules that cannot tell when they are complete, looked at with every import.
_polled: dict[str, _Action] = PerProcessDict(__name__, "_polled")
# The module objects whose body has run to its end. Their spec still says "initializing" while a
# post-import hook runs.
_complete: dict[str, ModuleType] = PerProcessDict(__name__, "_complete")


def door_waits() -> bool:
    """Return whether a finder of ours waits for the first import of Megatron to call `apply()`.

    `megatron_idempotent.hook` has one, and the file that `hook install` writes another.
    """
    doors = ("_Watch", "MegatronIdempotentHook")
    return any(
        type(finder).__name__ in doors and getattr(finder, "waits", False)
        for finder in sys.meta_path
    )


def is_complete(name: str) -> bool:
    """Return whether the module is imported and its body has run: all functions are there."""
    module = sys.modules.get(name)
    if module is None:
        return False
    kind = type(module)
    if (kind.__module__, kind.__name__) == ("importlib.util", "_LazyModule"):
        return False  # its body runs when somebody first asks it for something, which is not us
    return not _is_initializing(module) or _complete.get(name) is module


def under_way(names: Iterable[str]) -> list[str]:
    """Return which of these modules, and of the packages above them, are being imported now."""
    above = {
        ".".join(parts[:count])
        for parts in (name.split(".") for name in names)
        for count in range(1, len(parts) + 1)
    }
    return sorted(name for name in above if name in sys.modules and not is_complete(name))


def when_complete(names: Iterable[str], action: _Action) -> None:
    """Call `action` each time one of the modules has been imported. It must not raise.

    Call this without holding a lock that `action` takes: an import in another thread may be in the
    middle of calling it.
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
            # Another thread has begun to import it in between, and may not ring any more.
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
            # An import began in another thread, and wrapt calls back before it has ended.
            _imported(name, module, action)
            return
        # wrapt forgets a hook that has fired.
        _hooked.discard(name)
        _complete[name] = module
        action()

    wrapt.register_post_import_hook(imported, name)
    registering = False


def _imported(name: str, module: ModuleType, action: _Action) -> None:
    """Act for a module in `sys.modules`: at once, or at the end of the import under way."""
    if is_complete(name):
        _hooked.discard(name)
        action()
    elif not _is_initializing(module) or not _watch(name, module, action):
        _hooked.discard(name)
        _polled[name] = action


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(namespace(module).get("__spec__"), "_initializing", False))


def _watch(name: str, module: ModuleType, action: _Action) -> bool:
    """Act when the import system marks the spec of `module` as initialised; False if it can't.

    No import hook reaches an import that has already begun. Its last act, successful or not, is to
    set `spec._initializing`, so that is made a property until then. This is done only on Pythons
    whose import system a person has read; on a later one the next `apply()` looks again.
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
                    # Before others may use it: they wait for as long as it says "initializing".
                    _complete[name] = module
                    action()
                else:
                    _register(name, action)  # it raised; somebody may try again
        finally:
            vars(spec)["_initializing"] = value

    def initializing(spec: Any) -> Any:
        return vars(spec).get("_initializing", False)

    watched = type(kind.__name__, (kind,), {"_initializing": property(initializing, done)})
    try:
        spec.__class__ = watched
    except TypeError:
        return False  # a spec of somebody's own, with slots
    if not initializing(spec):
        done(spec, False)  # the import ended while the property was put in
    return True


class _ImportSentinel:
    """Registers hooks, as a finder, when a package that is waited for is about to be imported.

    It stays in `sys.meta_path`: to take a finder out in the middle of an import makes that import
    skip the next finder.
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
        # wrapt has put its finder before this one, where this import no longer comes by.
        import importlib.util

        return importlib.util.find_spec(fullname)
