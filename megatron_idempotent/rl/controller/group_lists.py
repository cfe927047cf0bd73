"""Keeps the complete groups, and those being generated, in the orders that samplers ask for."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from .protocol import Generating, Held

# Sorted lists: a search is O(log n), and moving the pointers after a place takes 20 µs at 100,000
# complete groups, far more than any buffer holds. A run's length does not matter.
Key = Callable[[Held], int]


def _arrival(held: Held) -> int:
    return held.arrival


def _id(held: Held) -> int:
    return held.id


def _insert(order: list[Held], held: Held, key: Key) -> None:
    bisect.insort(order, held, key=key)


def _remove(order: list[Held], held: Held, key: Key) -> None:
    place = bisect.bisect_left(order, key(held), key=key)
    assert order[place] is held, f"group {held.id} is not where its order has it"
    del order[place]


def _age(group: Generating) -> tuple[int, int]:
    return group.version, group.started


class GeneratingGroups:
    """Keeps groups that are being generated, by start and by version. Only the buffer changes it.

    Example: `[each.id for each in groups.before(3)]`.
    """

    def __init__(self) -> None:
        self._by_start: dict[int, Generating] = {}
        self._by_age: list[Generating] = []
        self._started = 0

    def __iter__(self) -> Iterator[Generating]:
        """Yields groups in the order in which they were started."""
        return iter(self._by_start.values())

    def __contains__(self, group: object) -> bool:
        """Returns whether a group is being generated that equals this record in all fields."""
        return isinstance(group, Generating) and self._by_start.get(group.id) == group

    def __len__(self) -> int:
        return len(self._by_start)

    def before(self, version: int) -> Iterator[Generating]:
        """Yields groups whose weights are older than `version`, the oldest first."""
        return itertools.takewhile(lambda each: each.version < version, self._by_age)

    def add(self, group_id: int, version: int) -> None:
        """Add a group that starts now, with weights of `version`."""
        self._insert(Generating(id=group_id, started=self._started, version=version))
        self._started += 1

    def renew(self, group_id: int, version: int) -> None:
        """Change a group's version; it keeps its place in the order of starts."""
        old = self._by_start[group_id]
        if old.version != version:
            self._discard_age(old)
            self._insert(dataclasses.replace(old, version=version))

    def discard(self, group_id: int) -> None:
        """Remove a group that is not being generated any more."""
        self._discard_age(self._by_start.pop(group_id))

    def _insert(self, group: Generating) -> None:
        self._by_start[group.id] = group
        bisect.insort(self._by_age, group, key=_age)

    def _discard_age(self, group: Generating) -> None:
        del self._by_age[bisect.bisect_left(self._by_age, _age(group), key=_age)]


class ReadyGroups:
    """Keeps complete groups by arrival, by version and by id; it implements `protocol.Ready`.

    An iterator is valid until the buffer changes: take what you need of it before.
    Example: `[held.id for held in buffer.ready.of_version(3)]`.
    """

    def __init__(self, unfinished: Sequence[int], generating: GeneratingGroups) -> None:
        """Take the buffer's ascending list of unfinished ids, and its groups being generated.

        Both are read, and never changed here.
        """
        self._unfinished = unfinished
        self._generating = generating
        self._by_arrival: list[Held] = []
        self._by_id: list[Held] = []
        self._of_version: dict[int, list[Held]] = {}
        self._versions: list[int] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Held]:
        """Yields groups in order of arrival."""
        return iter(self._by_arrival)

    def __contains__(self, held: object) -> bool:
        """Returns whether a complete group equals this record in all fields."""
        if not isinstance(held, Held):
            return False
        place = bisect.bisect_left(self._by_id, held.id, key=_id)
        return self._by_id[place : place + 1] == [held]

    def versions(self) -> Sequence[int]:
        """Returns the versions that complete groups have, each once, ascending."""
        return tuple(self._versions)

    def of_version(self, version: int) -> Iterator[Held]:
        """Yields a version's groups in order of arrival."""
        return iter(self._of_version.get(version, ()))

    def by_id(self) -> Iterator[Held]:
        """Yields groups by id, ascending."""
        return iter(self._by_id)

    @property
    def lowest_unfinished(self) -> int | None:
        """The smallest id that has no result yet; None if there is none.

        Its group is being generated, was rolled back, or is owed since a resume.
        """
        return self._unfinished[0] if self._unfinished else None

    def generating(self) -> Iterator[Generating]:
        """Yields the groups that are being generated, in the order in which they were started."""
        return iter(self._generating)

    def generating_before(self, version: int) -> Iterator[Generating]:
        """Yields groups being generated from weights older than `version`, the oldest first."""
        return self._generating.before(version)

    def add(self, held: Held) -> None:
        """Add a complete group. Only the buffer calls it."""
        _insert(self._by_arrival, held, _arrival)
        _insert(self._by_id, held, _id)
        if held.version not in self._of_version:
            self._of_version[held.version] = []
            bisect.insort(self._versions, held.version)
        _insert(self._of_version[held.version], held, _arrival)

    def discard(self, held: Held) -> None:
        """Remove a complete group, which must be there. Only the buffer calls it."""
        _remove(self._by_arrival, held, _arrival)
        _remove(self._by_id, held, _id)
        _remove(self._of_version[held.version], held, _arrival)
        if not self._of_version[held.version]:
            del self._of_version[held.version]
            del self._versions[bisect.bisect_left(self._versions, held.version)]
