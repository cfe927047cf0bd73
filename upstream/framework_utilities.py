"""Imports a framework's module alone, for unit tests where its requirements are not installed."""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType
from unittest.mock import DEFAULT, MagicMock


class _Names(type):
    def __getattr__(cls, name):
        return _stand_in(name)

    def __getitem__(cls, item):
        return cls


class _Thing(metaclass=_Names):
    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        return _stand_in(name)


def _stand_in(name):
    if name.startswith("__"):
        raise AttributeError(name)
    # A capitalised name may be a base class, or be part of an annotation.
    if name[0].isupper():
        return _Names(name, (_Thing,), {})
    stand_in = MagicMock(name=name, side_effect=_decorated)
    stand_in.return_value.side_effect = _decorated
    return stand_in


def _decorated(*args, **kwargs):
    # A stand-in may be a decorator, or make one: then it returns the function.
    is_definition = len(args) == 1 and isinstance(args[0], FunctionType)
    return args[0] if is_definition and args[0].__name__ != "<lambda>" else DEFAULT


class _StandIn(ModuleType):
    def __getattr__(self, name):
        value = _stand_in(name)
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages, real):
        self.packages, self.real = packages, real

    def find_spec(self, fullname, path=None, target=None):
        if fullname in self.real or not any(
            fullname == package or fullname.startswith(f"{package}.") for package in self.packages
        ):
            return None
        spec = ModuleSpec(fullname, self, is_package=True)
        file_spec = PathFinder.find_spec(fullname, path)
        if file_spec is not None and file_spec.submodule_search_locations:
            spec.submodule_search_locations = list(file_spec.submodule_search_locations)
        return spec

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


def import_alone(module, *absent, real=()):
    """Import a module, with stand-ins for the rest of its package and for packages in `absent`.

    Modules of the package in `real` are imported as they are.
    """
    package = ".".join(module.split(".")[: 2 if module.startswith("megatron.") else 1])
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            del sys.modules[name]
    finder = _Finder((package, *absent), {module, *real})
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)


class Off:
    """Object that has every attribute; those that were not passed to it are None."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None
