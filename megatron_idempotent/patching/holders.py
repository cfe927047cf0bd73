"""Finds the objects that refer to a function, and the names by which a person can find them.

The garbage collector lists the objects that an object refers to, and those that refer to it. A
holder is a name in a module or class, or an object without such a name. It may reach the function
through containers: lists, tables, closures. References are counted by container, so that those of
a container that two holders share are counted once.
"""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from .import_hooks import namespace
from .patch_points import Identities, find_owner, modules, unbound

_OURS = __name__.partition(".")[0]
#: The most steps from a function up to a name: a table in a table of a module's object takes five.
_DEPTH = 8
#: The most containers that are searched below one holder.
MOST = 2_000
#: The most items of a table that is searched; a larger one is data.
_LARGE = 1_000
#: The most objects whose referrers are listed in one call.
_WIDE = 100

_OWNERS = (type, types.ModuleType)
_RUNNING = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
#: Types of containers: whatever refers to one reaches the function through it.
_CONTAINERS = (
    *(dict, list, tuple, set, frozenset, collections.deque, types.MappingProxyType),
    *(types.CellType, types.FunctionType, types.MethodType, types.BuiltinMethodType, property),
    *(functools.partial, functools.partialmethod, type(functools.lru_cache(len))),
    *(staticmethod, classmethod, *_RUNNING),
)
_TABLES = (dict, list, tuple, set, frozenset)
#: The most frequent types of objects in containers; such objects are not searched.
_PLAIN = frozenset({str, int, float, bool, bytes, type, type(None), types.CodeType})

#: The attribute in which `functools.wraps` keeps the function that it wraps.
WORN = "__wrapped__"

References = dict[tuple[int, str], int]
"""Maps (id of a referring object, name) to its number of references. The name is that in a module
or class, `__wrapped__`, or empty."""


class Holder(NamedTuple):
    """Describes where the last search found a reference to one of upstream's functions: a name in a
    module or class, or an object without such a name, which may refer to the function through
    containers.

    Example:
        Holder("my.tool.TABLE", lambda: sys.modules["my.tool"], "TABLE")
    """

    label: str
    """The holder in words, for people."""
    owner: Callable[[], Any]
    """A function that returns the module, class or object, or None if it no longer exists."""
    name: str = ""
    """The name in the module or class; empty if the object itself refers to the function."""
    lasts: bool = True
    """False if `owner` keeps the object alive, so that the holder must not be remembered."""

    def is_at(self, other: Holder) -> bool:
        """Return whether both holders describe the same name in the same module or class, or the
        same object.
        """
        return (self.label, self.name) == (other.label, other.name) and (
            self.owner() is other.owner()
        )


def path_of(cls: type) -> str:
    """Return a class's full name, `module.qualname`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def of_module(module: str, name: str) -> Holder:
    """Return a `Holder` that describes the name `name` in the module `module`, found through
    `sys.modules`.
    """
    return Holder(f"{module}.{name}", lambda: sys.modules.get(module), name)


def of_class(cls: type, name: str) -> Holder:
    """Return a `Holder` that describes the name `name` in a class, with a weak reference to the
    class.
    """
    return Holder(f"{path_of(cls)}.{name}", weakref.ref(cls), name)


def references(
    holder: Holder,
    functions: Identities,
    within: Collection[int] | None = None,
    most: int = MOST,
) -> dict[int, References]:
    """Count how often a holder (a name or an object) refers to each of these functions.
    References of containers that can be reached from the holder count, too.

    Args:
        holder: the holder.
        functions: the functions.
        within: ids of the containers that are searched; None for all.
        most: the most containers that are searched.

    Returns:
        The references, by id of the function.
    """
    owner = holder.owner()
    value = namespace(owner).get(holder.name) if holder.name else owner
    if value in functions:
        # By the module's namespace, because a module may have two names.
        namespace_or_owner = (
            namespace(owner) if issubclass(type(owner), types.ModuleType) else owner
        )
        return {id(value): {(id(namespace_or_owner), holder.name): 1}}
    counts: dict[int, References] = {}
    opened = {id(value)}
    waiting = [value] if _may_hold(value) else []
    if within is not None and not issubclass(type(value), _CONTAINERS):
        within = {*within, id(namespace(value))}  # Python may have made this `__dict__` since
    for container in waiting:  # it grows while it is read
        items = _contents(container)
        occurrences: dict[int, list[Any]] = {}
        for item in functions.among(items):
            occurrences.setdefault(id(item), []).append(item)
        for key, same_items in occurrences.items():
            for name, count in _kinds(container, same_items):
                counts.setdefault(key, {})[id(container), name] = count
        for item in items if len(opened) < most else ():
            if type(item) not in _PLAIN and issubclass(type(item), _CONTAINERS):
                key = id(item)
                opens = key not in opened and (within is None or key in within)
                if opens and not (_is_namespace(item) or _is_ours(item)):
                    opened.add(key)
                    waiting.append(item)
    return counts


def _kinds(container: Any, functions: Sequence[Any]) -> Iterator[tuple[str, int]]:
    """Sort a container's references to one function into kinds. Yield ("__wrapped__", 1) if the
    container is a dictionary with the function under that key, and ("", their number) for other
    references.

    Args:
        container: any object.
        functions: the function, as often as the container refers to it.
    """
    code = _code_of(container)
    if not functions or (code is not None and getattr(functions[0], "__code__", None) is code):
        return  # the container is a generator that runs this function
    worn = issubclass(type(container), dict) and dict.get(container, WORN) is functions[0]
    if worn:
        yield WORN, 1
    if len(functions) > worn:
        yield "", len(functions) - worn


def _code_of(generator: Any) -> types.CodeType | None:
    names = ("gi_code", "cr_code", "ag_code") if issubclass(type(generator), _RUNNING) else ()
    return next((getattr(generator, name) for name in names if hasattr(generator, name)), None)


def _may_hold(value: Any) -> bool:
    return gc.is_tracked(value) and not issubclass(type(value), _OWNERS) and not _is_ours(value)


def _is_namespace(container: Any) -> bool:
    """Tell if a dictionary is the namespace (`__dict__`) of a module or class."""
    if not issubclass(type(container), dict):
        return False
    has = functools.partial(dict.__contains__, container)
    # A function's own dictionary may have `__module__`, but then has `__qualname__`, too.
    return has("__spec__") or (has("__module__") and not has("__qualname__"))


def _contents(container: Any) -> list[Any]:
    """Return the objects to which a container refers. If the container is a function, its globals
    and builtins are left out.
    """
    items = gc.get_referents(container)
    if isinstance(container, types.FunctionType):
        function: Any = container  # not every version of mypy knows __builtins__
        module, builtins = function.__globals__, function.__builtins__
        items = [item for item in items if item is not module and item is not builtins]
    return items


def _is_ours(value: Any) -> bool:
    """Tell if a value belongs to this package: a function or generator by its code, any other
    object by its class.
    """
    kind = type(value)
    if issubclass(kind, functools.partial):
        return _is_ours(value.func)
    if kind is types.FunctionType:
        module = value.__globals__.get("__name__")
    elif issubclass(kind, _RUNNING):
        frames = (getattr(value, name, None) for name in ("gi_frame", "cr_frame", "ag_frame"))
        frame = next(filter(None, frames), None)
        module = None if frame is None else frame.f_globals.get("__name__")
    else:
        module = kind.__module__
    return type(module) is str and module.partition(".")[0] == _OURS


class Climb:
    """Finds what refers to some values: first their direct referrers, then the referrers of these,
    until it reaches names in modules and classes.

    Args:
        values: the objects.
        container_ids: ids of objects that are left out.
    """

    def __init__(self, values: Sequence[Any], container_ids: set[int]) -> None:
        self._modules = {id(namespace(module)): name for name, module in modules(everywhere=True)}
        self._functions: dict[str, Holder] = {}
        self._owners: dict[int, tuple[Any, str]] = {}
        """Maps an id to (namespace of a module, the module's name) or (class, "")."""
        self._between: dict[int, Any] = {}
        self._ours = container_ids
        self._ends = set(map(id, values))
        objects: list[Any] = list(values)
        for _ in range(_DEPTH):
            # The collector compares each object with every reference in the process.
            objects = self._above(objects, values)[:_WIDE]
            if not objects:
                break
        self.passed = frozenset(self._between)
        """The ids of all containers between the objects and the names."""

    def _above(self, objects: list[Any], values: Sequence[Any]) -> list[Any]:
        referrers = gc.get_referrers(*objects)
        lists = {id(objects), id(values), id(self._between), id(referrers)}
        passed_ids = self._ours | self._between.keys() | self._ends | lists
        climbs = {id(value) for value in objects if issubclass(type(value), _CONTAINERS)}
        above: list[Any] = []
        for holder in referrers:
            key, kind = id(holder), type(holder)
            if key in self._modules or issubclass(kind, type):
                self._owners[key] = holder, self._modules.get(key, "")
                continue
            leads = key not in passed_ids and kind is not types.FrameType and _may_hold(holder)
            # An object that is no container is no step on the way: many unrelated ones refer to it.
            if leads and not climbs.isdisjoint(map(id, _contents(holder))):
                self._between[key] = holder
                if not self._has_name(holder):
                    above.append(holder)
        return above

    def _has_name(self, function: Any) -> bool:
        """Tell if a function's own qualified name leads to that function.
        If so, store a `Holder` of the name for `places`.
        """
        if type(function) is not types.FunctionType:
            return False
        module = str(function.__globals__.get("__name__"))
        qualname = getattr(function.__code__, "co_qualname", function.__qualname__)
        name = qualname.rpartition(".")[2]
        holder = Holder(f"{module}.{qualname}", lambda: _owner_of(module, qualname), name)
        if unbound(namespace(holder.owner()).get(name)) is not function:
            return False
        self._functions[holder.label] = holder
        return True

    def places(self) -> Iterator[Holder]:
        """Yield a `Holder` for each name in a module or class that leads to one of the objects."""
        yield from self._functions.values()
        ends = self._ends | self._between.keys()
        for owner, module in self._owners.values():
            values = owner if module else namespace(owner)
            for name in [name for name, value in list(values.items()) if id(value) in ends]:
                yield of_module(module, name) if module else of_class(owner, name)

    def nameless(self) -> Iterator[Holder]:
        """Yield a `Holder` for each function, generator, coroutine or other instance that was found
        to refer to one of the values, directly or through other objects.

        Containers, such as dicts and partials, are left out. Each `Holder` describes the object
        itself; `places` yields those of names.
        """
        for value in self._between.values():
            kind = type(value)
            if issubclass(kind, (types.FunctionType, *_RUNNING)):
                yield _of_object(value, _name_of(value))
            elif not issubclass(kind, _CONTAINERS):
                yield _of_object(value, f"an object of {path_of(kind)}")


def with_attribute(holder: Holder, function: Identities) -> Holder:
    """Return a copy of a holder whose label also names its attribute that leads to the function.
    A holder that is no object with such an attribute is returned unchanged.

    Args:
        holder: any holder; one with a name, or that is a container, is returned unchanged.
        function: the function alone.
    """
    owner = holder.owner()
    if holder.name or issubclass(type(owner), _CONTAINERS):
        return holder
    for name, value in list(namespace(owner).items()):
        if value in function or references(Holder("", _constant(value)), function):
            return holder._replace(label=f"attribute `{name}` of {holder.label}")
    return holder


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


def _owner_of(module: str, qualname: str) -> Any:
    """Return the module or class that has the last part of `qualname` as an attribute, or None."""
    try:
        return find_owner(sys.modules[module], qualname)
    except (AttributeError, KeyError):
        return None


def _name_of(value: Any) -> str:
    """Return `module.qualname` of a function or generator. One without globals has its source file
    in place of the module.
    """
    code: Any = value.__code__ if type(value) is types.FunctionType else _code_of(value)
    name = getattr(code, "co_qualname", value.__qualname__)
    module = (
        value.__globals__.get("__name__") if hasattr(value, "__globals__") else code.co_filename
    )
    return f"{module}.{name}"


def _of_object(value: Any, label: str) -> Holder:
    try:
        return Holder(label, weakref.ref(value))
    except TypeError:  # it has slots, and to remember it would keep it alive
        return Holder(label, lambda: value, lasts=False)


def everywhere(functions: Identities) -> Iterator[Holder]:
    """Yield a `Holder` for each attribute of a module or class whose value is one of the functions,
    or an object that may refer to one. The modules are the imported ones that may use Megatron.

    Args:
        functions: the functions. All attributes that have one as their value are yielded; for
            another object only the first attribute found is.
    """
    looked_at: set[int] = set()
    for module, module_object in modules():
        owners: list[tuple[Any, str]] = (
            [] if id(namespace(module_object)) in looked_at else [(module_object, module)]
        )
        looked_at.add(id(namespace(module_object)))
        for owner, module_name in owners:  # it grows while it is read
            for name, value in list(namespace(owner).items()):
                if value not in functions:
                    if not _may_lead_on(value) or id(value) in looked_at:
                        continue
                    looked_at.add(id(value))
                if issubclass(type(value), type):
                    owners.append((value, ""))
                else:
                    yield of_module(module_name, name) if module_name else of_class(owner, name)


def _may_lead_on(value: Any) -> bool:
    """Tell if a value may refer to functions: a class, a table, a function with a closure etc."""
    kind, function = type(value), unbound(value)
    if type(function) is types.FunctionType:
        extras = function.__closure__ or function.__defaults__ or function.__kwdefaults__
        return bool(extras) or hasattr(function, "__wrapped__")
    for table in _TABLES:
        if issubclass(kind, table):
            return bool(table.__len__(value) <= _LARGE)
    return issubclass(kind, (type, *_CONTAINERS)) and not issubclass(kind, types.BuiltinMethodType)
