"""The ledger of live functions that carry our wrappers.

One `Site` per patched function. The object installed there is one plain function that never
changes while any patch is on: `deepcopy`, `pickle`, `cloudpickle` and Dynamo treat it as they treat
upstream's, and twice applied is once applied by identity. The patches on it are layers behind that
function, so that they can be added and taken away in any order.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .record import Target


class Conflict(Exception):
    """Somebody else's object sits where upstream's function should be."""


@dataclass(slots=True)
class Site:
    """A function of Megatron with our layers around it."""

    target: Target
    owner: Any
    """The module or class that holds the function."""
    raw: Any
    """What stood in the owner's `__dict__`: a function, staticmethod or classmethod; or `_ABSENT`
    where a class inherited it."""
    original: Callable[..., Any]
    installed: Any = None
    layers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    rebound: list[str] = field(default_factory=list)
    """Modules that had bound the function by name before us and now hold ours."""
    call: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return self.target.qualname.rpartition(".")[2]

    @property
    def in_place(self) -> bool:
        """Whether upstream's module, as `sys.modules` has it, still leads to our function."""
        module = sys.modules.get(self.target.module)
        if module is None or _owner(module, self.target.qualname) is not self.owner:
            return False
        value = vars(self.owner).get(self.name)
        while value is not None and value is not self.installed:
            value = getattr(value, "__wrapped__", None)  # someone may have wrapped ours politely
        return value is not None

    def add(self, patch_id: str, wrapper: Callable[..., Any]) -> None:
        """Put a patch's wrapper around the function."""
        self.layers[patch_id] = wrapper
        self._compose()

    def remove(self, patch_id: str) -> None:
        """Take a patch's wrapper off. The function stays until the last one is gone."""
        if self.layers.pop(patch_id, None) is not None:
            self._compose()

    def _compose(self) -> None:
        call = self.original
        # By id, so that the order does not depend on the order of imports or of calls.
        for _, wrapper in sorted(self.layers.items(), reverse=True):
            # update_wrapper, so that a wrapper sees upstream's signature on what it is given.
            call = functools.update_wrapper(functools.partial(wrapper, call), self.original)
        self.call = call

    def uninstall(self) -> bool:
        """Put upstream's function back; False where someone has wrapped ours in the meantime.

        In that case ours stays below theirs as an inert layer that only passes calls on.
        """
        for module in self.rebound:
            namespace = vars(sys.modules[module]) if module in sys.modules else {}
            for name, value in list(namespace.items()):
                if value is self.installed:
                    namespace[name] = self.original
        self.rebound.clear()
        if vars(self.owner).get(self.name) is not self.installed:
            return not self.in_place
        if self.raw is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.raw)
        return True


_ABSENT: Any = object()


def open_site(target: Target, decorators: int) -> Site:
    """A site for the live function, with nothing installed yet.

    Args:
        decorators: how many decorators upstream's source puts on it.

    Raises:
        Conflict: what stands there was not defined by upstream's module.
        AttributeError: nothing stands there.
    """
    module = sys.modules[target.module]
    owner = _owner(module, target.qualname)
    name = target.qualname.rpartition(".")[2]
    raw = vars(owner).get(name, _ABSENT)
    if raw is _ABSENT and not isinstance(owner, type):
        raise AttributeError(f"{target.module} has no {target.qualname}")
    value = getattr(owner, name) if raw is _ABSENT else raw
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    foreign = None if raw is _ABSENT else _foreign(function, module, decorators)
    if foreign is not None:
        raise Conflict(f"{target.address} is {foreign}")
    return Site(target=target, owner=owner, raw=raw, original=function)


def install(site: Site, prefixes: Iterable[str]) -> list[str]:
    """Put our function at the site and where it was bound early; returns those left alone.

    Args:
        prefixes: top-level packages whose early-bound names are rebound.
    """
    original = site.original

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        call = site.call
        return (original if call is None else call)(*args, **kwargs)

    site.installed = type(site.raw)(patched) if _is_bound_kind(site.raw) else patched
    setattr(site.owner, site.name, site.installed)
    return _rebind(site, frozenset(prefixes)) if isinstance(site.owner, types.ModuleType) else []


def _is_bound_kind(raw: Any) -> bool:
    return isinstance(raw, (staticmethod, classmethod))


def _rebind(site: Site, prefixes: frozenset[str]) -> list[str]:
    left = []
    for module_name, module in list(sys.modules.items()):
        # vars(), not hasattr(): asking a lazy module for a name would import it.
        if not isinstance(module, types.ModuleType) or module is site.owner:
            continue
        namespace = vars(module)
        names = [name for name, value in list(namespace.items()) if value is site.original]
        if not names:
            continue
        if module_name.partition(".")[0] in prefixes:
            for name in names:
                namespace[name] = site.installed
            site.rebound.append(module_name)
        else:
            left += [f"{module_name}.{name}" for name in names]
    return left


def _owner(module: types.ModuleType, qualname: str) -> Any:
    owner: Any = module
    for part in qualname.split(".")[:-1]:
        owner = vars(owner).get(part)
        if owner is None:
            raise AttributeError(f"{module.__name__} has no {qualname}")
    return owner


def _foreign(function: Any, module: types.ModuleType, decorators: int) -> str | None:
    # A function keeps the globals of the module that compiled it, whatever functools.wraps copied
    # onto it. Only as many layers are looked through as upstream itself put there.
    for _ in range(decorators):
        function = getattr(function, "__wrapped__", function)
    if type(function) is not types.FunctionType:  # isinstance() believes what a proxy says it is
        kind = type(function)
        return f"a {kind.__module__}.{kind.__qualname__}, not upstream's function"
    if function.__globals__ is vars(module):
        return None
    code = function.__code__
    return f"{function.__qualname__} from {code.co_filename}:{code.co_firstlineno}"
