"""The complete groups of a buffer, in the orders in which samplers look at them."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence

from .records import Held

# Sorted lists: a search is O(log n), and moving the pointers behind a place takes 20 µs at 100,000
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


class ReadyGroups:
    """Complete groups by arrival, by version and by id; a `protocol.Ready`.

    Its iterators are those of the moment: take what is needed of one before the buffer changes.
    Example: `[held.id for held in buffer.ready.of_version(3)]`.
    """

    def __init__(self, unfinished: Sequence[int]) -> None:
        """`unfinished` is the buffer's own list of ids, ascending; it is read, never changed."""
        self._unfinished = unfinished
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
        """Returns whether exactly this record is among them."""
        if not isinstance(held, Held):
            return False
        place = bisect.bisect_left(self._by_id, held.id, key=_id)
        return self._by_id[place : place + 1] == [held]

    def versions(self) -> Sequence[int]:
        """Versions that there are groups of, ascending."""
        return tuple(self._versions)

    def of_version(self, version: int) -> Iterator[Held]:
        """Yields a version's groups in order of arrival."""
        return iter(self._of_version.get(version, ()))

    def by_id(self) -> Iterator[Held]:
        """Yields groups by id, ascending."""
        return iter(self._by_id)

    @property
    def lowest_unfinished(self) -> int | None:
        """The smallest id that is still being generated, or waits to be asked for again after a
        resume; None where none is."""
        return self._unfinished[0] if self._unfinished else None

    def add(self, held: Held) -> None:
        """Changes the list; only the buffer calls it."""
        _insert(self._by_arrival, held, _arrival)
        _insert(self._by_id, held, _id)
        if held.version not in self._of_version:
            self._of_version[held.version] = []
            bisect.insort(self._versions, held.version)
        _insert(self._of_version[held.version], held, _arrival)

    def discard(self, held: Held) -> None:
        """Changes the list; only the buffer calls it."""
        _remove(self._by_arrival, held, _arrival)
        _remove(self._by_id, held, _id)
        _remove(self._of_version[held.version], held, _arrival)
        if not self._of_version[held.version]:
            del self._of_version[held.version]
            del self._versions[bisect.bisect_left(self._versions, held.version)]
