"""Packs the rows of a batch into microbatches within a budget of tokens.

Legend: B rows, T positions of a row, n sequences of a pack, S its tokens with padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.fp8.packing import Pack, TokenAlignment

from .backend import Backend
from .bins import NO_ALIGNMENT, bin_sequences
from .loss import needs_groups
from .microbatches import rows_of
from .pieces import Piece, doubtful, packed_counts, segments_of_pack
from .records import ATTENTION_MASK, LENGTHS, PACK, POSITIONS, TOKEN_MASK, TOKENS, Batch, Options
from .share import Share, groups_of_rows

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
    """Pack a batch's rows into microbatches of at most `max_tokens`, as a budgeted step does.

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
        attention: work that a token adds for each token of its sequence, see `bin_sequences`.
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
    rows = PackedRows(
        batch,
        max_tokens,
        alignment=alignment,
        multiple=multiple,
        attention=attention,
        shared=shared,
    )
    lists = rows.share(bins if rows.rows or bins > 1 else 0).lists
    return [piece.batch for pieces in lists for piece in pieces]


def packed_rows(
    batch: Batch | None,
    ready: Sequence[Any] | None,
    begun_with: Mapping[str, Any],
    options: Options,
    backend: Backend,
) -> PackedRows | None:
    """Returns the rows of a batch that a step with a budget is to pack; None if it packs none.

    Raises:
        ValueError: the batch cannot be packed within the budget.
    """
    budget = begun_with["max_tokens_per_microbatch"]
    if budget is None or batch is None or ready is not None:
        return None
    return PackedRows(
        batch,
        budget,
        alignment=options.alignment or backend.alignment,
        multiple=backend.microbatch_multiple,
        attention=backend.attention,
        shared=options.shared,
        grouped=needs_groups(begun_with["loss"]),
    )


class PackedRows:
    """Checks the rows of a batch, and packs them into as many bins as ranks have agreed on."""

    def __init__(
        self,
        batch: Batch,
        max_tokens: int,
        *,
        alignment: TokenAlignment,
        multiple: int,
        attention: float,
        shared: Collection[str],
        grouped: bool = False,
    ) -> None:
        self.rows = rows_of(batch, shared)
        self._batch = batch
        self._max_tokens = max_tokens
        self._alignment = alignment
        self._multiple = multiple
        self._attention = attention
        self._shared = frozenset(shared)
        mask_BT, tokens_BT = batch.get(TOKEN_MASK), batch[TOKENS]
        if mask_BT is not None and not tokens_BT.is_nested and mask_BT.shape != tokens_BT.shape[:2]:
            raise ValueError(
                f"microbatch() got {TOKEN_MASK!r} of {tuple(mask_BT.shape)} for {TOKENS!r} of "
                f"{tuple(tokens_BT.shape)}: give one for each position"
            )
        if PACK in batch:
            raise ValueError(
                f"microbatch() got {PACK!r} in a batch of rows, where a budget of tokens puts the "
                "pack that it makes of them: give it another name"
            )
        self._groups = groups_of_rows(batch, self.rows, shared) if grouped else ()
        self._firsts, self._lengths = _real(batch, self.rows)
        self._bins = self._binned(1 if self.rows else 0)

    @property
    def bins(self) -> int:
        """The number of packs that the rows need; 0 without rows."""
        return len(self._bins)

    def share(self, bins: int) -> Share:
        """Make at least `bins` packs, which are run in one call.

        There are no more packs than rows, rounded up to the multiple that a call takes.
        """
        most = min(bins, -(-max(self.rows, 1) // self._multiple) * self._multiple)
        found = self._bins if most <= self.bins else self._binned(most)
        pieces = [self._piece(each) for each in found]
        return Share(
            sequences=self.rows,
            lists=[pieces] if pieces else (),
            counts=[piece.counts for piece in pieces if piece.counts is not None],
            groups=self._groups,
        )

    def _binned(self, bins: int) -> tuple[tuple[int, ...], ...]:
        if not bins:
            return ()
        try:
            return bin_sequences(
                self._lengths,
                self._max_tokens,
                alignment=self._alignment,
                bins=bins,
                multiple=self._multiple,
                attention=self._attention,
            )
        except ValueError as error:
            raise ValueError(f"microbatch() got {self.rows} rows, of which {error}") from None

    def _piece(self, rows: tuple[int, ...]) -> Piece:
        tokens_BT = self._batch[TOKENS]
        lengths = [self._lengths[row] for row in rows]
        pack = Pack.of(
            lengths,
            self._alignment,
            # A pack of no sequences is of the least padding that can be computed.
            tokens=None if sum(lengths) else self._alignment.pack,
            device=tokens_BT.device,
        )
        chosen = _Chosen(rows, lengths, self._firsts, self._batch, pack)
        found = {
            name: value if name in self._shared else chosen.of(name, value)
            for name, value in self._batch.items()
            if name != ATTENTION_MASK or name in self._shared
        }
        found.setdefault(TOKEN_MASK, pack.mask.float()[None])
        found.setdefault(POSITIONS, pack.position_ids[None])
        found[PACK] = pack
        segments = segments_of_pack(pack)
        return Piece(
            batch=found,
            shape=(1, pack.tokens),
            sequences=sum(length > 0 for length in lengths),
            counts=doubtful(packed_counts(found, segments), found),
            segments=segments,
        )


class _Chosen:
    """Takes the rows of one pack out of a batch."""

    def __init__(
        self,
        rows: tuple[int, ...],
        lengths: list[int],
        firsts: list[int],
        batch: Batch,
        pack: Pack,
    ) -> None:
        self._rows = rows
        self._pack = pack
        tokens_BT = batch[TOKENS]
        self._nested = tokens_BT.is_nested
        self._shape_BT = None if self._nested else tuple(tokens_BT.shape[:2])
        width = 0 if self._shape_BT is None else self._shape_BT[1]
        # Where each token is among all of the batch's, one row after the other.
        places = [torch.arange(0)]
        for row, length in zip(rows, lengths, strict=True):
            start = firsts[row] + row * width
            places.append(torch.arange(start, start + length))
        self._place_N = torch.cat(places)

    def of(self, name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            chosen = [value[row] for row in self._rows]
            return chosen if isinstance(value, list) else tuple(chosen)
        if not isinstance(value, Tensor):
            return value
        if value.is_nested:
            return self._packed(name, value.values())
        if tuple(value.shape[:2]) == self._shape_BT:
            return self._packed(name, value.flatten(0, 1))
        index_n = torch.tensor(self._rows, dtype=torch.int64, device=value.device)
        return value.index_select(0, index_n)

    def _packed(self, name: str, values: Tensor) -> Tensor:
        """Lay the batch's values [all tokens, …] out as the pack's [1, S, …]."""
        chosen = values.index_select(0, self._place_N.to(values.device))
        joined = chosen.new_full((self._pack.tokens, *chosen.shape[1:]), _FILLS.get(name, 0))
        place_N = self._pack.place_N.to(values.device)
        return joined.index_copy(0, place_N, chosen)[None]


def _real(batch: Batch, rows: int) -> tuple[list[int], list[int]]:
    """Returns the place of each row's first token, in its row or in a nested batch, and its length.

    The host reads once from the device.

    Raises:
        ValueError: a batch has neither `lengths` nor a mask, one has the wrong shape, a row's
            tokens do not lie side by side, or the two differ; the message names the row.
    """
    tokens_BT = batch[TOKENS]
    lengths, mask = batch.get(LENGTHS), batch.get(ATTENTION_MASK)
    if tokens_BT.is_nested:
        return _nested(batch, tokens_BT)
    width = int(tokens_BT.shape[1])
    if lengths is None and mask is None:
        raise ValueError(
            f"microbatch() got {rows} rows of {width} positions, and not how many are real, which "
            f"a budget of tokens needs: give {LENGTHS!r} [rows] where they are padded at the end, "
            f"or {ATTENTION_MASK!r} [rows, positions]"
        )
    firsts = [0] * rows
    counted: list[int] = []
    if mask is not None:
        if not isinstance(mask, Tensor) or tuple(mask.shape) != tuple(tokens_BT.shape[:2]):
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"microbatch() got {ATTENTION_MASK!r} of {shape} for {TOKENS!r} of "
                f"{tuple(tokens_BT.shape)}: give it that shape, with 1 for each real token"
            )
        firsts, counted = _runs(mask > 0, width)
    if lengths is None:
        return firsts, counted
    found = _as_numbers(lengths, rows, width)
    for row, (length, real) in enumerate(zip(found, counted, strict=False)):
        if length != real:
            raise ValueError(
                f"microbatch() got row {row} with {LENGTHS!r} {length} and {real} tokens in "
                f"{ATTENTION_MASK!r}: give one of the two"
            )
    return firsts, found


def _nested(batch: Batch, tokens: Tensor) -> tuple[list[int], list[int]]:
    starts, lengths = _jagged(tokens)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.is_nested:
            _, theirs = _jagged(value)
            for row, (found, length) in enumerate(zip(theirs, lengths, strict=True)):
                if found != length:
                    raise ValueError(
                        f"microbatch() got {name!r} with {found} entries in row {row}, which has "
                        f"{length} tokens: give one for each token"
                    )
    return starts, lengths


def _jagged(nested: Any) -> tuple[list[int], list[int]]:
    """Returns where each row begins among all of a nested tensor's, and the lengths."""
    ends = nested.offsets().tolist()
    return ends[:-1], [end - start for start, end in itertools.pairwise(ends)]


def _runs(real_BT: Tensor, width: int) -> tuple[list[int], list[int]]:
    """Returns first place and number of the real tokens of each row, which lie side by side."""
    if not real_BT.numel():
        return [0] * len(real_BT), [0] * len(real_BT)
    place_T = torch.arange(width, device=real_BT.device)
    first_B = torch.where(real_BT, place_T, width).amin(1)
    last_B = torch.where(real_BT, place_T, -1).amax(1)
    facts = torch.stack((first_B, last_B, real_BT.sum(1))).tolist()
    for row, (first, last, number) in enumerate(zip(*facts, strict=True)):
        if number and last - first + 1 != number:
            raise ValueError(
                f"microbatch() got {ATTENTION_MASK!r} with {number} tokens in row {row}, between "
                f"places {first} and {last}: pad rows at their ends alone"
            )
    return [first if number else 0 for first, _, number in zip(*facts, strict=True)], facts[2]


def _as_numbers(lengths: Any, rows: int, width: int) -> list[int]:
    if isinstance(lengths, Tensor):
        if lengths.dim() != 1 or lengths.is_floating_point():
            raise ValueError(
                f"microbatch() got {LENGTHS!r} of {lengths.dtype} and shape "
                f"{tuple(lengths.shape)}: give integers, [rows]"
            )
        lengths = lengths.tolist()
    if not isinstance(lengths, (list, tuple)) or len(lengths) != rows:
        raise ValueError(
            f"microbatch() got {LENGTHS!r} {lengths!r} for {rows} rows: give a length for each row"
        )
    for row, length in enumerate(lengths):
        if type(length) is not int or not 0 <= length <= width:
            raise ValueError(
                f"microbatch() got row {row} with {LENGTHS!r} {length!r}: give an int from 0 to "
                f"{width}, its positions"
            )
    return list(lengths)
