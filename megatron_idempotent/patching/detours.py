"""Finds live code that bypasses our functions, and names it.

There are two kinds. A class overrides the patched method, itself or through a mixin that precedes
it in the method resolution order; classes are few, so all of them are checked each time. Or an
object keeps a reference to upstream's function and calls it: a second name, a table, a default
argument, a closure, a bound method, a `functools.partial`, the result of `torch.compile`.

Each such holder adds to the function's reference count. We know our own references, and remember
the holders that the last search found. While these account for the whole count, no module has to
be searched. Otherwise we ask the garbage collector for the objects that refer to the function, for
those that refer to these, and so on, up to names that a person can search for. A remembered holder
counts only while it still has its reference, so that one that dropped it hides no new one.

Some detours are not found:

- A variable of a running function (before Python 3.11 of a generator, too) and a callback that C++
  code keeps are unknown to the garbage collector. They raise the count, so that each call looks
  again, but have no name, and neither has a table that only such a variable leads to.
- An instance attribute that shadows the patched method has no reference to upstream's function.
- A method that reads the attribute of that name from any object counts as one that calls `super()`.
- A `__wrapped__` attribute is no evidence of a call: replacements set it, too.
- If a package wrapped a function before us, its other references count as part of its wrapper.
- `gc.freeze()` hides containers: after it, only modules, their classes, and the functions and
  tables in these are searched.
- An object that gets its reference while we count is found by the next call.
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
from .patch_points import ABSENT, Identities, PatchPoint, unbound

#: Attributes of a patch point: the function, the object in its owner's `__dict__` (which may be a
#: staticmethod or classmethod), and the function that another package has wrapped.
_ATTRIBUTES = ("original", "raw", "innermost")
#: The most holders of one function that a report lists.
_LISTED = 8
#: The most containers that are searched below one name, if all names of the process are searched.
_FEW = 32
#: More frozen objects than this are a program's `gc.freeze()`: Python freezes some hundred itself.
_FROZEN = 5_000


def detours(sites: Iterable[PatchPoint]) -> dict[str, list[str]]:
    """Search this process for live code that bypasses the installed patches. Return, for the
    address of each bypassed function, texts that name such code, such as "my.tool.TABLE holds
    upstream's".

    Args:
        sites: all patch points of this process; those without patches refer to functions, too.
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
    """Yield a text for each class that overrides the patched method without calling it: a subclass
    of the patched class, or a class that precedes the patched class in the `__mro__` of such a
    subclass.
    """
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
            # A class attribute that is upstream's own function is reported as a reference to it.
            if method is not site.original and cls not in overriding:
                overriding.add(cls)
                order = "" if cls is heir else f", which comes before it in {path_of(heir)},"
                yield f"{path_of(cls)}{order} overrides it"
            break


def _heirs(owner: Any) -> Iterator[type]:
    """Yield all direct and indirect subclasses of a class, each once; none for a module."""
    classes: list[type] = [owner] if isinstance(owner, type) else []
    yielded_ids = set(map(id, classes))
    for cls in classes:  # it grows while it is read
        heirs: list[type] = type.__subclasses__(cls)
        below = [heir for heir in heirs if id(heir) not in yielded_ids]
        yielded_ids.update(map(id, below))
        classes += below
        yield from below


def _asks(function: Any, name: str) -> bool:
    """Tell if a function's code uses `name` as a global or as an attribute. If the function has a
    `__wrapped__`, the code of that function is searched too, and so on.
    """
    for _ in range(64):
        code = getattr(function, "__code__", None)
        if isinstance(code, types.CodeType) and name in mentioned(code):
            return True
        function = getattr(function, "__wrapped__", None)
        if function is None:
            break
    return False


class _Original:
    """Watches one upstream function that a patch has replaced for new references to it.
    It compares the function's reference count with the number of references that are known.

    Args:
        site: a patch point that has replaced the function.
        attribute: the site's attribute that refers to the function, one of `_ATTRIBUTES`.
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
        """Upstream's replaced function, or the `staticmethod` or `classmethod` around it."""
        return getattr(self.sites[0], self._attribute)

    @property
    def id(self) -> int:
        """The `id()` of the replaced function."""
        return id(self.value)

    @property
    def clauses(self) -> list[str]:
        """Texts for the report that name objects which still refer to upstream's function, such as
        "my.tool.TABLE holds upstream's".
        """
        more = len(self.labels) - _LISTED
        texts = [f"{label} holds upstream's" for label in sorted(self.labels)[:_LISTED]]
        return [*texts, *([f"{more} other places hold upstream's"] if more > 0 else ())]

    @property
    def is_held_by_others(self) -> bool:
        """True if the function has a reference that is neither ours nor a known holder's.
        A holder is a name or an object that refers to the function.
        """
        return self._total != self._own + sum(self._known.values())

    def count(self) -> int:
        """Return the present number of references to the function, as Python counts them."""
        return sys.getrefcount(getattr(self.sites[0], self._attribute)) - _TEMPORARY

    def look(self, own_references: int) -> None:
        """Count the references to the function, and forget remembered holders (names and objects
        that referred to the function) that no longer refer to it.

        Args:
            own_references: the number of references that patch points have.
        """
        # In this order: a reference that moves to another holder in between is searched for.
        self._total, self._own = self.count(), own_references
        for site in self.sites:
            for holder in _entitled(site, self._attribute):
                self._entitled |= self._at(holder)
        self._known = dict(self._entitled)
        self._remembered[:] = [h for h in self._remembered if self.add(h, self._at(h))]

    def _at(self, holder: Holder) -> References:
        return references(holder, Identities([self.value])).get(self.id, {})

    @property
    def _remembered(self) -> list[Holder]:
        holders: list[Holder] = self.sites[0].holders.setdefault(self._attribute, [])
        return holders

    def add(self, holder: Holder, counts: References) -> bool:
        """Count a holder's references to the function as known ones, and note the holder for the
        report. A holder is a name or an object. Return True if it has references that were not
        accounted for before.

        A table with two names is listed by both. An object without a name is listed only for
        references that no other holder has. A `__wrapped__` is not listed: a replacement has it
        too, and does not call the function.
        """
        accounted = self._entitled if holder.name else self._known
        has_more = not counts.keys() <= accounted.keys()
        self._known |= counts
        calls = has_more and any(name != WORN for _, name in counts)
        if calls and holder.label not in self.labels and not self._is_neighbour(holder):
            self.labels.append(holder.label)
        return has_more

    def _is_neighbour(self, holder: Holder) -> bool:
        """Tell if a holder (a name or object that refers to the function) belongs to a package that
        wrapped the function before us.
        """
        if self._attribute != "innermost":
            return False
        packages = {package for site in self.sites for package in site.inside}
        return any(f" {package}." in f" {holder.label}" for package in packages)

    def remember(self, holder: Holder) -> None:
        """Remember a holder (a name or object that refers to the function), so that the next `look`
        checks it without a search.
        """
        if holder.lasts:
            other_holders = [
                remembered for remembered in self._remembered if not holder.is_at(remembered)
            ]
            self._remembered[:] = [*other_holders, holder]


class _Alone:
    """Stands in for a patch point when counting is calibrated: only this object refers to its
    function, so any further reference that is counted was added by the counting itself.
    """

    def __init__(self) -> None:
        self.original = lambda: None


_TEMPORARY = 0
#: The number of references that counting itself adds, which depends on the version of Python.
_TEMPORARY = _Original(_Alone(), "original").count() - 1  # type: ignore[arg-type]


def _originals(sites: Iterable[PatchPoint], our_ids: Collection[int]) -> list[_Original]:
    """Return an `_Original` for each function of upstream that these patch points have replaced."""
    originals: dict[int, _Original] = {}
    for site in sites:
        for attribute in _ATTRIBUTES:
            value = getattr(site, attribute)
            key = id(value)
            if value is None or value is ABSENT or (attribute == "raw" and value is site.original):
                continue
            if key in originals:
                originals[key].sites.append(site)
            elif key not in our_ids:  # else it is the function of another patch point
                originals[key] = _Original(site, attribute)
    return list(originals.values())


def _entitled(site: PatchPoint, attribute: str) -> Iterator[Holder]:
    """Yield a `Holder` for each name or wrapper whose reference to upstream's function is no
    finding: it bypasses no patch, or the report shows it elsewhere.
    """
    if site.raw is ABSENT:
        yield from (of_class(cls, site.name) for cls in site.owner.__mro__[1:])
    if attribute == "innermost":
        yield Holder("a neighbour's wrapper", lambda: site.original)
    for name in site.bound_before:
        yield of_module(*name.rpartition(".")[::2])


def _search(originals: Sequence[_Original], container_ids: set[int]) -> None:
    """Search the process for objects that refer to these functions, and remember each such object
    in the function's `_Original`.

    Args:
        originals: functions with references that are not accounted for.
        container_ids: ids of this package's own objects that refer to the functions.
    """
    climb = Climb([original.value for original in originals], container_ids)
    _add(originals, climb.places(), climb.passed, MOST)
    unexplained = [original for original in originals if original.is_held_by_others]
    _add(unexplained, climb.nameless(), climb.passed, MOST)
    if gc.get_freeze_count() > _FROZEN:
        unexplained = [original for original in unexplained if original.is_held_by_others]
        if unexplained:
            _add(unexplained, everywhere(_functions_of(unexplained)), None, _FEW)


def _add(
    originals: Iterable[_Original],
    holders: Iterable[Holder],
    within: Collection[int] | None,
    most: int,
) -> None:
    by_id = {original.id: original for original in originals}
    functions = _functions_of(by_id.values())
    for holder in holders:
        for key, counts in references(holder, functions, within, most).items():
            original = by_id[key]
            labelled = with_attribute(holder, Identities([original.value]))
            if original.add(labelled, counts):
                original.remember(labelled)


def _functions_of(originals: Iterable[_Original]) -> Identities:
    return Identities([original.value for original in originals])
