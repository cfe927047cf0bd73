"""Imports a framework's module alone, for unit tests where its requirements are not installed."""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from unittest.mock import MagicMock


class _Names(type):
    def __getattr__(cls, name):
        return _stand_in(name)


def _stand_in(name):
    if name.startswith("__"):
        raise AttributeError(name)
    # A capitalised name may be a base class, or be part of an annotation.
    return _Names(name, (), {}) if name[0].isupper() else MagicMock(name=name)


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
