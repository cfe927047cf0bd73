"""Finds live code that goes past our functions, and names it.

There are two kinds. A class overrides the patched method: itself, or through a mixin that comes
before. Python's order of resolution tells, and classes are few, so they are always looked at. Or
something holds upstream's function, and calls that: a second name, a table, a default argument, a
closure, a bound method, a `functools.partial`, what `torch.compile` has made of it.

Holders show in the function's reference count. We know each reference of our own, and remember the
places that held it when we last looked. While these account for the whole count, nobody else holds
it, and no module has to be looked at. Otherwise the garbage collector is asked who refers to it,
and who refers to these, up to names that a person can look for. A remembered place counts only
while it still holds the function, so that a place that lets go hides no other.

Some detours cannot be seen:

- A variable of a running function (before Python 3.11 of a generator, too) and a callback that C++
  code keeps are unknown to the garbage collector. They raise the count, so that each call looks
  again, but have no name, and neither has a table that only such a variable leads to.
- An attribute of an object that stands before its class's method refers to nothing of upstream's.
- A method that asks any object for the name counts as one that calls the next.
- A `__wrapped__` tells of no call: replacements wear it, too.
- If a package has wrapped a function before us, what else it holds counts as part of its wrapper.
- `gc.freeze()` hides containers: after it, only modules, their classes, and the functions and
  tables in these are looked through.
- What takes the function while we count is found by the next call.
"""

from __future__ import annotations

import collections
import gc
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from .holders import (
    MOST,
    WORN,
    Climb,
    Holder,
    References,
    everywhere,
    of_class,
    of_module,
    path_of,
    references,
    with_attribute,
)
from .import_hooks import namespace
from .neighbours import mentioned
from .patch_points import ABSENT, PatchPoint, unbound

#: Attributes of a site: the function, the static method around it, and what others have wrapped.
_ATTRIBUTES = ("original", "raw", "innermost")
#: So many places of one function are listed.
_LISTED = 8
#: Containers that are opened below one of all names in the process.
_FEW = 32
#: Python itself freezes some hundred objects when it starts.
_FROZEN = 5_000


def detours(sites: Iterable[PatchPoint]) -> dict[str, list[str]]:
    """Return by address of a site what live code reaches past our function, each as a clause.

    Args:
        sites: all sites of this process: those without patches hold functions, too.
    """
    family = list({id(member): member for site in sites for member in site.family()}.values())
    our_ids = {id(value) for site in family for value in (site.installed, site.function)}
    installed = [site for site in sites if site.is_installed]
    clauses = {site.target.address: list(_overriding(site, our_ids)) for site in installed}
    originals = _originals(installed, our_ids)
    own_references = collections.Counter(id(value) for site in family for value in site.held())
    for original in originals:
        original.look(own_references[original.id])
    originals_elsewhere = [original for original in originals if original.is_held_by_others]
    if originals_elsewhere:
        _search(originals_elsewhere, {id(value) for site in family for value in site.containers()})
    for original in originals:
        for site in original.sites:
            clauses[site.target.address] += original.clauses
    return {address: texts for address, texts in clauses.items() if texts}


def _overriding(site: PatchPoint, our_ids: Collection[int]) -> Iterator[str]:
    """Yield a clause for each class whose method objects get in place of ours."""
    overriding: set[type] = set()
    for heir in _heirs(site.owner):
        classes: tuple[type, ...] = heir.__mro__
        for cls in classes:
            raw = namespace(cls).get(site.name, ABSENT)
            method = unbound(raw)
            if cls is site.owner or id(method) in our_ids:
                break
            if raw is ABSENT or _asks(method, site.name):
                continue
            # A second name of upstream's own function is a reference to it, and told as such.
            if method is not site.original and cls not in overriding:
                overriding.add(cls)
                order = "" if cls is heir else f", which comes before it in {path_of(heir)},"
                yield f"{path_of(cls)}{order} overrides it"
            break


def _heirs(owner: Any) -> Iterator[type]:
    """Yield the classes below a class, each once; nothing for a module."""
    classes: list[type] = [owner] if isinstance(owner, type) else []
    yielded_ids = set(map(id, classes))
    for cls in classes:  # it grows while it is read
        heirs: list[type] = type.__subclasses__(cls)
        below = [heir for heir in heirs if id(heir) not in yielded_ids]
        yielded_ids.update(map(id, below))
        classes += below
        yield from below


def _asks(function: Any, name: str) -> bool:
    """Tell if a function, or one below its decorators, asks some object for that name."""
    for _ in range(64):
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType) and name in mentioned(code):
            return True
        function = getattr(function, "__wrapped__", None)
        if function is None:
            break
    return False


class _Original:
    """Compares the reference count of one function of upstream's with the holders that we know.

    Args:
        site: a site that has replaced the function.
        attribute: the site's attribute that holds it, one of `_ATTRIBUTES`.
    """

    def __init__(self, site: PatchPoint, attribute: str) -> None:
        self.sites = [site]
        self._attribute = attribute
        self.labels: list[str] = []
        self._entitled: References = {}
        self._known: References = {}
        self._total = self._own = 0

    @property
    def value(self) -> Any:
        """The function, or the `staticmethod` or `classmethod` with it."""
        return getattr(self.sites[0], self._attribute)

    @property
    def id(self) -> int:
        """The function's id."""
        return id(self.value)

    @property
    def clauses(self) -> list[str]:
        """Clauses about the places that hold it, for people."""
        more = len(self.labels) - _LISTED
        texts = [f"{label} holds upstream's" for label in sorted(self.labels)[:_LISTED]]
        return [*texts, *([f"{more} other places hold upstream's"] if more > 0 else ())]

    @property
    def is_held_by_others(self) -> bool:
        """True if not all references are accounted for."""
        return self._total != self._own + sum(self._known.values())

    def count(self) -> int:
        """Return the number of references to the function."""
        return sys.getrefcount(getattr(self.sites[0], self._attribute)) - _TEMPORARY

    def look(self, own_references: int) -> None:
        """Count the references, then look which of the remembered places still have one.

        Args:
            own_references: the number of references that sites have.
        """
        # In this order: a place that lets go in between is missed, and what took it is looked for.
        self._total, self._own = self.count(), own_references
        for site in self.sites:
            for holder in _entitled(site, self._attribute):
                self._entitled |= self._at(holder)
        self._known = dict(self._entitled)
        self._remembered[:] = [h for h in self._remembered if self.add(h, self._at(h))]

    def _at(self, holder: Holder) -> References:
        return references(holder, {self.id}).get(self.id, {})

    @property
    def _remembered(self) -> list[Holder]:
        holders: list[Holder] = self.sites[0].holders.setdefault(self._attribute, [])
        return holders

    def add(self, holder: Holder, counts: References) -> bool:
        """Account for the references that a place has, and tell it; return False if it has none.

        A table with two names is told by both. An object that nobody can look for by its name is
        told only for references that no other place has. A `__wrapped__` tells nothing: what takes
        the place of a function wears it, and calls nothing below.
        """
        accounted = self._entitled if holder.name else self._known
        has_more = not counts.keys() <= accounted.keys()
        self._known |= counts
        calls = has_more and any(name != WORN for _, name in counts)
        if calls and holder.label not in self.labels and not self._is_neighbour(holder):
            self.labels.append(holder.label)
        return has_more

    def _is_neighbour(self, holder: Holder) -> bool:
        """Tell if a place belongs to a package that wrapped the function before us."""
        if self._attribute != "innermost":
            return False
        packages = {package for site in self.sites for package in site.inside}
        return any(f" {package}." in f" {holder.label}" for package in packages)

    def remember(self, holder: Holder) -> None:
        """Look at this place first, the next time."""
        if holder.lasts:
            other_holders = [
                remembered for remembered in self._remembered if not holder.is_at(remembered)
            ]
            self._remembered[:] = [*other_holders, holder]


class _Alone:
    """Holds a function that nobody else holds."""

    def __init__(self) -> None:
        self.original = lambda: None


_TEMPORARY = 0
#: The references that counting makes: how many depends on the version of Python.
_TEMPORARY = _Original(_Alone(), "original").count() - 1  # type: ignore[arg-type]


def _originals(sites: Iterable[PatchPoint], our_ids: Collection[int]) -> list[_Original]:
    """Return the functions that these sites have replaced, each once."""
    originals: dict[int, _Original] = {}
    for site in sites:
        for attribute in _ATTRIBUTES:
            value = getattr(site, attribute)
            key = id(value)
            if value is None or value is ABSENT or (attribute == "raw" and value is site.original):
                continue
            if key in originals:
                originals[key].sites.append(site)
            elif key not in our_ids:  # else it is another site's, which stands around upstream's
                originals[key] = _Original(site, attribute)
    return list(originals.values())


def _entitled(site: PatchPoint, attribute: str) -> Iterator[Holder]:
    """Yield places besides sites that hold upstream's function, and are no detour or told of."""
    if site.raw is ABSENT:
        yield from (of_class(cls, site.name) for cls in site.owner.__mro__[1:])
    if attribute == "innermost":
        yield Holder("a neighbour's wrapper", lambda: site.original)
    for name in site.bound_before:
        yield of_module(*name.rpartition(".")[::2])


def _search(originals: Sequence[_Original], container_ids: set[int]) -> None:
    """Look who holds these functions, and remember that.

    Args:
        originals: functions that others hold.
        ours: ids of the containers of ours that do.
    """
    climb = Climb([original.value for original in originals], container_ids)
    _add(originals, climb.places(), climb.passed, MOST)
    unexplained = [original for original in originals if original.is_held_by_others]
    _add(unexplained, climb.nameless(), climb.passed, MOST)
    if gc.get_freeze_count() > _FROZEN:
        unexplained = [original for original in unexplained if original.is_held_by_others]
        if unexplained:
            _add(unexplained, everywhere({original.id for original in unexplained}), None, _FEW)


def _add(
    originals: Iterable[_Original],
    holders: Iterable[Holder],
    within: Collection[int] | None,
    most: int,
) -> None:
    by_id = {original.id: original for original in originals}
    for holder in holders:
        for key, counts in references(holder, by_id.keys(), within, most).items():
            labelled = with_attribute(holder, key)
            if by_id[key].add(labelled, counts):
                by_id[key].remember(labelled)
