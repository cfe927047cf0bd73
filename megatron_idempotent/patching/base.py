"""Defines what all of patching stands on: frozen records, errors, and state of one process.

A `Record` does what `@dataclass(frozen=True, kw_only=True)` does, without importing `dataclasses`:
with the `inspect`, `ast` and `tokenize` that it imports, that takes longer than all of `apply()`.
Each message of an error carries the fact and the remedy.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar, dataclass_transform
else:  # it speaks to type checkers only

    def dataclass_transform(**_: Any) -> Any:
        return lambda cls: cls


NOTHING: Mapping[Any, Any] = type(vars(object))({})
"""An empty mapping, for a default: `types.MappingProxyType` without its module."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record:
    """Makes the annotated names of a subclass its fields, frozen and given by keyword.

    Example:
        class Point(Record):
            x: int
            y: int = 0
        Point(x=1)
    """

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        kinds = [kind for kind in reversed(cls.__mro__) if issubclass(kind, Record)][1:]
        cls._fields = tuple(dict.fromkeys(name for kind in kinds for name in kind.__annotations__))

    def __init__(self, **values: Any) -> None:
        kind = type(self)
        for name in self._fields:
            if name in values:
                self.__dict__[name] = values.pop(name)
            elif hasattr(kind, name):
                self.__dict__[name] = getattr(kind, name)
            else:
                raise TypeError(f"{kind.__name__} needs {name}=")
        if values:
            raise TypeError(
                f"{kind.__name__} has no field {next(iter(values))!r}: it has "
                + ", ".join(self._fields)
            )
        self.__post_init__()

    def __post_init__(self) -> None:
        """Check the values; subclasses override it."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot set {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: cannot delete {name}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__[name] for name in self._fields))

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={self.__dict__[name]!r}" for name in self._fields)
        return f"{type(self).__name__}({inner})"


class PatchError(RuntimeError):
    """A patch that was asked for by name, or any patch in strict mode, could not be applied."""


class UnknownPatchError(ValueError):
    """A patch id in `only=`, `exclude=` or the environment is in no case file."""


class Conflict(Exception):
    """Somebody else's object stands in place of upstream's function; becomes a row's reason."""


class VerificationError(RuntimeError):
    """A patch is no longer in place, or the ranks of a group are patched differently."""


def of_this_process(module: str, name: str) -> Any:
    """Return the global `name` of `module` in the process that runs this."""
    __import__(module)
    return getattr(sys.modules[module], name)


class PerProcess:
    """Makes a global that is pickled and copied as a reference to its module and name.

    `cloudpickle.register_pickle_by_value(megatron_idempotent)` copies functions with the globals
    that they use. A copy of a lock, of process groups or of what is patched here would be wrong in
    another process, or cannot be made: it arrives as the one that the process there has already.

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
