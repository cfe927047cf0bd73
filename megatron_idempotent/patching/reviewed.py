"""Reads `reviewed.txt`, which lists the bodies of upstream's functions that a person has read.

It is one file for all patches, so that a new release of Megatron touches this file and no case
file. A line names a function, and the lines below it the hashes of its bodies with their releases.
A body that was read is known to every patch that wraps the function; a part belongs to one patch.
"""

from __future__ import annotations

import os

from .base import NOTHING

TYPE_CHECKING = False  # importing typing would cost what the index saves
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any


FILE = os.path.join(os.path.dirname(__file__), "reviewed.txt")
_PART = "part"


class Reviewed:
    """Holds the contents of `reviewed.txt`.

    Example:
        Reviewed(["m:f", "  0123456789ab 0.12.0 to 0.13.1"]).bodies["m:f"]
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self.bodies: dict[str, dict[str, str]] = {}
        """Address of a function → hash of a body → its releases, oldest first."""
        self.parts: dict[tuple[str, str], dict[str, str]] = {}
        """Address and patch → hash of a part → its releases."""
        address = ""
        for line in lines:
            if not line.startswith(" "):
                address = "" if line.startswith("#") else line.strip()
                continue
            name, _, label = line.strip().partition(" ")
            if name == _PART:
                name, patch_id, label = label.split(" ", 2)
                self.parts.setdefault((address, patch_id), {})[name] = label
            else:
                self.bodies.setdefault(address, {})[name] = label

    def lines(self) -> list[str]:
        """Returns the contents as lines of the file, functions in alphabetical order."""
        found = [*_HEAD]
        for address in sorted({*self.bodies, *(address for address, _ in self.parts)}):
            found.append(address)
            found += [f"  {name} {label}" for name, label in self.bodies.get(address, {}).items()]
            found += [
                f"  {_PART} {name} {patch_id} {label}"
                for (where, patch_id), known in sorted(self.parts.items())
                if where == address
                for name, label in known.items()
            ]
        return found


_HEAD = (
    "# Bodies of upstream's functions that a person has read: the hash of the code, and the",
    "# releases or commits that have it. A part is what one patch relies on in a body. Written by",
    "# `megatron-idempotent drift PATH --accept ID`.",
)
_known: list[Reviewed] = []


def reviewed() -> Reviewed:
    """Return the file that this package has, read once."""
    if not _known:
        # Not open(): the package may be in a zip file.
        loader: Any = __spec__.loader
        _known.append(Reviewed(loader.get_data(FILE).decode("ascii").splitlines()))
    return _known[0]


def bodies_of(address: str) -> Mapping[str, str]:
    """Returns hash of a body → its releases, for a function of upstream."""
    return reviewed().bodies.get(address, NOTHING)


def parts_of(address: str, patch_id: str) -> Mapping[str, str]:
    """Returns hash of a part → its releases, for one patch's part of a function of upstream."""
    return reviewed().parts.get((address, patch_id), NOTHING)
