"""Tells which packages have wrapped or replaced a function, and which functions a wrapper calls.

Liger, MindSpeed, Primus and others patch Megatron, too. A wrapper can reach the function that it
wraps through its closure, an argument's default, a global that it names, or an attribute. Its
`__wrapped__` is no evidence, because replacements set that as well.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .import_hooks import namespace
from .releases import package_of

#: The most objects to search for one function: a wrapper's closure may hold a whole model.
_MOST = 256
#: A larger one is data.
_LARGE = 64
_OWNERS = (type, types.ModuleType)
_SHELLS = (staticmethod, classmethod, types.MethodType)
_OURS = package_of(__name__)
#: Part of a module's name → the name by which its users know the package.
_KNOWN_AS = {
    "torch._dynamo": "torch.compile",
    "megatron_idempotent.proof.cpu.runtime": "torch.compile",  # which it replaces on CPU ranks
}


def layers(
    value: Any, is_sought: Callable[[Any], bool]
) -> tuple[list[Callable[..., Any]], Callable[..., Any]] | None:
    """Search from `value`, through wrappers, for a function for which `is_sought` is true.
    Return (the wrappers passed on the way, the function), or None if there is no such function.

    The function is the first one found. The wrappers come outermost first; there is none if `value`
    is the function.
    """
    waiting: list[tuple[Any, list[Any]]] = [(value, [])]
    passed_ids: set[int] = set()
    for layer, above in waiting:  # it grows while it is read
        if is_sought(layer):
            return above, layer
        if id(layer) in passed_ids or len(passed_ids) == _MOST:
            continue
        passed_ids.add(id(layer))
        layers_here = above if issubclass(type(layer), _SHELLS) else [*above, layer]
        through, named_callables = _below(layer)
        for inner in named_callables:
            if is_sought(inner):
                return layers_here, inner
        waiting += [(inner, layers_here) for inner in through]
    return None


def _below(value: Any) -> tuple[list[Any], list[Any]]:
    """Return the callables that a wrapper refers to, and the callables that its code names.
    A wrapper refers to callables in its closure, defaults or attributes; its code names globals and
    attributes of classes.
    """
    kind = type(value)
    if issubclass(kind, _SHELLS):
        return [value.__func__], []
    if issubclass(kind, functools.partial):
        return [value.func, *_callables([*value.args, *value.keywords.values()])], []
    if kind is not types.FunctionType:
        proxied = [value.__wrapped__] if hasattr(kind, "__wrapped__") else []
        return [*proxied, *_callables(list(namespace(value).values()))], []
    cells = []
    for cell in value.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not filled yet
            continue
    holdings = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    global_names = set(mentioned(value.__code__))
    global_values = [value.__globals__[name] for name in global_names if name in value.__globals__]
    attributes = [
        namespace(holding)[name]
        for holding in [*global_values, *cells]
        if issubclass(type(holding), _OWNERS)
        for name in global_names & namespace(holding).keys()
    ]
    named_callables = list(_callables([*global_values, *attributes]))
    below = list(_callables(holdings))
    wrapped = value.__dict__.get("__wrapped__")
    below += [holding for holding in named_callables if holding is wrapped]
    return below, named_callables


def _callables(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the callables among `values` and in them.
    A value that is no callable is searched: the items of a dictionary, list or tuple, the
    attributes of any other object.
    """
    # Not isinstance(), which reads a lazy proxy's `__class__` and so loads it.
    for value in values:
        kind = type(value)
        if issubclass(kind, _OWNERS):
            continue
        if callable(value) or issubclass(kind, _SHELLS):
            yield value
        elif issubclass(kind, dict):
            yield from _functions(value.values() if len(value) <= _LARGE else ())
        elif issubclass(kind, (list, tuple)):
            yield from _functions(value if len(value) <= _LARGE else ())
        else:
            yield from _functions(namespace(value).values())


def _functions(values: Iterable[Any]) -> Iterator[Any]:
    for value in list(values):
        if callable(value) and not issubclass(type(value), _OWNERS):
            yield value


def mentioned(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that code uses, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from mentioned(constant)


def who(layers: Iterable[Any]) -> list[str]:
    """Return the names of the packages that the wrappers' code is from, outermost first, each name
    once.
    """
    return list(dict.fromkeys(map(_package, layers)))


def _package(layer: Any) -> str:
    # Not `__module__`, which `functools.wraps` takes over from the function below.
    kind = type(layer)
    if issubclass(kind, functools.partial):
        package = _package(layer.func)
        # A partial around our function is another package's, which it does not tell.
        return "functools" if package == _OURS else package
    function = layer._self_wrapper if hasattr(kind, "_self_wrapper") else layer  # wrapt's
    of_it = type(function) is types.FunctionType
    module = str(function.__globals__.get("__name__") if of_it else type(function).__module__)
    package_names = (name for part, name in _KNOWN_AS.items() if module.startswith(part))
    return next(package_names, None) or package_of(module)
