"""Draws the sizes of a check's steps from a seed, the same on all ranks.

Sizes that every run must have occur with any seed, such as a call of nine microbatches and a call
of one. Their order and all other numbers are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

#: The most calls of a step, and microbatches of a call.
CALLS, MICROBATCHES = 7, 9
Item = TypeVar("Item")


class Draw:
    """Draws random numbers and orders for a check; the same seed and names give the same draws.

    Example: `Draw(7, "dp2", "drawn-sizes").shuffled([1, 2, 3])`.
    """

    def __init__(self, seed: int, *names: str) -> None:
        """Seed the generator with `seed` and `names`, such as those of a layout and a check."""
        self._random = random.Random(" ".join((str(seed), *names)))

    def number(self, least: int, most: int) -> int:
        """Draw a whole number from `least` to `most`, both included."""
        return self._random.randint(least, most)

    def share(self, least: float, most: float) -> float:
        """Draw a real number between `least` and `most`."""
        return self._random.uniform(least, most)

    def shuffled(self, values: Sequence[Item]) -> list[Item]:
        """Return the values as a new list in a random order."""
        return self._random.sample(list(values), len(values))

    def dealt(self, values: Sequence[Item], number: int) -> list[Item]:
        """Draw `number` items from `values`, each value almost equally often; return them in random
        order.
        """
        dealt: list[Item] = []
        while len(dealt) < number:
            dealt += self.shuffled(values)
        return dealt[:number]

    def sizes(self, calls: int, multiple: int = 1, *, most: int = MICROBATCHES) -> list[int]:
        """Draw the number of microbatches of each call, for a step of `calls` calls; return the
        numbers in the order of the calls.

        They are odd and even, in random order. With CALLS calls one of them is 1, and one
        MICROBATCHES. All are rounded to multiples of `multiple`, as an interleaved schedule needs.
        """
        sizes = [self.number(1, most if calls < 3 else min(most, 3)) for _ in range(calls)]
        if calls == CALLS:
            sizes[:4] = 1, MICROBATCHES, 2, self.number(1, 2) * 2 + 1
        if multiple > 1:
            largest = MICROBATCHES // multiple * multiple
            sizes = [min(largest, -(-size // multiple) * multiple) for size in sizes]
        return self.shuffled(sizes)
