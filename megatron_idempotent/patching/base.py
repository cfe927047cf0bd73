"""Defines what all modules of patching use: records, the index of patches, errors, process state.

A `Record` does what `@dataclass(frozen=True, kw_only=True)` does, without importing `dataclasses`:
with the `inspect`, `ast` and `tokenize` that it imports, that takes longer than all of `apply()`.
Each error message has the fact and the remedy.

The index, `patches/_generated/index.txt`, has a line per hazard: reading it replaces importing
ninety case files, which takes longer than the rest of `apply()`.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, ClassVar, dataclass_transform
else:  # a decorator for type checkers only

    def dataclass_transform(**_: Any) -> Any:
        return lambda cls: cls


NOTHING: Mapping[Any, Any] = type(vars(object))({})
"""An empty mapping, for a default: `types.MappingProxyType` without its module."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record:
    """Base class whose subclasses are like frozen keyword-only dataclasses: a subclass's annotated
    names are its fields.

    Example:
        class Point(Record):
            x: int
            y: int = 0
        Point(x=1)
    """

    _fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        inherited = [name for base in cls.__bases__ for name in getattr(base, "_fields", ())]
        cls._fields = tuple(dict.fromkeys([*inherited, *cls.__annotations__]))

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
        """Do nothing; subclasses override it to check the fields' values after construction."""

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


MEGATRON = "megatron-core"

OLDEST = "0.12"
"""The value of `since` if all supported releases have the hazard."""

OPEN = "1000"
"""The value of `before` for frameworks, whose releases are not reviewed: their code decides."""

UNTRIED = "999"
"""The value of `before` if upstream has not repaired the hazard. It stands for `untried()`, the
first release that is not tested; from that release on the bodies of functions decide."""

PACKAGE, FRAMEWORKS = "megatron_idempotent.patches", "frameworks"
"""The package of the case files, and the one in it of those about frameworks."""

INDEX, _GENERATED = "index.txt", "_generated"

ON, OFF, DEBUG, NO_PATCH, NO_FACT = "on", "off", "debug", "-", "-"
"""Words of the index: a patch's switch (`ON`, `OFF`, `DEBUG`), no patch, no provided fact."""
_untried: list[str] = []


class Place(Record):
    """Holds the address `module:qualname` of a function in Megatron or in a framework."""

    address: str
    """`module:qualname`, with a colon because an attribute can shadow a submodule of that name."""

    @property
    def module(self) -> str:
        """The module part of the address `module:qualname`."""
        return self.address.partition(":")[0]

    @property
    def qualname(self) -> str:
        """The part of the address `module:qualname` after the colon."""
        return self.address.partition(":")[2]


class IndexEntry(Record):
    """Holds the fields of a `Patch` that the index file lists, such as id, releases and targets.
    The wrappers are not among them: they are in the case file.
    """

    id: str
    distribution: str
    since: str
    before: str
    default: bool
    debug: bool
    provides: tuple[str, ...]
    targets: tuple[Place, ...]

    @property
    def versions(self) -> str:
        """The range of affected releases as a version specifier, such as `>=0.12,<0.17`."""
        return specifier(self.since, self.before)


def specifier(since: str, before: str) -> str:
    """Return the version specifier `>=since,<before`; no upper bound if `before` is `OPEN`."""
    if before == OPEN:
        return f">={since}"
    return f">={since},<{untried() if before == UNTRIED else before}"


def untried() -> str:
    """Return the first Megatron release that this package is not tested with, such as `0.20`. The
    first line of `index.txt` names it.
    """
    if not _untried:
        _untried.append(generated(INDEX)[0].rpartition(" ")[2])
    return _untried[0]


def read_index(lines: list[str]) -> tuple[list[str], dict[str, IndexEntry]]:
    """Parse the lines of `index.txt`, which lists all hazards. Return (the ids of all hazards, a
    dictionary from the id of each patch to its `IndexEntry`); a hazard without a patch has none.
    """
    ids, entries = [], {}
    for line in lines[1:]:
        name, switch, *fields = line.split(" ")
        ids.append(name)
        if switch == NO_PATCH:
            continue
        distribution, since, before, provides, *addresses = fields
        entries[name] = IndexEntry(
            id=name,
            distribution=distribution,
            since=since,
            before=before,
            default=switch == ON,
            debug=switch == DEBUG,
            provides=() if provides == NO_FACT else tuple(provides.split(",")),
            targets=tuple([Place(address=address) for address in addresses]),
        )
    return ids, entries


def generated(name: str) -> list[str]:
    """Return the lines of the file `name` in `patches/_generated/`; lines that begin with `#` are
    left out.
    """
    # Not open(): the package may be in a zip file.
    package: Any = __import__(PACKAGE, fromlist=["__spec__"])
    path = os.path.join(generated_folder(), name)
    text = package.__spec__.loader.get_data(path).decode("utf-8")
    return [line for line in text.splitlines() if line[:1] != "#"]


def generated_folder() -> str:
    """Return the path of `patches/_generated/`, as it is installed here."""
    return os.path.join(folders()[PACKAGE], _GENERATED)


def folders() -> dict[str, str]:
    """Return package name → folder for the two packages that hold case files (one Python file per
    hazard): that of Megatron's hazards, and that of frameworks' hazards.
    """
    folder: str = __import__(PACKAGE, fromlist=["__path__"]).__path__[0]
    return {PACKAGE: folder, f"{PACKAGE}.{FRAMEWORKS}": os.path.join(folder, FRAMEWORKS)}


class PatchError(RuntimeError):
    """Raised if a patch that was asked for by name, or any patch in strict mode, could not be
    applied.
    """


class UnknownPatchError(ValueError):
    """A patch id in `only=`, `exclude=` or an environment variable names no known patch."""


class Conflict(Exception):
    """The function to patch is not upstream's own one: another package has replaced it. The message
    becomes the reason in the report.
    """


class VerificationError(RuntimeError):
    """A patch is no longer in place in this process, or ranks of the same job have different
    patches.
    """


def of_this_process(module: str, name: str) -> Any:
    """Import `module` in the process that calls this, and return the module's global `name`.
    Unpickling a `PerProcess` object calls it.
    """
    __import__(module)
    return getattr(sys.modules[module], name)


class PerProcess:
    """Base class for objects in a module's global variables. Pickling and copying such an object
    only writes its module and name, so that each process uses its own object.

    `cloudpickle.register_pickle_by_value(megatron_idempotent)` copies functions with the globals
    that they use. A lock, process groups or the list of applied patches cannot be copied to another
    process, or would be wrong there. So they are unpickled as the global of the process there.

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
    """A dict that pickles as a reference to a module's global, so that each process has its own.

    Example: `_groups: dict[str, Any] = PerProcessDict(__name__, "_groups")`.
    """


class PerProcessSet(PerProcess, set["Any"]):
    """A set that pickles as a reference to a module's global, so that each process has its own.

    Example: `_seen: set[str] = PerProcessSet(__name__, "_seen")`.
    """


class PerProcessList(PerProcess, list["Any"]):
    """A list that pickles as a reference to a module's global, so that each process has its own.

    Example: `windows: list[Any] = PerProcessList(__name__, "windows")`.
    """


class PerProcessLock(PerProcess):
    """A lock whose underlying lock is replaced in a forked child, so that the child finds it free
    even if a thread of the parent held it.

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
        """Replace the underlying lock by a new one that nobody holds."""
        self._lock = self._allocate()

    def acquire(self, *, timeout: float = -1) -> bool:
        """Acquire the lock; return False after `timeout` seconds without it (-1: no limit)."""
        acquired: bool = self._lock.acquire(timeout=timeout)
        return acquired

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()
