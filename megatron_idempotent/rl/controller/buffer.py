"""Keeps the groups that a run holds, and counts those that have left.

    reserve -> generating -> commit -> ready -> lease -> leased -> trained
                    |                    |  <- give_back -  |
                 rollback               drop
                   drop

Every admitted group is generating, ready or leased, or is counted as trained, filtered or evicted;
it is never two of these, and always one. A group that is rolled back counts as never admitted.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from .protocol import ControllerError, Counts, Generating, Held

# Sorted lists: a search is O(log n), and moving the pointers after a place takes 20 µs at 100,000
# complete groups, far more than any buffer holds. A run's length does not matter.
_arrival, _id = operator.attrgetter("arrival"), operator.attrgetter("id")
_age = operator.attrgetter("version", "started")


class GeneratingGroups:
    """Keeps groups that are being generated, by start and by version. Only the buffer changes it.

    Example: `[each.id for each in groups.before(3)]`.
    """

    def __init__(self) -> None:
        self._by_start: dict[int, Generating] = {}
        self._by_age: list[Generating] = []
        self._started = 0

    def __iter__(self) -> Iterator[Generating]:
        """Yield groups in the order in which they were started."""
        return iter(self._by_start.values())

    def __contains__(self, group: object) -> bool:
        """Return whether a group is being generated that equals this record in all fields."""
        return isinstance(group, Generating) and self._by_start.get(group.id) == group

    def __len__(self) -> int:
        return len(self._by_start)

    def before(self, version: int) -> Iterator[Generating]:
        """Yield groups whose weights are older than `version`, the oldest first."""
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
        """Yield groups in order of arrival."""
        return iter(self._by_arrival)

    def __contains__(self, held: object) -> bool:
        """Return whether a complete group equals this record in all fields."""
        if not isinstance(held, Held):
            return False
        place = bisect.bisect_left(self._by_id, held.id, key=_id)
        return self._by_id[place : place + 1] == [held]

    def versions(self) -> Sequence[int]:
        """Return the versions that complete groups have, each once, ascending."""
        return tuple(self._versions)

    def of_version(self, version: int) -> Iterator[Held]:
        """Yield a version's groups in order of arrival."""
        return iter(self._of_version.get(version, ()))

    def by_id(self) -> Iterator[Held]:
        """Yield groups by id, ascending."""
        return iter(self._by_id)

    @property
    def lowest_unfinished(self) -> int | None:
        """The smallest id that has no result yet; None if there is none.

        Its group is being generated, was rolled back, or is owed since a resume.
        """
        return self._unfinished[0] if self._unfinished else None

    def generating(self) -> Iterator[Generating]:
        """Yield the groups that are being generated, in the order in which they were started."""
        return iter(self._generating)

    def generating_before(self, version: int) -> Iterator[Generating]:
        """Yield groups being generated from weights older than `version`, the oldest first."""
        return self._generating.before(version)

    def add(self, held: Held) -> None:
        """Add a complete group. Only the buffer calls it."""
        bisect.insort(self._by_arrival, held, key=_arrival)
        bisect.insort(self._by_id, held, key=_id)
        if held.version not in self._of_version:
            self._of_version[held.version] = []
            bisect.insort(self._versions, held.version)
        bisect.insort(self._of_version[held.version], held, key=_arrival)

    def discard(self, held: Held) -> None:
        """Remove a complete group, which must be there. Only the buffer calls it."""
        for order, key in (
            (self._by_arrival, _arrival),
            (self._by_id, _id),
            (self._of_version[held.version], _arrival),
        ):
            place = bisect.bisect_left(order, key(held), key=key)
            assert order[place] is held, f"group {held.id} is not where its order has it"
            del order[place]
        if not self._of_version[held.version]:
            del self._of_version[held.version]
            del self._versions[bisect.bisect_left(self._versions, held.version)]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SavedBuffer:
    """Holds what `GroupBuffer.state` wrote, once it is read and checked.

    Example: `read_state(json.loads(text)).unfinished`.
    """

    gone: Mapping[str, int]
    """The number of groups that have left, under `trained`, `filtered` and `evicted`."""
    aborted: int
    """The number of groups evicted while they were being generated; `gone` counts them too."""
    reasons: Mapping[str, int]
    """The number of dropped groups, by reason."""
    arrivals: int
    """The arrival number that the next complete group gets."""
    ready: tuple[Held, ...]
    """Complete groups in order of arrival."""
    unfinished: tuple[int, ...]
    """Ids of admitted groups that have no result yet, ascending."""


def read_state(state: Mapping[str, Any]) -> SavedBuffer:
    """Check what `GroupBuffer.state` wrote, and return it as a record.

    Errors: `ValueError` for a mapping that no buffer has written.
    """
    try:
        saved = SavedBuffer(
            gone={name: state["counts"][name] for name in ("trained", "filtered", "evicted")},
            aborted=state["counts"].get("aborted", 0),  # older checkpoints have none
            reasons=dict(state["reasons"]),
            arrivals=state["arrivals"],
            ready=tuple(Held(**each) for each in state["ready"]),
            unfinished=tuple(state["unfinished"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(f"{type(error).__name__}: {error}") from error
    numbers = (*saved.gone.values(), *saved.reasons.values(), *saved.unfinished)
    numbers += (saved.aborted, saved.arrivals)
    numbers += tuple(n for each in saved.ready for n in (each.id, each.arrival, each.version))
    for number in numbers:
        if type(number) is not int or number < 0:
            raise _unreadable(f"{number!r} is not a count, an id or a version from 0 on")
    _check_groups(saved)
    return saved


def _check_groups(saved: SavedBuffer) -> None:
    ids = [each.id for each in saved.ready]
    if len({*ids, *saved.unfinished}) != len(ids) + len(saved.unfinished):
        twice = [group_id for group_id, n in Counter([*ids, *saved.unfinished]).items() if n > 1]
        raise _unreadable(f"group {twice[0]} is in it twice")
    if list(saved.unfinished) != sorted(saved.unfinished):
        raise _unreadable(f"its unfinished groups {list(saved.unfinished)} are not ascending")
    arrivals = [each.arrival for each in saved.ready]
    if arrivals != sorted(set(arrivals)):
        raise _unreadable(f"its ready groups have arrivals {arrivals}, which are not ascending")
    if arrivals and arrivals[-1] >= saved.arrivals:
        raise _unreadable(f"arrival {arrivals[-1]} is not below the next one, {saved.arrivals}")


def _unreadable(fact: str) -> ValueError:
    return ValueError(f"no state of a buffer: {fact}; resume from a checkpoint that is whole")


State = Literal["generating", "ready", "leased"]

# Reasons are a few words of a recipe's. One that puts a number or an id into them must not grow
# the buffer, its metrics and its checkpoints with the length of the run.
MOST_REASONS = 64
OTHER_REASONS = "other"


class GroupStateError(ControllerError):
    """A group is not in the state that an operation needs; the buffer has not changed."""


class GroupBuffer:
    """Keeps the state of each group of a run, and has places for `capacity` generating or ready.

    Leased groups take no place. The event loop alone uses it, without locks or waiting. An
    operation either happens as a whole or raises and changes nothing; its cost depends on the
    groups held, not on those of the run so far.
    Errors of every operation: `GroupStateError`, which names the group and its state.
    Example: `buffer.reserve(7); buffer.commit(7, version=3); buffer.lease([7]);
    buffer.trained([7])`.
    """

    def __init__(self, capacity: int) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ValueError(f"capacity is {capacity!r}; allowed: 1 or more groups")
        self.capacity = capacity
        self._states: dict[int, State] = {}
        self._held: dict[int, Held] = {}
        self._unfinished: list[int] = []  # ascending
        self._generating = GeneratingGroups()
        self._ready = ReadyGroups(self._unfinished, self._generating)
        self._in_state: dict[State, int] = {"generating": 0, "ready": 0, "leased": 0}
        self._gone = {"trained": 0, "filtered": 0, "evicted": 0}
        self._reasons: dict[str, int] = {}
        self._aborted = 0
        self._submitted = 0
        self._arrivals = 0

    def reserve(self, group_id: int, *, version: int = 0) -> None:
        """Admit a group, which takes a place and is generated with weights of `version` from now.

        Errors: `GroupStateError` if no place is free, or the buffer holds a group of this id.
        """
        if group_id in self._states:
            raise GroupStateError(
                f"group {group_id} is {self._states[group_id]} already; reserve each group once"
            )
        if not self.free:
            raise GroupStateError(
                f"no place for group {group_id}: {self._waiting} groups are generating or ready, "
                f"and capacity is {self.capacity}; reserve no more than `free`"
            )
        self._states[group_id] = "generating"
        self._in_state["generating"] += 1
        self._generating.add(group_id, version)
        self._submitted += 1
        place = bisect.bisect_left(self._unfinished, group_id)
        if self._unfinished[place : place + 1] != [group_id]:  # else it was rolled back, or owed
            self._unfinished.insert(place, group_id)

    def renew(self, group_id: int, *, version: int) -> None:
        """Change the version of a group that is being generated.

        It is called when the group is generated again, or its tokens turn out to be of `version`.
        """
        self._need([group_id], "generating", to="renew it")
        self._generating.renew(group_id, version)

    def commit(self, group_id: int, *, version: int) -> Held:
        """Move a complete group from generating to ready; return its record for samplers.

        `version` is that of the oldest weights that drew any of its tokens.
        """
        self._need([group_id], "generating", to="commit it")
        held = Held(id=group_id, arrival=self._arrivals, version=version)
        self._arrivals += 1
        self._finished(group_id)
        self._move(group_id, "ready")
        self._held[group_id] = held
        self._ready.add(held)
        return held

    def rollback(self, group_id: int) -> None:
        """Undo a reservation: the group's place is free again, and `submitted` is one lower.

        The id stays among `unfinished_ids` until it is reserved again, in this run or after a
        resume: its prompt has not been answered.
        """
        self._need([group_id], "generating", to="roll it back")
        self._forget(group_id)
        self._submitted -= 1

    def drop(self, group_id: int, outcome: Literal["filtered", "evicted"], reason: str) -> None:
        """Remove a generating or ready group, free its place, and count it and the reason.

        A reason that is new once there are `MOST_REASONS` of them counts as `other`.
        """
        if outcome not in ("filtered", "evicted"):
            raise ValueError(f"outcome is {outcome!r}; allowed: filtered, evicted")
        state = self._states.get(group_id)
        if state not in ("generating", "ready"):
            raise self._wrong(group_id, "generating or ready", to="drop it")
        if state == "generating":
            self._finished(group_id)
        else:
            self._ready.discard(self._held[group_id])
        self._forget(group_id)
        self._gone[outcome] += 1
        self._aborted += state == "generating" and outcome == "evicted"
        if reason not in self._reasons and len(self._reasons) >= MOST_REASONS:
            reason = OTHER_REASONS
        self._reasons[reason] = self._reasons.get(reason, 0) + 1

    def lease(self, group_ids: Iterable[int]) -> None:
        """Move all of these groups from ready to leased, for the open step, or none of them."""
        for group_id in self._need(group_ids, "ready", to="lease it"):
            self._ready.discard(self._held[group_id])
            self._move(group_id, "leased")

    def give_back(self, group_ids: Iterable[int]) -> None:
        """Move groups of a step that was undone from leased to ready, with their old arrivals."""
        for group_id in self._need(group_ids, "leased", to="give it back"):
            self._move(group_id, "ready")
            self._ready.add(self._held[group_id])

    def trained(self, group_ids: Iterable[int]) -> None:
        """Remove the groups of a finished step, and count them as trained."""
        for group_id in self._need(group_ids, "leased", to="count it as trained"):
            self._forget(group_id)
            self._gone["trained"] += 1

    @property
    def counts(self) -> Counts:
        """The number of groups in each state, and of those that have left."""
        return Counts(
            submitted=self._submitted, **self._gone, aborted=self._aborted, **self._in_state
        )

    @property
    def reasons(self) -> Mapping[str, int]:
        """The number of dropped groups, by reason."""
        return dict(self._reasons)

    @property
    def generating(self) -> GeneratingGroups:
        """The groups that are being generated."""
        return self._generating

    @property
    def accepted(self) -> int:
        """The number of groups that were trained, are in the open step or are ready."""
        return self._gone["trained"] + self._in_state["leased"] + self._in_state["ready"]

    @property
    def free(self) -> int:
        """The number of groups that may still be reserved.

        A lease frees places. Groups that are given back may exceed the capacity; then it is 0.
        """
        return max(self.capacity - self._waiting, 0)

    @property
    def _waiting(self) -> int:
        return self._in_state["generating"] + self._in_state["ready"]

    @property
    def generating_ids(self) -> Sequence[int]:
        """The ids of groups that are being generated, ascending."""
        return tuple(each for each in self._unfinished if each in self._states)

    @property
    def unfinished_ids(self) -> Sequence[int]:
        """The ids of groups that are generating, rolled back, or owed since a resume; ascending."""
        return tuple(self._unfinished)

    @property
    def next_owed(self) -> int | None:
        """The lowest id that was rolled back or is owed since a resume; None if there is none."""
        if len(self._unfinished) == self._in_state["generating"]:
            return None
        return next(each for each in self._unfinished if each not in self._states)

    @property
    def ready(self) -> ReadyGroups:
        """The complete groups that no step has leased, for a sampler."""
        return self._ready

    def holds(self, group_id: int) -> bool:
        """Return whether a group is generating, ready or leased."""
        return group_id in self._states

    def state(self) -> dict[str, Any]:
        """Return the buffer's part of a checkpoint, ready for JSON; `restored` reads it.

        It lists leased groups as ready: a resumed run trains them again, from weights that have
        not seen them. It lists unfinished groups by id alone.
        """
        held = sorted(self._held.values(), key=lambda each: each.arrival)
        return {
            "counts": {**self._gone, "aborted": self._aborted},
            "reasons": dict(self._reasons),
            "arrivals": self._arrivals,
            "ready": [
                {"id": each.id, "arrival": each.arrival, "version": each.version} for each in held
            ],
            "unfinished": list(self._unfinished),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], capacity: int) -> GroupBuffer:
        """Make a buffer from what `state` returned.

        None of its unfinished groups is generating: `submitted` counts those that are ready,
        trained, filtered or evicted, and the controller reserves each of `unfinished_ids` again,
        the lowest first and before any new one. Until then `ready.lowest_unfinished` is theirs.
        Errors: `ValueError` for a state that no buffer has written.
        """
        saved = read_state(state)
        buffer = cls(capacity)
        buffer._gone.update(saved.gone)
        buffer._aborted = saved.aborted
        buffer._reasons.update(saved.reasons)
        buffer._arrivals = saved.arrivals
        buffer._unfinished.extend(saved.unfinished)
        for held in saved.ready:
            buffer._states[held.id] = "ready"
            buffer._held[held.id] = held
            buffer._ready.add(held)
        buffer._in_state["ready"] = len(saved.ready)
        buffer._submitted = len(saved.ready) + sum(saved.gone.values())
        return buffer

    def _need(self, group_ids: Iterable[int], state: State, *, to: str) -> list[int]:
        """Check that each group is in a state and is named once; return the ids as a list."""
        ids = list(group_ids)
        for group_id in ids:
            if self._states.get(group_id) != state:
                raise self._wrong(group_id, state, to=to)
        if len(set(ids)) != len(ids):
            double = next(each for place, each in enumerate(ids) if each in ids[:place])
            raise GroupStateError(f"group {double} ({state}) is named twice; name each once")
        return ids

    def _wrong(self, group_id: int, needed: str, *, to: str) -> GroupStateError:
        state = self._states.get(group_id)
        found = f"is {state}" if state else "is not in the buffer (not reserved, or gone already)"
        return GroupStateError(f"group {group_id} {found}, and has to be {needed} to {to}")

    def _move(self, group_id: int, state: State) -> None:
        self._in_state[self._states[group_id]] -= 1
        self._stopped(group_id)
        self._in_state[state] += 1
        self._states[group_id] = state

    def _forget(self, group_id: int) -> None:
        self._stopped(group_id)
        self._in_state[self._states.pop(group_id)] -= 1
        self._held.pop(group_id, None)

    def _stopped(self, group_id: int) -> None:
        if self._states[group_id] == "generating":
            self._generating.discard(group_id)

    def _finished(self, group_id: int) -> None:
        del self._unfinished[bisect.bisect_left(self._unfinished, group_id)]
