"""Sums what ranks say at the end of a step into its normalizer and its metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from .records import RESERVED, Kind, Normalizer, StepLoss

# Per microbatch: what the loss reported, with tensors still on the device.
Row = Mapping[str, Any]


def row_of(total: Any, metrics: Mapping[str, Any]) -> Row:
    """Copies what a loss returned for a microbatch, so that later changes do not reach it.

    Raises:
        ValueError: a total that is no tensor of one element with its graph, or a metric with a
            name that the step uses itself.
    """
    taken = [name for name in RESERVED if name in metrics]
    if taken:
        raise ValueError(
            f"the loss reported metrics named {', '.join(map(repr, taken))}, which the step puts "
            f"into each row itself, as {', '.join(map(repr, RESERVED))}: give them other names"
        )
    shape = tuple(total.shape) if isinstance(total, torch.Tensor) else type(total).__name__
    graph = isinstance(total, torch.Tensor) and total.requires_grad
    if not graph or total.numel() != 1:
        raise ValueError(
            f"the loss returned shape {shape} with requires_grad={graph}: return the sum over the "
            "microbatch, a scalar with the graph that it was computed by"
        )
    return {"loss": _kept(total), **{name: _kept(value) for name, value in metrics.items()}}


def as_numbers(rows: Sequence[Row]) -> tuple[dict[str, float], ...]:
    """The rows' values as floats, with one transfer from the device for all of them.

    Raises:
        ValueError: a metric is neither a number nor a tensor of one element.
    """
    found = [(index, name, value) for index, row in enumerate(rows) for name, value in row.items()]
    tensors = []
    for _, name, value in found:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"the loss reported {name!r} of shape {tuple(value.shape)}: metrics are "
                    "scalars, summed over the microbatch"
                )
            tensors.append(value.detach().reshape(()).to(torch.float64))
        elif not isinstance(value, (int, float)):
            raise ValueError(
                f"the loss reported {name!r} as {type(value).__name__}: metrics are numbers or "
                "tensors of one element"
            )
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    result: tuple[dict[str, float], ...] = tuple({} for _ in rows)
    for index, name, value in found:
        result[index][name] = next(numbers) if isinstance(value, torch.Tensor) else float(value)
    return result


class Totals:
    """Sums over all ranks. `sequences` and `tokens` are the valid ones of the step."""

    def __init__(
        self,
        loss: StepLoss,
        counts: Iterable[tuple[float, float]],
        rows: Sequence[tuple[int, int, Mapping[str, float]]],
    ) -> None:
        """`counts` are one pair per rank; `rows` each come with their rank and replica."""
        self.sequences = self.tokens = 0.0
        for sequences, tokens in counts:
            self.sequences += sequences
            self.tokens += tokens
        self._kind: Kind = loss.kind
        self._normalizers = loss.normalizers
        self._rows = rows

    @property
    def normalizer(self) -> float:
        """The number that gradients are divided by: valid tokens or sequences, as the loss says."""
        return self.tokens if self._kind == "token" else self.sequences

    @property
    def microbatches(self) -> int:
        """Microbatches of all ranks."""
        return len(self._rows)

    def bad_losses(self) -> dict[int, str]:
        """Name the first loss of each rank that is NaN or infinite, by global rank."""
        found: dict[int, str] = {}
        number: dict[int, int] = {}
        for rank, _, row in self._rows:
            number[rank] = number.get(rank, 0) + 1
            if not math.isfinite(row["loss"]):
                found.setdefault(
                    rank, f"the loss of its microbatch {number[rank]} is {row['loss']}"
                )
        return found

    def rows(self, **also: float) -> tuple[dict[str, float], ...]:
        """Each microbatch's metrics, divided by their normalizers, and what all have in common."""
        everywhere = {
            **also,
            "global_valid_seqs": self.sequences,
            "global_valid_toks": self.tokens,
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
        """Over the whole step: extrema by name, everything else summed."""
        found: dict[str, list[float]] = {}
        for _, _, row in self._rows:
            for name, value in row.items():
                found.setdefault(name, []).append(value)
        return {name: _over_all(name)(values) * self._scale(name) for name, values in found.items()}

    def _scale(self, name: str) -> float:
        if _is_extremum(name):
            return 1.0
        of_gradient: Normalizer = "tokens" if self._kind == "token" else "sequences"
        kind = self._normalizers.get(name, of_gradient)
        if kind == "none":
            return 1.0
        # With nothing valid the sums are sums of nothing.
        return 1.0 / ((self.tokens if kind == "tokens" else self.sequences) or 1.0)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_extremum(name: str) -> bool:
    return "_min" in name or "_max" in name


def _over_all(name: str) -> Any:
    if "_min" in name:
        return min
    return max if "_max" in name else sum
