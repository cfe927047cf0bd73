"""Tell a release from a development commit: by its contents, not by the version that it says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from . import versions
from .decide import MEGATRON, check_bodies, in_range
from .record import Patch


class Contents(NamedTuple):
    """The functions of the installed Megatron that patches wrap."""

    version: str
    """The version that it claims."""
    functions: int
    """The number of the release's functions that it has."""
    others: int
    """The number whose body is not that release's."""


def contents(patches: Iterable[Patch]) -> Contents | None:
    """Compare what is installed with the release that it says it is.

    Returns:
        None where no Megatron is installed.
    """
    version = versions.installed(MEGATRON)
    if version is None:
        return None
    its_own: dict[str, bool] = {}
    for patch in patches:
        if patch.distribution != MEGATRON or not in_range(patch, version):
            continue
        bodies = check_bodies(patch, named=False).bodies
        for target in patch.targets:
            # Where people read parts of a function, its bodies are too many to know each.
            if target.address in bodies and not target.relies_on:
                label = target.reviewed.get(bodies[target.address].hash, "")
                own = its_own.get(target.address, False)
                its_own[target.address] = own or _holds(label, version)
    return Contents(version.text, len(its_own), sum(not own for own in its_own.values()))


def _holds(label: str, version: versions.Installed) -> bool:
    """Tell if a release is one of a body's, which are written like `0.12.0 to 0.15.3`."""
    first, _, last = label.partition(" to ")
    since, until = versions.numbers(first), versions.numbers(last or first)
    # A later patch release of a line has what the last one that was read has.
    return () < since <= version.release and version.release[:2] <= until[:2]
