"""Groups as they become complete, of whatever weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megatron_idempotent.controller.protocol import Ready
from megatron_idempotent.controller.records import Admission, Held

# More than any buffer holds: its capacity is the only bound.
_ALL = 2**31


class FirstReadySampler:
    """Trains groups in the order in which they became complete, and never evicts one.

    Staleness has no bound but what follows from capacity: a slow group keeps its place, and may be
    any number of versions old when it is complete. Example: `FirstReadySampler()`.
    """

    name = "first_ready"
    max_staleness = None
    drains = False

    def required_capacity(self, groups_per_step: int) -> int:
        """The groups of one step."""
        return groups_per_step

    def room(self, admission: Admission) -> int:
        """No bound of its own."""
        del admission
        return _ALL

    def select(self, ready: Ready, *, version: int, count: int) -> Sequence[Held]:
        """The first `count` by arrival."""
        del version
        return list(itertools.islice(ready, count))

    def evict(self, ready: Ready, *, version: int) -> Sequence[Held]:
        """None."""
        del ready, version
        return ()
