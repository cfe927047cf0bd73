"""Describes all patches without their code, out of one generated file.

`patches/_generated/index.txt` has a line per hazard, because reading ninety case files takes longer
than all else that `apply()` does.
"""

from __future__ import annotations

import os

from .base import Record

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from typing import Any


MEGATRON = "megatron-core"

OLDEST = "0.12"
"""The value of `since` where all supported releases have the hazard."""

OPEN = "1000"
"""A value of `before` if statements alone decide: nobody reads each release of a framework."""

UNTRIED = "999"
"""A value of `before` if upstream has not repaired the hazard: the first release not yet run, which
`untried()` names. From there on bodies alone decide."""

PACKAGE, FRAMEWORKS = "megatron_idempotent.patches", "frameworks"
"""The package of the case files, and the one in it of those about frameworks."""

INDEX, _GENERATED = "index.txt", "_generated"

ON, OFF, DEBUG, NO_PATCH, NOTHING = "on", "off", "debug", "-", "-"
"""Words of the index: a patch's switch, no patch, and no provision."""
_untried: list[str] = []


class Place(Record):
    """Holds the address of a function of Megatron or of a framework."""

    address: str
    """`module:qualname`, with a colon because an attribute can shadow a submodule of that name."""

    @property
    def module(self) -> str:
        """The module part of the address."""
        return self.address.partition(":")[0]

    @property
    def qualname(self) -> str:
        """The part of the address after the colon."""
        return self.address.partition(":")[2]


class Outline(Record):
    """Describes a `Patch` without its code; the fields are those of `Patch`."""

    id: str
    distribution: str
    since: str
    before: str
    default: bool
    debug: bool
    provides: tuple[str, ...]
    targets: tuple[Place, ...]

    @property
    def versions(self) -> str:
        """The range of affected releases as a version specifier."""
        return specifier(self.since, self.before)


def specifier(since: str, before: str) -> str:
    """Return a range of releases as a version specifier."""
    if before == OPEN:
        return f">={since}"
    return f">={since},<{untried() if before == UNTRIED else before}"


def untried() -> str:
    """Return the first release that nobody has run, such as `0.20`, as the index says."""
    if not _untried:
        _untried.append(generated(INDEX)[0].rpartition(" ")[2])
    return _untried[0]


def read_index(lines: list[str]) -> tuple[list[str], dict[str, Outline]]:
    """Return the ids of all hazards, and the outlines of patches by id, both in order of id."""
    ids, outlines = [], {}
    for line in lines[1:]:
        name, switch, *rest = line.split(" ")
        ids.append(name)
        if switch == NO_PATCH:
            continue
        distribution, since, before, provides, *addresses = rest
        outlines[name] = Outline(
            id=name,
            distribution=distribution,
            since=since,
            before=before,
            default=switch == ON,
            debug=switch == DEBUG,
            provides=() if provides == NOTHING else tuple(provides.split(",")),
            targets=tuple([Place(address=address) for address in addresses]),
        )
    return ids, outlines


def generated(name: str) -> list[str]:
    """Return the lines of a file in `patches/_generated/`, without the head that says so."""
    # Not open(): the package may be in a zip file.
    package: Any = __import__(PACKAGE, fromlist=["__spec__"])
    path = os.path.join(generated_folder(), name)
    text = package.__spec__.loader.get_data(path).decode("utf-8")
    return [line for line in text.splitlines() if line[:1] != "#"]


def generated_folder() -> str:
    """Return the path of `patches/_generated/`, as it is installed here."""
    return os.path.join(folders()[PACKAGE], _GENERATED)


def folders() -> dict[str, str]:
    """Return the folders of the case files by package."""
    folder: str = __import__(PACKAGE, fromlist=["__path__"]).__path__[0]
    return {PACKAGE: folder, f"{PACKAGE}.{FRAMEWORKS}": os.path.join(folder, FRAMEWORKS)}
