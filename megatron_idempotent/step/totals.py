"""Sums what ranks say at the end of a step into its normalizer and its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from .loss import Kind, Normalizer, StepCounts, StepLoss, returned_by
from .outputs import is_extremum, over_all

_OF_GRADIENT: Mapping[Kind, Normalizer] = {
    "token": "tokens",
    "sequence": "sequences",
    "group": "groups",
    "none": "none",
}


class Totals:
    """Sums counts and metrics of a step over all ranks; `counts` has what is valid."""

    def __init__(
        self,
        loss: StepLoss,
        counts: Iterable[tuple[float, float]],
        rows: Sequence[tuple[int, int, Mapping[str, float]]],
        groups: Iterable[Sequence[int]] = (),
    ) -> None:
        """Sum `counts` and `groups`, one per rank, and `rows`, each with its rank and replica.

        Under context parallelism several ranks of a replica have rows of the same microbatches.
        """
        self._told = rows
        self._rows = _of_replicas(rows, add=returned_by(loss) == "part")
        sequences = tokens = 0.0
        for here in counts:
            sequences += here[0]
            tokens += here[1]
        self.counts = StepCounts(
            tokens=tokens,
            sequences=sequences,
            groups=len({each for ids in groups for each in ids}),
            microbatches=len(self._rows),
            reported=over_all(row for _, _, row in self._rows),
        )
        self.divisor: float | None = None
        """The number that gradients are divided by, if one was given instead of a count."""
        self._kind: Kind = loss.kind
        self._normalizers = loss.normalizers

    @property
    def is_counted(self) -> bool:
        """True if the normalizer is a sum of valid tokens or sequences over ranks, and not 0."""
        return self.divisor is None and self._kind in ("token", "sequence") and bool(self._count)

    @property
    def is_empty(self) -> bool:
        """True if nothing is valid on any rank."""
        return not self._count or not self._rows

    @property
    def normalizer(self) -> float:
        """The number that gradients are divided by; 1 where nothing is valid."""
        return self._count or 1.0

    @property
    def _count(self) -> float:
        if self.divisor is not None:
            return self.divisor
        return self._counted(_OF_GRADIENT[self._kind])

    def _counted(self, kind: Normalizer) -> float:
        return 1.0 if kind == "none" else float(getattr(self.counts, kind))

    def bad_losses(self) -> dict[int, str]:
        """Name the first loss of each rank that is NaN or infinite, by global rank."""
        found: dict[int, str] = {}
        number: dict[int, int] = {}
        for rank, _, row in self._told:
            number[rank] = number.get(rank, 0) + 1
            if not math.isfinite(row["loss"]):
                found.setdefault(
                    rank, f"the loss of its microbatch {number[rank]} is {row['loss']}"
                )
        return found

    def rows(self, **also: float) -> tuple[dict[str, float], ...]:
        """Returns each microbatch's metrics, divided by their normalizers, and the step's counts.

        Each row also has the items of `also`, its rank and its replica.
        """
        everywhere = {
            **also,
            "global_valid_seqs": self.counts.sequences,
            "global_valid_toks": self.counts.tokens,
        }
        return tuple(
            {
                **{name: value * self._scale(name) for name, value in row.items()},
                **everywhere,
                "rank": rank,
                "replica": replica,
            }
            for rank, replica, row in self._rows
        )

    def metrics(self) -> dict[str, float]:
        """Returns metrics over the whole step: extrema by name, all else summed and divided."""
        return {name: value * self._scale(name) for name, value in self.counts.reported.items()}

    def _scale(self, name: str) -> float:
        if is_extremum(name):
            return 1.0
        kind = self._normalizers.get(name)
        # With nothing valid the sums are sums of nothing.
        return 1.0 / ((self._count if kind is None else self._counted(kind)) or 1.0)


def _of_replicas(
    told: Sequence[tuple[int, int, Mapping[str, float]]], *, add: bool
) -> list[tuple[int, int, Mapping[str, float]]]:
    """Make one row per microbatch of those that context-parallel ranks report, under the first.

    With `add` they are of parts of the microbatch, and added up; else they are the same.
    """
    number: dict[int, int] = {}
    parts: dict[tuple[int, int], list[tuple[int, Mapping[str, float]]]] = {}
    for rank, replica, row in told:
        index = number[rank] = number.get(rank, -1) + 1
        parts.setdefault((replica, index), []).append((rank, row))
    return [
        (rows[0][0], replica, over_all(row for _, row in rows) if add else rows[0][1])
        for (replica, _), rows in parts.items()
    ]
