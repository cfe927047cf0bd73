"""Groups in the order of their prompts: the same run twice trains the same groups in each step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron_idempotent.controller.protocol import Ready
from megatron_idempotent.controller.records import Admission, Held

from .windowed import checked_window, room_within


class InOrderSampler:
    """Trains groups by ascending id, each once every lower id is trained, filtered or in the step.

    Which groups a step trains, and which weights sampled them, is a function of the prompts and of
    what the recipe rejects, whatever the order in which engines finish. Two things make it so:
    groups are started by ascending id, and engines get new weights only once all groups for which
    there is room are complete (`drains`), a rejected one's successors included. No group is of two
    versions. The price is that engines wait for the slowest group of every version.

    No group exceeds `max_staleness`, so none is evicted. While engines serve version r, at most
    (lookahead + r + 1) x groups_per_step groups of the run are accepted, all of them with lower
    ids than those that are started later. A step takes groups_per_step of them in order and makes
    one version, so the last of them trains at version lookahead + r.
    Example: `InOrderSampler(lookahead=1)`.
    """

    name = "in_order"
    drains = True

    def __init__(self, lookahead: int) -> None:
        """`lookahead` counts the steps whose groups are generated ahead of the one that trains.

        Errors: `SettingsError` for one below 0.
        """
        self._lookahead = checked_window("lookahead", lookahead)

    @property
    def max_staleness(self) -> int:
        """The lookahead: a group trains at most so many versions after its own."""
        return self._lookahead

    def required_capacity(self, groups_per_step: int) -> int:
        """A step's groups for each version of the lookahead: all that `room` lets start at once."""
        return groups_per_step * (self._lookahead + 1)

    def room(self, admission: Admission) -> int:
        """Returns the number of groups that can train within the lookahead."""
        return room_within(self._lookahead, admission)

    def select(self, ready: Ready, *, version: int, count: int) -> Sequence[Held]:
        """The lowest ids below the lowest that is unfinished, up to `count`."""
        del version
        limit = ready.lowest_unfinished
        first = itertools.islice(ready.by_id(), count)
        return list(itertools.takewhile(lambda held: limit is None or held.id < limit, first))

    def evict(self, ready: Ready, *, version: int) -> Sequence[Held]:
        """None: a group that is left out would leave out another one in another run."""
        del ready, version
        return ()
