"""A buffer's state as a checkpoint has it, checked before anything is built from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .records import Held


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedBuffer:
    """A state of `GroupBuffer.state`. Example: `read_state(json.loads(text)).unfinished`."""

    gone: Mapping[str, int]
    """Groups that were trained, filtered and evicted."""
    reasons: Mapping[str, int]
    arrivals: int
    """The next arrival number."""
    ready: tuple[Held, ...]
    """Groups in order of arrival."""
    unfinished: tuple[int, ...]
    """Ascending."""


def read_state(state: Mapping[str, Any]) -> SavedBuffer:
    """Read a state. Errors: `ValueError` for one that no buffer has written."""
    try:
        saved = SavedBuffer(
            gone={name: state["counts"][name] for name in ("trained", "filtered", "evicted")},
            reasons=dict(state["reasons"]),
            arrivals=state["arrivals"],
            ready=tuple(Held(**each) for each in state["ready"]),
            unfinished=tuple(state["unfinished"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(f"{type(error).__name__}: {error}") from error
    numbers = (*saved.gone.values(), *saved.reasons.values(), saved.arrivals, *saved.unfinished)
    numbers += tuple(n for each in saved.ready for n in (each.id, each.arrival, each.version))
    for number in numbers:
        if type(number) is not int or number < 0:
            raise _unreadable(f"{number!r} is not a count, an id or a version")
    _check_groups(saved)
    return saved


def _check_groups(saved: SavedBuffer) -> None:
    ids = [each.id for each in saved.ready]
    if len({*ids, *saved.unfinished}) != len(ids) + len(saved.unfinished):
        raise _unreadable("a group is in it twice")
    if list(saved.unfinished) != sorted(saved.unfinished):
        raise _unreadable("its unfinished groups are not ascending")
    arrivals = [each.arrival for each in saved.ready]
    if arrivals != sorted(set(arrivals)):
        raise _unreadable("its ready groups are not in the order of their arrival")
    if arrivals and arrivals[-1] >= saved.arrivals:
        raise _unreadable(f"arrival {arrivals[-1]} is not below the next one, {saved.arrivals}")


def _unreadable(fact: str) -> ValueError:
    return ValueError(f"no state of a buffer: {fact}; resume from a checkpoint that is whole")
