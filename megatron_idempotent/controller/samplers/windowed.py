"""Groups whose weights are at most so many versions old; what is older is thrown away."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from megatron_idempotent.controller.errors import SettingsError
from megatron_idempotent.controller.protocol import Ready
from megatron_idempotent.controller.records import Admission, Held

Order = Literal["freshest", "oldest"]
"""The smallest staleness first, and by arrival within it; or by arrival alone."""


def checked_window(name: str, value: object) -> int:
    """A number of versions. Errors: `SettingsError` for anything else."""
    if type(value) is not int or value < 0:
        raise SettingsError(f"{name} is {value!r}; allowed: 0 or more versions")
    return value


def room_within(window: int, admission: Admission) -> int:
    """Groups that may be started so that none needs to be older than `window` when it trains.

    (window + rollout_version + 1) x groups_per_step - accepted - running: an optimizer step uses
    groups_per_step groups and makes one version, so the group that is accepted last trains at
    version window + rollout_version at the latest. Never negative.
    """
    steps = window + admission.rollout_version + 1
    return max(0, steps * admission.groups_per_step - admission.accepted - admission.running)


class WindowedSampler:
    """Trains groups with 0 <= version - held.version <= max_staleness, and evicts older ones.

    Example: `WindowedSampler(max_staleness=2)`.
    """

    name = "windowed"
    drains = False

    def __init__(self, max_staleness: int, order: Order = "freshest") -> None:
        """Errors: `SettingsError` for a window below 0, or an unknown order."""
        self._window = checked_window("max_staleness", max_staleness)
        if order not in get_args(Order):
            raise SettingsError(f"order is {order!r}; allowed: {', '.join(get_args(Order))}")
        self._order = order

    @property
    def max_staleness(self) -> int:
        """Most versions between a group's weights and those it trains."""
        return self._window

    def required_capacity(self, groups_per_step: int) -> int:
        """A step's groups for each version of the window: all that `room` lets start at once. With
        fewer, down to those of one step, training would wait for generation within the window."""
        return groups_per_step * (self._window + 1)

    def room(self, admission: Admission) -> int:
        """Returns the number of groups that can train within the window; see `room_within`."""
        return room_within(self._window, admission)

    def select(self, ready: Ready, *, version: int, count: int) -> Sequence[Held]:
        """Up to `count` eligible groups, in the sampler's order. Looks at no other group."""
        eligible = [each for each in ready.versions() if 0 <= version - each <= self._window]
        groups: Iterator[Held]
        if self._order == "freshest":
            groups = itertools.chain.from_iterable(map(ready.of_version, reversed(eligible)))
        else:
            by_version = [ready.of_version(each) for each in eligible]
            groups = heapq.merge(*by_version, key=lambda held: held.arrival)
        return list(itertools.islice(groups, count))

    def evict(self, ready: Ready, *, version: int) -> Sequence[Held]:
        """All groups that are older than the window."""
        stale = itertools.takewhile(lambda each: version - each > self._window, ready.versions())
        return [held for each in stale for held in ready.of_version(each)]


class StrictSampler(WindowedSampler):
    """The on-policy sampler: trains only groups of the weights that are being trained."""

    name = "strict"

    def __init__(self) -> None:
        super().__init__(max_staleness=0)
