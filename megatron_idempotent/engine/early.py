"""Names under which other modules hold a function of Megatron since before `apply()`.

All modules of a process are some 300,000 names, so that one look serves all sites of an `apply()`.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING

from .finding import namespace

if TYPE_CHECKING:
    from .sites import Site

#: Do not import Megatron, and hold half of all names.
_NEVER = frozenset({"torch"}) | sys.stdlib_module_names


class EarlyNames:
    """What has to be bound anew, collected until `rebind()` does it."""

    def __init__(self) -> None:
        self._sites: list[Site] = []

    def follow(self, site: Site) -> None:
        """Let `rebind()` make every name of the site's function lead to what the site has now."""
        self._sites.append(site)

    def rebind(self) -> None:
        """Look through all modules; afterwards each site's `left` names what was not its to change.

        To be called behind all assignments to the sites: a module that another thread imports in
        between gets our functions by itself, or is seen here.
        """
        if not self._sites:
            return
        sites = {}
        for site in self._sites:
            site.left = []
            sites[id(site.original)] = sites[id(site.installed)] = site
        self._sites = []
        ids = frozenset(sites)
        for module_name, module in list(sys.modules.items()):
            # Not isinstance(): it believes what a proxy says it is, and asking wakes a lazy one.
            if not issubclass(type(module), types.ModuleType):
                continue
            if module_name.partition(".")[0] in _NEVER:
                continue
            if ids.isdisjoint(map(id, list(namespace(module).values()))):
                continue
            for name, held in list(namespace(module).items()):
                found = sites.get(id(held))
                if found is None or held is found.current:
                    continue
                if module is found.owner or found.may_change(module_name):
                    namespace(module)[name] = found.current
                elif held is found.original:
                    found.left.append(f"{module_name}.{name}")
