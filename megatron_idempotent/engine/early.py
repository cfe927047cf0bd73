"""Names under which other modules have held a function of Megatron since before `apply()`.

All modules of a process are some 300,000 names. So one look serves all functions of an `apply()`;
and modules in which nothing is rebound are looked through, for the report, only where reference
counts say that somebody beyond the others holds a function.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .finding import namespace

if TYPE_CHECKING:
    from .sites import Site

_Modules = list[tuple[str, types.ModuleType]]
#: Do not import Megatron, and hold half of all names.
_NEVER = frozenset({"torch"}) | sys.stdlib_module_names


class EarlyNames:
    """Collects the names to rebind until `rebind()` does it."""

    def __init__(self) -> None:
        self._sites: list[Site] = []

    def follow(self, site: Site) -> None:
        """Let `rebind()` make every name of the site's function lead to what the site has now."""
        self._sites.append(site)

    def rebind(self) -> None:
        """Look through modules; afterwards each site's `left` names what was not its to change.

        To be called after all assignments to the sites: a module that another thread imports in
        between gets our functions by itself, or is seen here.
        """
        sites, self._sites = self._sites, []
        if not sites:
            return
        found = dict.fromkeys(sites, 0)
        ours: _Modules = []
        others: _Modules = []
        owners = {id(site.owner) for site in sites}
        prefixes = tuple({prefix for site in sites for prefix in site.prefixes})
        for module_name, module in _modules():
            change = id(module) in owners or module_name.startswith(prefixes)
            (ours if change else others).append((module_name, module))
        for site in sites:
            site.left = []
        for site, module_name, module, name in _held(sites, ours):
            found[site] += 1
            if site.may_change(module_name, module):
                namespace(module)[name] = site.current
            else:
                site.left.append(f"{module_name}.{name}")
        hidden = [site for site, count in found.items() if site.is_held_by_more_than(count)]
        for site, module_name, _, name in _held(hidden, others):
            site.left.append(f"{module_name}.{name}")


def references(holder: dict[str, Any], name: str) -> int:
    """Counts the references to the value of `name`, apart from the one in `holder`."""
    return _references(holder, name) - _ALONE


def _references(holder: dict[str, Any], name: str) -> int:
    value = holder.get(name)
    return sys.getrefcount(value)


#: What is counted for a value that only `holder` has: the count differs between Python versions.
_ALONE = _references({"value": object()}, "value")


def _modules() -> Iterator[tuple[str, types.ModuleType]]:
    for name, module in list(sys.modules.items()):
        # Not isinstance(): it believes what a proxy says it is, and asking wakes a lazy one.
        if issubclass(type(module), types.ModuleType) and name.partition(".")[0] not in _NEVER:
            yield name, module


def _held(
    sites: list[Site], modules: _Modules
) -> Iterator[tuple[Site, str, types.ModuleType, str]]:
    """Yields the places at which modules hold a function that a site has replaced or put back."""
    by_id = {id(value): site for site in sites for value in (site.original, site.installed)}
    ids = frozenset(by_id)
    for module_name, module in modules if sites else ():
        if ids.isdisjoint(map(id, list(namespace(module).values()))):
            continue
        for name, held in list(namespace(module).items()):
            site = by_id.get(id(held))
            if site is not None and held is not site.current:
                yield site, module_name, module, name
