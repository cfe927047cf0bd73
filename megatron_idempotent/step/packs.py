"""Packs rows into microbatches within a budget of tokens.

A step without a budget calls no function of this file.

Legend: B rows, T positions of a row; n sequences of a pack, S its tokens with padding.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_idempotent.fp8.packing import Pack, TokenAlignment
from megatron_idempotent.logprobs.errors import typed

from .microbatches import (
    ATTENTION_MASK,
    LENGTHS,
    PACK,
    POSITIONS,
    TOKEN_MASK,
    TOKENS,
    Batch,
    Microbatch,
    PreparedBatch,
    checked_rows,
    group_ids,
    in_batch,
    kind_of,
    nan_if_wrong,
)
from .pack_layout import packed_counts, spans_between

Bins = tuple[tuple[int, ...], ...]
"""The indices of each bin's sequences, in rising order; the bin with most work comes first."""

NO_ALIGNMENT = TokenAlignment(sequence=1, pack=1)


def bin_sequences(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    alignment: TokenAlignment = NO_ALIGNMENT,
    bins: int = 1,
    multiple: int = 1,
    attention: float = 0.0,
) -> Bins:
    """Put sequences into few bins of at most `max_tokens` each, with even work.

    The same lengths give the same bins on every rank and machine. Ranks that meet in each
    microbatch agree on the largest of their numbers of bins, and call again with it as `bins`. The
    bin with most work comes first, so that ranks have about the same work in each microbatch.

    Args:
        lengths: [n], tokens of each sequence, without padding.
        max_tokens: the most that a bin may hold, padding included.
        alignment: what sequences and packs are padded to, as `token_alignment` says.
        bins: the least number of bins; some are empty where there are fewer sequences.
        multiple: the number of bins is a multiple of it, as interleaved pipelines need.
        attention: the cost of attention for each token of its context, relative to a token's
            fixed cost of 1. About 1 / (6 · hidden size) for a transformer; 0 to count tokens alone.

    Returns:
        The indices of each bin's sequences; no bins without sequences, unless `bins` is 2 or more.

    Raises:
        ValueError: a sequence takes more than `max_tokens`, a length is negative, or a number is
            not a positive int (`bins` may be 0).

    Example:
        for bin in bin_sequences([len(tokens) for tokens in sequences], 4096, alignment=alignment):
            pack = Pack.of([len(sequences[index]) for index in bin], alignment)
    """
    for name, value in (("max_tokens", max_tokens), ("bins", bins), ("multiple", multiple)):
        if type(value) is not int or value < (0 if name == "bins" else 1):
            raise ValueError(f"bin_sequences() takes a positive int as {name}, got {value!r}")
    capacity = capacity_of(max_tokens, alignment)
    sizes = [alignment.of_sequence(length) for length in lengths]
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        if length < 0:
            raise ValueError(f"sequence {index} has length {length}: give lengths of 0 or more")
        if size > capacity:
            padded = f", {size} with its padding," if size != length else ""
            usable = f", of which {capacity} can be used" if capacity != max_tokens else ""
            raise ValueError(
                f"sequence {index} has {length} tokens{padded} and a bin at most {max_tokens}"
                f"{usable}: raise the budget, or cut the sequence"
            )
    if not sizes and bins < 2:
        return ()
    work = [size * (1 + attention * size) for size in sizes]
    # The longest first, so that short ones fill gaps; equal ones by index, so that ranks agree.
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    tight = _tight_bins(order, sizes, capacity)
    least = max(-(-sum(sizes) // capacity), bins, 1)
    numbers = {-(-number // multiple) * multiple for number in (least, max(len(tight), least))}
    filled: list[list[int]] | None = None
    for number in sorted(numbers):
        filled = _even_bins(order, sizes, work, number, capacity)
        if filled is not None:
            break
    if filled is None:
        filled = tight + [[] for _ in range(max(numbers) - len(tight))]
    return tuple(
        sorted(
            (tuple(sorted(indices)) for indices in filled),
            key=lambda indices: (-sum(work[index] for index in indices), indices),
        )
    )


def capacity_of(max_tokens: int, alignment: TokenAlignment) -> int:
    """Return the most tokens that a pack can hold: the largest multiple of `alignment.pack` that is
    not above `max_tokens`.

    Raises:
        ValueError: `max_tokens` is below the smallest multiple.
    """
    capacity = max_tokens - max_tokens % alignment.pack
    if not capacity:
        raise ValueError(
            f"a budget of {max_tokens} tokens, and packs are multiples of {alignment.pack} tokens "
            f"on these ranks: give at least {alignment.pack}"
        )
    return capacity


def _even_bins(
    order: Sequence[int],
    sizes: Sequence[int],
    work: Sequence[float],
    number: int,
    capacity: int,
) -> list[list[int]] | None:
    """Put each sequence into the bin with the least work among those with room for it.
    Return the bins; None if a sequence fits into no bin.
    """
    bins: list[list[int]] = [[] for _ in range(number)]
    rooms = [capacity] * number
    heap = [(0.0, index) for index in range(number)]
    for index in order:
        full = []
        while heap and rooms[heap[0][1]] < sizes[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, emptiest = heap[0]
        bins[emptiest].append(index)
        rooms[emptiest] -= sizes[index]
        heapq.heapreplace(heap, (load + work[index], emptiest))
        for load_of_bin in full:
            heapq.heappush(heap, load_of_bin)
    return bins


def _tight_bins(order: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each sequence into the fullest bin with room for it; return the bins.
    This makes close to the fewest bins.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in order:
        fullest = bisect_left(rooms, (sizes[index], -1))
        if fullest == len(rooms):
            bins.append([])
            room, number = capacity, len(bins) - 1
        else:
            room, number = rooms.pop(fullest)
        bins[number].append(index)
        insort(rooms, (room - sizes[index], number))
    return bins


#: The padding of values whose padding is not 0, by name: nothing is predicted there.
_FILLS = {"labels": -100, "targets": -100}


def pack_batches(
    batch: Batch,
    max_tokens: int,
    *,
    alignment: TokenAlignment = NO_ALIGNMENT,
    bins: int = 1,
    multiple: int = 1,
    attention: float = 0.0,
    shared: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Pack a batch's rows into microbatches of at most `max_tokens`, as a step with
    `max_tokens_per_microbatch` does.

    For frameworks that make their microbatches themselves: a `TrainStep` takes the list as
    `microbatches`, and `gpt_forward` runs each.

    Args:
        batch: a mapping with `input_ids` [B, T], and `lengths` [B] of rows that are padded at the
            end, or `attention_mask` [B, T], 1 for tokens of rows that are padded on either side; or
            with nested `input_ids`, which have lengths themselves.
        max_tokens: the most tokens of a pack, padding included.
        alignment: what sequences and packs are padded to, as `token_alignment` says.
        bins: the least number of packs; those without sequences have padding alone.
        multiple: the number of packs is a multiple of it.
        attention: the cost of attention, see `bin_sequences`.
        shared: names in the batch that are the same for all rows, whatever they hold.

    Returns:
        Mappings with the `Pack` as `pack`. Tensors [B, T, …] of the batch become [1, S, …], with 0
        in padding (-100 in `labels` and `targets`); tensors [B, …] become [n, …]; lists have n
        items; all else is as it was. `token_mask` and `position_ids` [1, S] are always there, and
        `attention_mask` is not.

    Raises:
        ValueError: rows whose lengths are unknown or do not fit, or one above the budget.

    Example:
        microbatches = pack_batches(batch, 8192, alignment=TokenAlignment.of_config(config))
        step.microbatch(step_id, microbatches=microbatches)
    """
    budget = Budget(max_tokens, alignment, multiple, attention)
    with in_batch("pack_batches() got "):
        rows = PackedRows(batch, budget, shared)
        prepared = rows.prepare(bins if rows.rows or bins > 1 else 0)
    return [microbatch.inputs for call in prepared.calls for microbatch in call]


class Budget(NamedTuple):
    """Holds how rows are packed: the limits and costs that are arguments of `bin_sequences`."""

    max_tokens: int
    alignment: TokenAlignment
    multiple: int
    attention: float


class PackedRows:
    """Checks the rows of a batch, and packs them into microbatches within a budget of tokens."""

    def __init__(
        self,
        batch: Batch,
        budget: Budget,
        shared: Collection[str],
        *,
        grouped: bool = False,
    ) -> None:
        """Check the rows, and count the packs that they need.

        Raises:
            ValueError: the batch cannot be packed within the budget.
        """
        self.rows = checked_rows(batch, shared, one_more=False)
        self._batch, self._budget, self._shared = batch, budget, shared
        if PACK in batch:
            raise ValueError(
                f"{PACK!r} in a batch of rows, where a budget of tokens puts the pack that it "
                "makes of them: give it another name"
            )
        self._groups = [group_ids(batch, self.rows, shared)] if grouped else ()
        self._firsts, self._lengths = real_tokens(batch, self.rows)
        self._bins = self._rows_of_packs(1 if self.rows else 0)

    @property
    def packs(self) -> int:
        """The number of packs that the rows need; 0 without rows."""
        return len(self._bins)

    def prepare(self, packs: int) -> PreparedBatch:
        """Return a `PreparedBatch` of at least `packs` packs, which are run in one call.

        There are no more packs than rows, rounded up to the multiple that a call takes.
        """
        multiple = self._budget.multiple
        limit = -(-max(self.rows, 1) // multiple) * multiple
        number = min(packs, limit)
        bins = self._bins if number <= self.packs else self._rows_of_packs(number)
        return PreparedBatch.of_one_call(list(map(self._pack, bins)), self.rows, self._groups)

    def _rows_of_packs(self, packs: int) -> Bins:
        if not packs:
            return ()
        with in_batch(f"{self.rows} rows, of which "):
            return bin_sequences(self._lengths, bins=packs, **self._budget._asdict())

    def _pack(self, rows: tuple[int, ...]) -> Microbatch:
        tokens_BT = self._batch[TOKENS]
        lengths = [self._lengths[row] for row in rows]
        # A pack of no sequences is of the least padding that can be computed.
        alignment = self._budget.alignment
        tokens = None if sum(lengths) else alignment.pack
        pack = Pack.of(lengths, alignment, tokens=tokens, device=tokens_BT.device)
        # The index of each real token among all tokens of the batch, in row order.
        width = 0 if tokens_BT.is_nested else tokens_BT.shape[1]
        starts = [self._firsts[row] + row * width for row in rows]
        sources = [torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)]
        source_N = torch.cat([torch.arange(0), *sources])
        inputs = {
            name: value
            if name in self._shared
            else _values_of(name, value, rows, source_N, pack, tokens_BT)
            for name, value in self._batch.items()
            if name != ATTENTION_MASK or name in self._shared
        }
        inputs.setdefault(TOKEN_MASK, pack.mask.float()[None])
        inputs.setdefault(POSITIONS, pack.position_ids[None])
        inputs[PACK] = pack
        spans = pack.spans
        return Microbatch(
            inputs=inputs,
            shape=(1, pack.tokens),
            counts=nan_if_wrong(packed_counts(inputs, spans), inputs),
            spans=spans,
        )


def _values_of(
    name: str, value: Any, rows: tuple[int, ...], source_N: Tensor, pack: Pack, tokens_BT: Tensor
) -> Any:
    """Return what belongs to one pack of `value`, one of the batch's values: the items of the
    pack's `rows`. An item per token is laid out as the pack's tokens are.
    """
    if isinstance(value, (list, tuple)):
        items = [value[row] for row in rows]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, Tensor):
        return value
    if value.is_nested:
        jagged: Any = value
        tokens = jagged.values()
    elif not tokens_BT.is_nested and value.shape[:2] == tokens_BT.shape[:2]:
        tokens = value.flatten(0, 1)
    else:
        index_n = torch.tensor(rows, dtype=torch.int64, device=value.device)
        return value.index_select(0, index_n)
    # The batch's values [all tokens, …], laid out as the pack's [1, S, …].
    picked = tokens.index_select(0, source_N.to(value.device))
    joined = picked.new_full((pack.tokens, *picked.shape[1:]), _FILLS.get(name, 0))
    return joined.index_copy(0, pack.place_N.to(value.device), picked)[None]


def real_tokens(batch: Batch, rows: int) -> tuple[list[int], list[int]]:
    """Return two lists: each row's index of its first real token, and its number of real tokens.
    The index counts in the row or, in a nested batch, in the joined rows.

    The host reads once from the device.

    Raises:
        ValueError: a batch has neither `lengths` nor a mask, one has the wrong shape, a row's
            tokens are not contiguous, or the lengths and the mask differ; the message names the
            row.
    """
    tokens_BT = batch[TOKENS]
    lengths, mask = batch.get(LENGTHS), batch.get(ATTENTION_MASK)
    if tokens_BT.is_nested:
        return _nested_tokens(batch, tokens_BT)
    width = int(tokens_BT.shape[1])
    if lengths is None and mask is None:
        raise ValueError(
            f"{rows} rows of {width} positions, and not how many are real, which a budget of "
            f"tokens needs: give {LENGTHS!r} [rows] where they are padded at the end, or "
            f"{ATTENTION_MASK!r} [rows, positions]"
        )
    masked = None if mask is None else _masked_tokens(mask, tokens_BT)
    if lengths is None:
        assert masked is not None
        return masked
    row_lengths = _checked_lengths(lengths, rows, width)
    firsts, masked_lengths = masked or ([0] * rows, row_lengths)
    for row, (length, number) in enumerate(zip(row_lengths, masked_lengths, strict=True)):
        if length != number:
            raise ValueError(
                f"row {row} with {LENGTHS!r} {length} and {number} tokens in {ATTENTION_MASK!r}: "
                "give one of the two"
            )
    return firsts, row_lengths


def _nested_tokens(batch: Batch, tokens: Any) -> tuple[list[int], list[int]]:
    starts, lengths = spans_between("offsets", tokens.offsets())
    for name, value in batch.items():
        if not isinstance(value, Tensor) or not value.is_nested:
            continue
        jagged: Any = value
        _, value_lengths = spans_between("offsets", jagged.offsets())
        for row, (entries, length) in enumerate(zip(value_lengths, lengths, strict=True)):
            if entries != length:
                raise ValueError(
                    f"{name!r} with {entries} entries in row {row}, which has {length} tokens: "
                    "give one for each token"
                )
    return starts, lengths


def _masked_tokens(mask: Any, tokens_BT: Tensor) -> tuple[list[int], list[int]]:
    """Return the index of each row's first real token, and the number of its real tokens."""
    expected = tuple(tokens_BT.shape[:2])
    if not isinstance(mask, Tensor) or tuple(mask.shape) != expected:
        raise ValueError(
            f"{ATTENTION_MASK!r}, {kind_of(mask)}, for {TOKENS!r} of {expected}: give it that "
            "shape, with 1 for each real token"
        )
    rows, width = expected
    if not mask.numel():
        return [0] * rows, [0] * rows
    real_BT, place_T = mask > 0, torch.arange(width, device=mask.device)
    first_B = torch.where(real_BT, place_T, width).amin(1)
    last_B = torch.where(real_BT, place_T, -1).amax(1)
    firsts, lasts, numbers = torch.stack((first_B, last_B, real_BT.sum(1))).tolist()
    for row, (first, last, number) in enumerate(zip(firsts, lasts, numbers, strict=True)):
        if number and last - first + 1 != number:
            raise ValueError(
                f"{ATTENTION_MASK!r} with {number} tokens in row {row}, between places {first} and "
                f"{last}: pad rows at their ends alone"
            )
    return [first % width for first in firsts], numbers  # a row without tokens has index 0


def _checked_lengths(lengths: Any, rows: int, width: int) -> list[int]:
    if isinstance(lengths, Tensor):
        if lengths.dim() != 1 or lengths.is_floating_point():
            raise ValueError(f"{LENGTHS!r} of {typed(lengths)}: give integers, [rows]")
        lengths = lengths.tolist()
    if not isinstance(lengths, (list, tuple)) or len(lengths) != rows:
        raise ValueError(f"{LENGTHS!r} {lengths!r} for {rows} rows: give a length for each row")
    for row, length in enumerate(lengths):
        if type(length) is not int or not 0 <= length <= width:
            raise ValueError(
                f"row {row} with {LENGTHS!r} {length!r}: give an int from 0 to {width}, its "
                "positions"
            )
    return list(lengths)
