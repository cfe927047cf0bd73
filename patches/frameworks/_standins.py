"""Imports a framework's module without the rest of the framework, for reproductions.

The functions of the module are the framework's own; the rest of its package, and packages that are
not installed (a server, a tokenizer, a logger), are stand-ins. So reproductions run on machines
that lack a framework's requirements, such as CUDA. `apply()` does not use this module.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def import_alone(module: str, *absent: str) -> Any:
    """Import and return `module` of a framework; stand-ins replace the rest of its package.

    Call it in a process that ends soon after, such as a rank: the stand-ins stay.

    Args:
        module: the module's full name, such as `slime.backends.megatron_utils.model`.
        absent: other packages to stand in for, if they are not installed.
    """
    imported = sys.modules.get(module)
    if isinstance(imported, _Standin):  # another module imported it before
        del sys.modules[module]
    elif imported is not None:
        return imported
    # megatron itself is a namespace that several distributions share.
    depth = 2 if module.startswith("megatron.") else 1
    package = ".".join(module.split(".")[:depth])
    missing = tuple(name for name in absent if find_spec(name) is None)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.real.add(module)
    _finder.packages.update((package, *missing))
    return importlib.import_module(module)


def import_all(
    package: str, names: Sequence[str], *absent: str, skip_missing: bool = False
) -> dict[str, Any]:
    """Import several modules of a framework in this order, each as `import_alone` does.

    Args:
        package: the package that holds the modules, such as `slime.backends`.
        names: the modules' names inside of it, such as `megatron_utils.model`.
        absent: other packages to stand in for, if they are not installed.
        skip_missing: True to skip modules that this release lacks; the first one must exist.

    Returns:
        Name → module.
    """
    modules: dict[str, Any] = {}
    for name in names:
        module = f"{package}.{name}"
        if not (skip_missing and modules) or _is_there(module):
            modules[name] = import_alone(module, *absent)
    return modules


def call(function: Callable[..., Any], **offered: Any) -> Any:
    """Call a framework's function with those of the `offered` arguments for which it has parameters
    in this release.
    """
    parameters = inspect.signature(function).parameters
    return function(**{name: value for name, value in offered.items() if name in parameters})


def _is_there(module: str) -> bool:
    """Return whether a framework's module has a file, without importing the module.
    Another module of its package must have been imported before.
    """
    parent = importlib.import_module(module.rpartition(".")[0])
    return PathFinder.find_spec(module, parent.__path__) is not None


def replace(*packages: str) -> None:
    """Let later imports of these packages return stand-ins, even if the packages are installed."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.packages.update(packages)
    for name in list(sys.modules):
        if any(_is_in(name, package) for package in packages):
            del sys.modules[name]


@contextlib.contextmanager
def replaced(*packages: str) -> Iterator[None]:
    """Let imports of these packages return stand-ins in the block, even if they are installed."""
    loaded, packages_before = dict(sys.modules), set(_finder.packages)
    replace(*packages)
    try:
        yield
    finally:
        _finder.packages = packages_before
        for name in list(sys.modules):
            if any(_is_in(name, package) for package in packages):
                del sys.modules[name]
        for name, module in loaded.items():
            sys.modules.setdefault(name, module)


class _Finder(MetaPathFinder):
    """Import finder that returns stand-ins for modules in `packages` unless they are in `real`."""

    def __init__(self) -> None:
        self.real: set[str] = set()
        self.packages: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in self.real or not any(_is_in(fullname, name) for name in self.packages):
            return None
        spec = ModuleSpec(fullname, _Empty(), is_package=True)
        file_spec = PathFinder.find_spec(fullname, path)
        if file_spec is not None:  # a module inside of it may be, or become, real
            spec.submodule_search_locations = list(file_spec.submodule_search_locations or ())
            spec.origin, spec.has_location = file_spec.origin, file_spec.has_location
        return spec


_finder = _Finder()


def _is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


class _Empty(Loader):
    """Import loader that creates a module whose attributes are all stand-ins."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Standin(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because a stand-in has no code."""


class _Names(type):
    def __getattr__(cls, name: str) -> Any:
        return _standin_for(cls, name)


class Thing(metaclass=_Names):
    """Stand-in class: its constructor takes any arguments, and it has every public attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return _standin_for(self, name)

    def __class_getitem__(cls, item: Any) -> Any:
        """Return the class itself, because annotations may subscript it."""
        return cls


class Off:
    """Object with any attribute: those given to the constructor have values, others are None."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Standin(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _standin_for(self, name)


def _standin_for(owner: Any, name: str) -> Any:
    # A capitalised name may be used as a base class or in an annotation.
    if name.startswith("__"):
        raise AttributeError(name)
    from unittest.mock import MagicMock

    standin = _Names(name, (Thing,), {}) if name[0].isupper() else MagicMock(name=name)
    setattr(owner, name, standin)
    return standin
