"""Tracks the state of every group of a run, and counts the groups that are done.

    reserve -> generating -> commit -> ready -> lease -> leased -> trained
                    |                    |  <- give_back -  |
                 rollback               drop
                   drop

Every admitted group is in exactly one state: generating, ready or leased, or counted as trained,
filtered or evicted. A group that is rolled back counts as never admitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from .protocol import ControllerError, Counts, Generating, Held


class GroupStateError(ControllerError):
    """A group of a `GroupBuffer` is in the wrong state for an operation; the buffer is
    unchanged.
    """


class ReadyGroups:
    """Shows a sampler the groups of a buffer: iterates over the ready ones, and lists the
    generating ones. It implements `protocol.Ready`.

    An iterator is valid only until the buffer changes.
    Example: `[held.id for held in buffer.ready if held.version == 3]`.
    """

    def __init__(
        self, ready: Mapping[int, Held], generating: Mapping[int, Generating], owed: set[int]
    ) -> None:
        """Take the buffer's ready groups in order of arrival, its generating groups in order of
        start, and the ids of groups that must be generated again (`owed`).
        """
        self._ready, self._generating, self._owed = ready, generating, owed

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[Held]:
        """Yield the ready groups in order of arrival."""
        return iter(self._ready.values())

    def __contains__(self, group: object) -> bool:
        """Return True if the buffer has exactly this record: a `Held` among the ready groups, or a
        `Generating` among the generating groups.
        """
        if isinstance(group, Held):
            return self._ready.get(group.id) == group
        return isinstance(group, Generating) and self._generating.get(group.id) == group

    @property
    def lowest_unfinished(self) -> int | None:
        """The smallest id of a group that is being generated or must be generated again; None if
        there is none.
        """
        return min((*self._generating, *self._owed), default=None)

    def generating(self) -> Iterator[Generating]:
        """Yield the groups that are being generated, in the order in which they were started."""
        return iter(self._generating.values())


class GroupBuffer:
    """Tracks each group's state: generating, ready, or leased to an optimizer step. There is room
    for `capacity` groups that are generating or ready.

    Leased groups do not count towards the capacity. Only the event loop uses a buffer, without
    locks. An operation either completes or raises and changes nothing; its cost depends on the
    current groups, not on the length of the run.

    Raises:
        GroupStateError: by every operation, for a group in the wrong state.

    Example: `buffer.reserve(7); buffer.commit(7, version=3); buffer.lease([7]);
    buffer.trained([7])`.
    """

    def __init__(self, capacity: int) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ValueError(f"capacity is {capacity!r}; allowed: 1 or more groups")
        self.capacity = capacity
        self._generating: dict[int, Generating] = {}  # in the order of starts
        self._ready: dict[int, Held] = {}  # in the order of arrivals
        self._leased: dict[int, Held] = {}
        self._owed: set[int] = set()
        self._gone = {"trained": 0, "filtered": 0, "evicted": 0, "aborted": 0}
        self._submitted = self._started = self._arrivals = 0
        self.ready = ReadyGroups(self._ready, self._generating, self._owed)
        """The complete groups that no step has leased, for a sampler."""

    def reserve(self, group_id: int, *, version: int = 0) -> None:
        """Add the group `group_id` as generating, so that it takes one of the buffer's `capacity`
        places. `version` is the version of the weights that generate the group.

        Raises:
            GroupStateError: the buffer is full, or has a group of this id.
        """
        if state := self._state(group_id):
            raise GroupStateError(f"group {group_id} is {state} already; reserve each group once")
        if not self.free:
            raise GroupStateError(
                f"no place for group {group_id}: {len(self._generating) + len(self._ready)} groups "
                f"are generating or ready, and capacity is {self.capacity}; reserve no more than "
                "`free`"
            )
        self._generating[group_id] = Generating(id=group_id, started=self._started, version=version)
        self._owed.discard(group_id)
        self._started += 1
        self._submitted += 1

    def renew(self, group_id: int, *, version: int) -> None:
        """Change the weight version that is recorded for a group that is being generated.

        The caller does so when it generates the group again, or when the tokens' version is known.
        """
        self._need([group_id], self._generating, "generating", to="renew it")
        old = self._generating[group_id]
        self._generating[group_id] = dataclasses.replace(old, version=version)

    def commit(self, group_id: int, *, version: int) -> Held:
        """Move a complete group from generating to ready; return the group's record (`Held`), from
        which samplers decide.

        `version` is the oldest version of weights that sampled any of its tokens.
        """
        self._need([group_id], self._generating, "generating", to="commit it")
        del self._generating[group_id]
        group = Held(id=group_id, arrival=self._arrivals, version=version)
        self._ready[group_id] = group
        self._arrivals += 1
        return group

    def rollback(self, group_id: int) -> None:
        """Undo the `reserve` of a generating group, which must then be generated again: free the
        group's place, and lower `submitted` by one.

        The id stays in `unfinished_ids` until it is reserved again, in this run or after a resume,
        because its prompt still has no response.
        """
        self._need([group_id], self._generating, "generating", to="roll it back")
        del self._generating[group_id]
        self._owed.add(group_id)
        self._submitted -= 1

    def drop(self, group_id: int, outcome: Literal["filtered", "evicted"]) -> None:
        """Remove a generating or ready group, and count it as "filtered" or "evicted"
        (`outcome`).
        """
        if outcome not in ("filtered", "evicted"):
            raise ValueError(f"outcome is {outcome!r}; allowed: filtered, evicted")
        running = self._generating.pop(group_id, None)
        if running is None and self._ready.pop(group_id, None) is None:
            raise self._wrong(group_id, "generating or ready", to="drop it")
        self._gone[outcome] += 1
        self._gone["aborted"] += running is not None and outcome == "evicted"

    def lease(self, group_ids: Iterable[int]) -> None:
        """Move groups from ready to leased, for the open optimizer step: all of them, or on an
        error none.
        """
        for group_id in self._need(group_ids, self._ready, "ready", to="lease it"):
            self._leased[group_id] = self._ready.pop(group_id)

    def give_back(self, group_ids: Iterable[int]) -> None:
        """Move the groups of an undone optimizer step from leased back to ready, and sort the ready
        groups by arrival.
        """
        for group_id in self._need(group_ids, self._leased, "leased", to="give it back"):
            self._ready[group_id] = self._leased.pop(group_id)
        ordered = sorted(self._ready.values(), key=lambda group: group.arrival)
        self._ready.clear()
        self._ready.update({group.id: group for group in ordered})

    def trained(self, group_ids: Iterable[int]) -> None:
        """Remove the groups of a finished optimizer step, and count them as trained."""
        for group_id in self._need(group_ids, self._leased, "leased", to="count it as trained"):
            del self._leased[group_id]
            self._gone["trained"] += 1

    @property
    def counts(self) -> Counts:
        """The number of groups in each state, including trained, filtered and evicted ones."""
        return Counts(
            submitted=self._submitted,
            generating=len(self._generating),
            ready=len(self._ready),
            leased=len(self._leased),
            **self._gone,
        )

    @property
    def accepted(self) -> int:
        """The number of groups that are trained, leased or ready."""
        return self._gone["trained"] + len(self._leased) + len(self._ready)

    @property
    def free(self) -> int:
        """The number of groups that may still be added: `capacity` minus the number of groups that
        are generating or ready, but at least 0.

        A lease frees room. Groups that are given back may exceed the capacity.
        """
        return max(self.capacity - len(self._generating) - len(self._ready), 0)

    @property
    def generating_ids(self) -> Sequence[int]:
        """The ids of groups that are being generated, ascending."""
        return sorted(self._generating)

    @property
    def unfinished_ids(self) -> Sequence[int]:
        """The ids of groups that are being generated or must be generated again, ascending: the
        latter were rolled back, or were unfinished in the checkpoint of a resumed run.
        """
        return sorted((*self._generating, *self._owed))

    @property
    def next_owed(self) -> int | None:
        """The lowest id of a group that must be generated again, because it was rolled back or was
        unfinished in the checkpoint; None if there is none.
        """
        return min(self._owed, default=None)

    def holds(self, group_id: int) -> bool:
        """Return True if the buffer has the group: generating, ready or leased."""
        return self._state(group_id) is not None

    def state(self) -> dict[str, Any]:
        """Return the buffer's state for a checkpoint, as JSON values; `restored` reads it.

        Leased groups are listed as ready: a resumed run trains them again, starting from weights
        that were not trained on them. Of unfinished groups, only the ids are listed.
        """
        groups = sorted(
            (*self._ready.values(), *self._leased.values()), key=lambda group: group.arrival
        )
        return {
            "counts": dict(self._gone),
            "arrivals": self._arrivals,
            "ready": [dataclasses.asdict(group) for group in groups],
            "unfinished": self.unfinished_ids,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], capacity: int) -> GroupBuffer:
        """Make a buffer from the state that `state` returned, in a run that resumes from a
        checkpoint.

        None of its unfinished groups is generating: the controller reserves all of
        `unfinished_ids` again, the lowest first, before any new group. `submitted` counts ready,
        trained, filtered and evicted groups.

        Raises:
            ValueError: no buffer can have written this state.
        """
        buffer = cls(capacity)
        try:
            buffer._gone = {name: state["counts"][name] for name in buffer._gone}
            buffer._arrivals = state["arrivals"]
            buffer._ready.update({fields["id"]: Held(**fields) for fields in state["ready"]})
            buffer._owed.update(state["unfinished"])
            written = buffer.state()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"no state of a buffer: {type(error).__name__}: {error}; resume from a checkpoint "
                "that is complete"
            ) from error
        for part, value in written.items():
            if state[part] != value:  # it has duplicates, or another order
                raise ValueError(
                    f"no state of a buffer: its {part} is {state[part]}, and would be {value}; "
                    "resume from a complete checkpoint"
                )
        counted_out = (
            sum(buffer._gone.values()) - buffer._gone["aborted"]
        )  # `evicted` includes `aborted`
        buffer._submitted = len(buffer._ready) + counted_out
        return buffer

    def _state(self, group_id: int) -> str | None:
        states: dict[str, Mapping[int, Any]] = {
            "generating": self._generating,
            "ready": self._ready,
            "leased": self._leased,
        }
        return next((state for state, groups in states.items() if group_id in groups), None)

    def _need(
        self, group_ids: Iterable[int], groups: Mapping[int, Any], state: str, *, to: str
    ) -> list[int]:
        """Return `group_ids` as a list, if they are distinct and all in `groups`, the buffer's
        groups in the state `state`. Otherwise raise `GroupStateError`, whose message says what the
        caller wanted (`to`).
        """
        ids = list(group_ids)
        for group_id in ids:
            if group_id not in groups:
                raise self._wrong(group_id, state, to=to)
        if len(set(ids)) != len(ids):
            double = max(ids, key=ids.count)
            raise GroupStateError(f"group {double} ({state}) is named twice; name each once")
        return ids

    def _wrong(self, group_id: int, needed: str, *, to: str) -> GroupStateError:
        state = self._state(group_id)
        fact = f"is {state}" if state else "is not in the buffer (not reserved, or gone already)"
        return GroupStateError(f"group {group_id} {fact}, and has to be {needed} to {to}")
