"""Takes over what a loss returns for one microbatch: sum, metrics, and outputs of each sample.

Legend: n sequences of the microbatch, T positions of a row, or all tokens of a pack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .loss import StepLoss
from .pieces import Piece

RESERVED = ("loss", "lr", "wd", "global_valid_seqs", "global_valid_toks", "rank", "replica")
"""Names that the step puts into each row by itself, so that a loss may not report them."""

# Per microbatch: what the loss reported, with tensors still on the device.
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """Holds what a loss has returned for one microbatch.

    Example: `reported(loss, total, metrics, piece)`.
    """

    row: Row
    """The loss's sum, as "loss", and its metrics."""
    outputs: Mapping[str, Sequence[Tensor]]
    """A tensor for each of the n sequences, without its graph, by name."""


def reported(loss: StepLoss, total: Any, metrics: Mapping[str, Any], piece: Piece) -> Reported:
    """Take over what a loss has returned, so that later changes do not reach it.

    Raises:
        ValueError: the total is neither a scalar with its graph nor the constant 0, a metric is no
            scalar or has a name that the step uses itself, or an output is missing or has not one
            entry for each sequence or token.
    """
    names = tuple(getattr(loss, "outputs", ()))
    taken = [name for name in RESERVED if name in metrics]
    if taken:
        raise ValueError(
            f"the loss reported metrics named {', '.join(map(repr, taken))}, which the step puts "
            f"into each row itself, as {', '.join(map(repr, RESERVED))}: give them other names"
        )
    _check_total(total)
    missing = [name for name in names if name not in metrics]
    if missing:
        raise ValueError(
            f"the loss names {', '.join(map(repr, missing))} in its `outputs`, and has returned "
            f"{', '.join(map(repr, metrics)) or 'no metric'}: return them beside the metrics"
        )
    row = {"loss": _kept(total)}
    for name, value in metrics.items():
        if name not in names:
            _check_metric(name, value)
            row[name] = _kept(value)
    outputs = {name: _by_sample(name, metrics[name], piece) for name in names}
    return Reported(row=row, outputs=outputs)


def has_graph(total: Any) -> bool:
    """Returns whether a backward can start at the total; a constant has no graph."""
    return isinstance(total, Tensor) and total.requires_grad


def _check_total(total: Any) -> None:
    if has_graph(total) and total.numel() == 1:
        return
    shape = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
    scalar = isinstance(total, (int, float)) or (isinstance(total, Tensor) and total.numel() == 1)
    # Another constant is a mistake: a graph that was lost, and gradients that would be zero.
    if has_graph(total) or not scalar or float(total) != 0.0:
        value = f", the constant {float(total):g}" if scalar and not has_graph(total) else ""
        raise ValueError(
            f"the loss returned shape {shape} with requires_grad={has_graph(total)}{value}: return "
            "the sum over the microbatch, a scalar with the graph that it was computed by, or the "
            "constant 0 where nothing is valid"
        )


def _check_metric(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"the loss reported {name!r} of shape {tuple(value.shape)}: metrics are scalars, "
                "summed over the microbatch; name it in the loss's `outputs` if each sample has one"
            )
    elif not isinstance(value, (int, float)):
        raise ValueError(
            f"the loss reported {name!r} as {type(value).__name__}: metrics are numbers or tensors "
            "of one element"
        )


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _by_sample(name: str, value: Any, piece: Piece) -> tuple[Tensor, ...]:
    """Split a value that has an entry for each sequence, or for each token of a pack."""
    segments = piece.segments
    number = piece.sequences if segments is None else len(segments.lengths)
    if isinstance(value, (list, tuple)) and all(isinstance(each, Tensor) for each in value):
        if len(value) == number:
            return tuple(each.detach() for each in value)
        told = f"{len(value)} tensors"
    elif isinstance(value, Tensor) and value.dim():
        value = value.detach()
        if segments is not None:
            flat = value[0] if value.dim() > 1 and len(value) == 1 else value
            if len(flat) == piece.positions:
                spans = zip(segments.starts, segments.lengths, strict=True)
                return tuple(flat[start : start + length] for start, length in spans)
        if len(value) == number:
            return tuple(value.unbind())
        told = f"shape {tuple(value.shape)}"
    else:
        told = type(value).__name__
    tokens = "" if segments is None else f", or {piece.positions}, one for each token of the pack"
    raise ValueError(
        f"the loss returned the output {name!r} as {told} for {number} sequences: return a tensor "
        f"or list whose first dimension is {number}{tokens}"
    )


def as_numbers(rows: Sequence[Row]) -> tuple[dict[str, float], ...]:
    """Returns the rows with floats as values; all come from the device in one transfer."""
    found = [(index, name, value) for index, row in enumerate(rows) for name, value in row.items()]
    tensors = [
        value.detach().reshape(()).to(torch.float64)
        for _, _, value in found
        if isinstance(value, Tensor)
    ]
    numbers = iter(torch.stack(tensors).tolist() if tensors else ())
    result: tuple[dict[str, float], ...] = tuple({} for _ in rows)
    for index, name, value in found:
        result[index][name] = next(numbers) if isinstance(value, Tensor) else float(value)
    return result


def is_extremum(name: str) -> bool:
    """Returns whether a metric is a minimum or maximum by its name."""
    return "_min" in name or "_max" in name


def over_all(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the rows' metrics as one row: minima and maxima by name, everything else summed."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {
        name: (min if "_min" in name else max if "_max" in name else sum)(values)
        for name, values in found.items()
    }
