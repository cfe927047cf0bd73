"""Draws the sizes of a check's steps from a seed, the same on all ranks.

What each run has to have is dealt out, and only its order and the rest are drawn: whatever the
seed, a step has a call of nine microbatches and one of one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

#: The most calls of a step, and microbatches of a call.
CALLS, MICROBATCHES = 7, 9
Each = TypeVar("Each")


class Draw:
    """Draws from a seed and the names of what is drawn for.

    Example: `Draw(7, "dp2", "drawn-sizes").shuffled([1, 2, 3])`.
    """

    def __init__(self, seed: int, *names: str) -> None:
        """Take a seed, and what else tells one sequence of draws from another."""
        self._random = random.Random(" ".join((str(seed), *names)))

    def number(self, least: int, most: int) -> int:
        """Return a whole number from `least` to `most`."""
        return self._random.randint(least, most)

    def share(self, least: float, most: float) -> float:
        """Return a number between the two."""
        return self._random.uniform(least, most)

    def shuffled(self, values: Sequence[Each]) -> list[Each]:
        """Return the values in any order."""
        return self._random.sample(list(values), len(values))

    def dealt(self, values: Sequence[Each], number: int) -> list[Each]:
        """Return so many of the values, each as often as any other, give or take one."""
        found: list[Each] = []
        while len(found) < number:
            found += self.shuffled(values)
        return found[:number]

    def sizes(self, calls: int, multiple: int = 1, *, most: int = MICROBATCHES) -> list[int]:
        """Return the microbatches of each call, odd and even, in any order.

        Of CALLS calls one has one, and one has MICROBATCHES. All are a multiple of `multiple`, as
        an interleaved schedule takes them.
        """
        found = [self.number(1, most if calls < 3 else min(most, 3)) for _ in range(calls)]
        if calls == CALLS:
            found[:4] = 1, MICROBATCHES, 2, self.number(1, 2) * 2 + 1
        if multiple > 1:
            largest = MICROBATCHES // multiple * multiple
            found = [min(largest, -(-size // multiple) * multiple) for size in found]
        return self.shuffled(found)
