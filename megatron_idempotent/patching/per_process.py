"""Keeps state that each process has for itself, also if the package arrives pickled by value.

`cloudpickle.register_pickle_by_value(megatron_idempotent)` copies functions with the globals that
they use. A copy of a lock, of process groups or of what is patched here would be wrong in another
process, or cannot be made; these containers arrive as those that the process there has already.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock

TYPE_CHECKING = False  # `apply()` imports this, and typing takes time to import
if TYPE_CHECKING:
    from typing import Any


def of_this_process(module: str, name: str) -> Any:
    """Return the global `name` of `module` in the process that runs this."""
    __import__(module)
    return getattr(sys.modules[module], name)


class PerProcess:
    """Makes a global that is pickled and copied as a reference to its module and name.

    Example:
        class Counter(PerProcess):
            count = 0


        counter = Counter(__name__, "counter")
    """

    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return of_this_process, self._place


class PerProcessDict(PerProcess, dict["Any", "Any"]):
    """Is a dictionary. Example: `_groups: dict[str, Any] = PerProcessDict(__name__, "_groups")`."""


class PerProcessSet(PerProcess, set["Any"]):
    """Is a set. Example: `_seen: set[str] = PerProcessSet(__name__, "_seen")`."""


class PerProcessList(PerProcess, list["Any"]):
    """Is a list. Example: `windows: list[Any] = PerProcessList(__name__, "windows")`."""


class PerProcessLock(PerProcess):
    """Locks; a forked child finds the lock open, even if a thread of the parent held it.

    Example:
        _lock = PerProcessLock(__name__, "_lock")
        with _lock:
            ...
    """

    def __init__(self, module: str, name: str, allocate: Any = allocate_lock) -> None:
        super().__init__(module, name)
        self._allocate = allocate
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Replace the lock by an open one."""
        self._lock = self._allocate()

    def acquire(self, *, timeout: float = -1) -> bool:
        """Take the lock within `timeout` seconds, -1 for ever; return whether that was possible."""
        taken: bool = self._lock.acquire(timeout=timeout)
        return taken

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()
