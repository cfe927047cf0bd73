"""Turns a batch into the microbatches and counts that one `microbatch()` adds to a step.

Legend: n sequences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .loss import needs_groups
from .microbatches import rows_of, split
from .pieces import Piece, doubtful, field_of, ready_pieces, valid_counts
from .records import GROUP_IDS, SAMPLE_MASK, Batch, Options


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Holds a batch as it is run and counted.

    Example: `share_of(batch, None, begun_with, options)`.
    """

    sequences: int = 0
    """The number of sequences, masked ones included."""
    lists: Sequence[Sequence[Piece]] = ()
    """The microbatches of each call of the schedule."""
    counts: Sequence[Tensor] = ()
    """Valid sequences and tokens, float64 [2] each, which add up to the batch's."""
    groups: Sequence[tuple[Tensor, Tensor | None]] = ()
    """Group ids of sequences and which of them are valid, if the loss counts groups."""


def share_of(
    batch: Batch | None,
    ready: Sequence[Any] | None,
    begun_with: Mapping[str, Any],
    options: Options,
) -> Share:
    """Cut a batch into microbatches, or check microbatches that are ready.

    Raises:
        ValueError: both a batch and microbatches, or one that cannot be run or counted.
    """
    grouped = needs_groups(begun_with["loss"])
    if ready is not None:
        if batch is not None:
            raise ValueError(
                "microbatch() got a batch and microbatches: pass rows to be cut, or a list of "
                "microbatches that are run as they are"
            )
        pieces = ready_pieces(ready, options)
        return Share(
            sequences=sum(piece.sequences for piece in pieces),
            lists=[pieces] if pieces else (),
            counts=[piece.counts for piece in pieces if piece.counts is not None],
            groups=[_groups_of(i, piece) for i, piece in enumerate(pieces)] if grouped else (),
        )
    rows = 0 if batch is None else rows_of(batch, options.shared)
    if batch is None or not rows:
        return Share()
    size = begun_with["micro_batch_size"]
    if size is None:
        raise ValueError(
            f"microbatch() got {rows} rows, and begin() no micro_batch_size to cut them by: "
            "begin with one or with max_tokens_per_microbatch, or pass microbatches=[…]"
        )
    return Share(
        sequences=rows,
        lists=split(batch, rows, size, options.shared),
        counts=[doubtful(valid_counts(batch), batch)],
        groups=groups_of_rows(batch, rows, options.shared) if grouped else (),
    )


def groups_of_rows(
    batch: Batch, rows: int, shared: Collection[str]
) -> list[tuple[Tensor, Tensor | None]]:
    """Returns the group ids of all rows, and which rows are valid.

    Raises:
        ValueError: the batch has not one id for each row.
    """
    if GROUP_IDS in shared:
        raise ValueError(
            f"microbatch() got {GROUP_IDS!r} that all rows share: give one for each row, and take "
            "the name out of shared="
        )
    try:
        return [group_ids(batch, rows)]
    except ValueError as error:
        raise ValueError(f"microbatch() got {error}") from None


def _groups_of(index: int, piece: Piece) -> tuple[Tensor, Tensor | None]:
    try:
        number = piece.sequences if piece.segments is None else len(piece.segments.lengths)
        return group_ids(piece.batch, number)
    except ValueError as error:
        raise ValueError(f"microbatch() got microbatches[{index}], {error}") from None


def group_ids(batch: Any, sequences: int) -> tuple[Tensor, Tensor | None]:
    """Returns each sequence's group id [n], and which sequences are valid [n]; None if all are.

    Raises:
        ValueError: `group_ids` is missing, or is not one integer for each sequence.
    """
    found = field_of(batch, GROUP_IDS)
    if found is None:
        raise ValueError(
            f"a {type(batch).__name__} without {GROUP_IDS!r}, and a loss or metric that is divided "
            f"by the number of groups: give it the group of each of its {sequences} sequences, "
            "integers [sequences]"
        )
    ids_n = torch.as_tensor(found)
    if ids_n.is_floating_point() or ids_n.dtype == torch.bool or ids_n.numel() != sequences:
        raise ValueError(
            f"whose {GROUP_IDS!r} are {ids_n.dtype} of shape {tuple(ids_n.shape)} for {sequences} "
            "sequences: give one integer for each"
        )
    mask_n = field_of(batch, SAMPLE_MASK)
    return ids_n.reshape(-1), None if mask_n is None else mask_n.reshape(-1) > 0


def distinct(found: Iterable[tuple[Tensor, Tensor | None]]) -> tuple[int, ...]:
    """Return the ids of groups with a valid sequence, each once; reads from the device once."""
    valid = [ids_n if mask_n is None else ids_n[mask_n] for ids_n, mask_n in found]
    if not valid:
        return ()
    device = valid[0].device
    ids = torch.unique(torch.cat([each.to(device, torch.int64) for each in valid]))
    return tuple(ids.tolist())
