"""Wait for modules that are not imported yet, or that are being imported right now.

wrapt's post-import hooks do the waiting. Importing wrapt takes longer than all else that `apply()`
does, so a doorbell on the top-level package puts that off until somebody imports Megatron.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_lock = threading.Lock()
_hooked: set[str] = set()
# The module objects whose body has run to its end. Their spec still says "initializing" while a
# post-import hook runs.
_complete: dict[str, ModuleType] = {}


def is_complete(name: str) -> bool:
    """Whether the module is imported and its body has run: all of its functions are there."""
    module = sys.modules.get(name)
    if module is None:
        return False
    initializing = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return not initializing or _complete.get(name) is module


def when_complete(names: Iterable[str], action: Callable[[], None]) -> None:
    """Call `action` each time one of the modules has been imported. It must not raise.

    Call this without holding a lock that `action` takes: an import in another thread may be in the
    middle of calling it.
    """
    by_package: dict[str, list[str]] = {}
    for name in names:
        by_package.setdefault(name.partition(".")[0], []).append(name)
    for package, members in by_package.items():
        if package in sys.modules:
            _register(members, action)
        elif not any(isinstance(f, _Doorbell) and f.package == package for f in sys.meta_path):
            sys.meta_path.insert(0, _Doorbell(package, members, action))


def _register(names: Iterable[str], action: Callable[[], None]) -> None:
    import wrapt

    for name in names:
        with _lock:
            if name in _hooked:
                continue
            if name in sys.modules and not is_complete(name):
                # wrapt would call back at once, before the functions are there.
                sys.meta_path.insert(0, _Nudge(name, action))
                continue
            _hooked.add(name)
        wrapt.register_post_import_hook(_hook(action), name)


def _hook(action: Callable[[], None]) -> Callable[[ModuleType], None]:
    def imported(module: ModuleType) -> None:
        with _lock:
            # wrapt forgets a hook that has fired.
            _hooked.discard(module.__name__)
            _complete[module.__name__] = module
        action()

    return imported


class _Doorbell:
    """A finder that finds nothing, and rings when its package is about to be imported."""

    def __init__(self, package: str, names: list[str], action: Callable[[], None]) -> None:
        self.package, self._names, self._action = package, names, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] == self.package and self in sys.meta_path:
            sys.meta_path.remove(self)
            _register(self._names, self._action)
        return None


class _Nudge:
    """A finder that finds nothing, and wakes with the first import after a module is complete."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self in sys.meta_path and is_complete(self._name):
            sys.meta_path.remove(self)
            self._action()
        return None
