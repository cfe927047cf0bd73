"""Wait for modules that are not imported yet, or that are being imported right now.

wrapt's post-import hooks do the waiting. Importing wrapt takes longer than all else that `apply()`
does, so a doorbell on the top-level package puts that off until somebody imports Megatron.
"""

from __future__ import annotations

import sys

from .finding import namespace
from .per_process import PerProcessDict, PerProcessLock, PerProcessSet

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    _Action = Callable[[], None]

#: The first Python whose import system nobody has read, see `_watch`.
_UNREAD = (3, 14)
_lock = PerProcessLock(__name__, "_lock")
# By top-level package that nobody has imported yet: the modules of it that are waited for.
_packages: dict[str, dict[str, _Action]] = PerProcessDict(__name__, "_packages")
_hooked: set[str] = PerProcessSet(__name__, "_hooked")
# Modules that cannot tell when they are complete, looked at with every import.
_polled: dict[str, _Action] = PerProcessDict(__name__, "_polled")
# The module objects whose body has run to its end. Their spec still says "initializing" while a
# post-import hook runs.
_complete: dict[str, ModuleType] = PerProcessDict(__name__, "_complete")


def is_complete(name: str) -> bool:
    """Returns whether the module is imported and its body has run: all functions are there."""
    module = sys.modules.get(name)
    if module is None:
        return False
    kind = type(module)
    if (kind.__module__, kind.__name__) == ("importlib.util", "_LazyModule"):
        return False  # its body runs when somebody first asks it for something, which is not us
    return not _is_initializing(module) or _complete.get(name) is module


def when_complete(names: Iterable[str], action: _Action) -> None:
    """Call `action` each time one of the modules has been imported. It must not raise.

    Call this without holding a lock that `action` takes: an import in another thread may be in the
    middle of calling it.
    """
    for name in names:
        package = name.partition(".")[0]
        if package not in sys.modules:
            with _lock:
                if not any(isinstance(finder, _Doorbell) for finder in sys.meta_path):
                    sys.meta_path.insert(0, _Doorbell())
                _packages.setdefault(package, {})[name] = action
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
    """`module` is in `sys.modules`: act at once, or at the end of the import under way."""
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
    set `spec._initializing`, so that is made a property for as long. Only where a person has read
    that it is: on a later Python the target is looked for when `apply()` is called again.
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


class _Doorbell:
    """A finder that finds nothing, and rings when a package is about to be imported.

    It stays where it is: to take a finder out of `sys.meta_path` in the middle of an import makes
    that import skip the next one.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for name in [name for name in _polled if is_complete(name)]:
            action = _polled.pop(name, None)
            if action is not None:
                action()
        waiting = _packages.pop(fullname.partition(".")[0], None)
        if waiting is None:
            return None
        for name, action in waiting.items():
            _register(name, action)
        if fullname not in waiting:
            return None
        # wrapt has put its finder before this one, where this import no longer comes by.
        import importlib.util

        return importlib.util.find_spec(fullname)
