"""The version that each token of a response was drawn with."""

from __future__ import annotations

import bisect
import math


class Stamps:
    """The places, on an engine's count of tokens, at which it was given new weights.

    Example: `Stamps(0).versions(begun=0.0, prompt=0.0, entries=3, per_entry=1)`.
    """

    def __init__(self, version: int) -> None:
        self._switches = [-math.inf]
        self._versions = [version]

    def switch(self, version: int, *, at: float) -> None:
        """Stamps the tokens after that place with the version."""
        self._switches.append(at)
        self._versions.append(version)

    def versions(
        self, *, begun: float, prompt: float, entries: int, per_entry: int
    ) -> tuple[int, ...]:
        """Versions of the entries of a response, [entries].

        An entry has the version that was served when its last token was drawn.

        Args:
            begun: place at which its prompt began to be computed.
            prompt: length of the prompt on the count.
            entries: of the response.
            per_entry: tokens that each stands for.
        """
        found: tuple[int, ...] = ()
        place = bisect.bisect_right(self._switches, begun) - 1
        for at in range(place, len(self._switches)):
            before = entries
            if at + 1 < len(self._switches):
                drawn = self._switches[at + 1] - begun - prompt
                before = min(entries_of(drawn, per_entry), entries)
            found += (self._versions[at],) * max(before - len(found), 0)
            if len(found) == entries:
                break
        return found


def entries_of(tokens: float, per_entry: int) -> int:
    """Whole entries in so many tokens, which are a sum of rounded numbers."""
    return max(int(tokens / per_entry + 1e-6), 0)
