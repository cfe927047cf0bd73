"""Packs rows into microbatches within a budget of tokens, and cuts them to context-parallel ranks.

A step without packs and context parallelism enters nothing in this file.

Legend: B rows, T positions of a row, or all tokens of a pack; n sequences of a pack, S its tokens
with padding.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_idempotent.fp8.packing import Pack, TokenAlignment
from megatron_idempotent.logprobs.targets import context_parallel_part, context_parallel_whole
from megatron_idempotent.megatron.expert_replay import ROUTED_EXPERTS
from megatron_idempotent.patching.needs import absent, is_provided

from .loss import needs_groups
from .microbatches import (
    ATTENTION_MASK,
    LENGTHS,
    PACK,
    POSITIONS,
    SAMPLE_MASK,
    TOKEN_MASK,
    TOKENS,
    Batch,
    Piece,
    Segments,
    Share,
    doubtful,
    field_of,
    groups_of_rows,
    is_packed,
    pack_in,
    rows_of,
)

if TYPE_CHECKING:
    from .lifecycle import Backend, Options

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
        attention: work that a token adds for each token of its sequence; its other work counts as
            1. About 1 / (6 · hidden size) for a transformer; 0 to count tokens alone.

    Returns:
        The indices of each bin's sequences; no bins without sequences, unless `bins` is 2 or more.

    Raises:
        ValueError: a sequence takes more than `max_tokens`, a length is negative, or a number is
            not a positive int (`bins` may be 0).

    Example:
        for bin in bin_sequences([len(each) for each in sequences], 4096, alignment=alignment):
            pack = Pack.of([len(sequences[index]) for index in bin], alignment)
    """
    for name, value in (("max_tokens", max_tokens), ("bins", bins), ("multiple", multiple)):
        if type(value) is not int or value < (0 if name == "bins" else 1):
            raise ValueError(f"bin_sequences() takes a positive int as {name}, got {value!r}")
    capacity = capacity_of(max_tokens, alignment)
    sizes = [alignment.of_sequence(length) for length in lengths]
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        if length < 0 or size > capacity:
            if length < 0:
                raise ValueError(f"sequence {index} has length {length}: give lengths of 0 or more")
            padded = f", {size} with its padding," if size != length else ""
            usable = f", of which {capacity} can be used" if capacity != max_tokens else ""
            raise ValueError(
                f"sequence {index} has {length} tokens{padded} and a bin at most {max_tokens}"
                f"{usable}: raise the budget, or cut the sequence"
            )
    if not sizes and bins < 2:
        return ()
    work = [size * (1 + attention * size) for size in sizes]
    # The longest first: what comes last fills gaps. Of equals the first, so that ranks agree.
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    tight = _tightly(order, sizes, capacity)
    least = max(-(-sum(sizes) // capacity), bins, 1)
    wanted = {-(-number // multiple) * multiple for number in (least, max(len(tight), least))}
    found: list[list[int]] | None = None
    for number in sorted(wanted):
        found = _evenly(order, sizes, work, number, capacity)
        if found is not None:
            break
    if found is None:
        found = tight + [[] for _ in range(max(wanted) - len(tight))]
    filled = [tuple(sorted(each)) for each in found]
    filled.sort(key=lambda each: (-sum(work[index] for index in each), each))
    return tuple(filled)


def capacity_of(max_tokens: int, alignment: TokenAlignment) -> int:
    """Return the tokens that a pack of at most `max_tokens` can have.

    Raises:
        ValueError: `max_tokens` is less than the smallest pack takes.
    """
    capacity = max_tokens - max_tokens % alignment.pack
    if not capacity:
        raise ValueError(
            f"a budget of {max_tokens} tokens, and packs are multiples of {alignment.pack} tokens "
            f"on these ranks: give at least {alignment.pack}"
        )
    return capacity


def _evenly(
    order: Sequence[int],
    sizes: Sequence[int],
    work: Sequence[float],
    number: int,
    capacity: int,
) -> list[list[int]] | None:
    """Put each sequence into the bin with least work that has room; None if no bin has room."""
    bins: list[list[int]] = [[] for _ in range(number)]
    rooms = [capacity] * number
    heap = [(0.0, place) for place in range(number)]
    for index in order:
        full = []
        while heap and rooms[heap[0][1]] < sizes[index]:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, place = heap[0]
        bins[place].append(index)
        rooms[place] -= sizes[index]
        heapq.heapreplace(heap, (load + work[index], place))
        for each in full:
            heapq.heappush(heap, each)
    return bins


def _tightly(order: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each sequence into the fullest bin that has room for it: close to the fewest bins."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for index in order:
        at = bisect_left(rooms, (sizes[index], -1))
        if at == len(rooms):
            bins.append([])
            room, place = capacity, len(bins) - 1
        else:
            room, place = rooms.pop(at)
        bins[place].append(index)
        insort(rooms, (room - sizes[index], place))
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
    how = {"alignment": alignment, "multiple": multiple, "attention": attention}
    rows = PackedRows(batch, max_tokens, how, shared)
    lists = rows.share(bins if rows.rows or bins > 1 else 0).lists
    return [piece.batch for pieces in lists for piece in pieces]


class PackedRows:
    """Checks the rows of a batch, and packs them into as many bins as ranks have agreed on."""

    def __init__(
        self,
        batch: Batch,
        max_tokens: int,
        how: dict[str, Any],
        shared: Collection[str],
        *,
        grouped: bool = False,
    ) -> None:
        """Take the rows; `how` has the alignment, multiple and work of `bin_sequences`."""
        self.rows = rows_of(batch, shared)
        self._batch, self._max_tokens, self._how = batch, max_tokens, how
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
        self._firsts, self._lengths = real_tokens(batch, self.rows)
        self._bins = self._binned(1 if self.rows else 0)

    @classmethod
    def of_step(
        cls, batch: Batch, begun_with: Mapping[str, Any], options: Options, backend: Backend
    ) -> PackedRows:
        """Return the rows of a batch that a step with a budget is to pack.

        Raises:
            ValueError: the batch cannot be packed within the budget.
        """
        how = {
            "alignment": options.alignment or backend.alignment,
            "multiple": backend.microbatch_multiple,
            "attention": backend.attention,
        }
        tokens, grouped = begun_with["max_tokens_per_microbatch"], needs_groups(begun_with["loss"])
        return cls(batch, tokens, how, options.shared, grouped=grouped)

    @property
    def bins(self) -> int:
        """The number of packs that the rows need; 0 without rows."""
        return len(self._bins)

    def share(self, bins: int) -> Share:
        """Make at least `bins` packs, which are run in one call.

        There are no more packs than rows, rounded up to the multiple that a call takes.
        """
        multiple = self._how["multiple"]
        most = min(bins, -(-max(self.rows, 1) // multiple) * multiple)
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
            return bin_sequences(self._lengths, self._max_tokens, bins=bins, **self._how)
        except ValueError as error:
            raise ValueError(f"microbatch() got {self.rows} rows, of which {error}") from None

    def _piece(self, rows: tuple[int, ...]) -> Piece:
        tokens_BT = self._batch[TOKENS]
        lengths = [self._lengths[row] for row in rows]
        alignment = self._how["alignment"]
        # A pack of no sequences is of the least padding that can be computed.
        tokens = None if sum(lengths) else alignment.pack
        pack = Pack.of(lengths, alignment, tokens=tokens, device=tokens_BT.device)
        # Where each token is among all of the batch's, one row after the other.
        width = 0 if tokens_BT.is_nested else tokens_BT.shape[1]
        starts = [self._firsts[row] + row * width for row in rows]
        spans = zip(starts, lengths, strict=True)
        place_N = torch.cat([torch.arange(0), *(torch.arange(at, at + n) for at, n in spans)])
        found = {
            name: value
            if name in self._shared
            else _chosen(name, value, rows, place_N, pack, tokens_BT)
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


def _chosen(
    name: str, value: Any, rows: tuple[int, ...], place_N: Tensor, pack: Pack, tokens_BT: Tensor
) -> Any:
    """Take the rows of one pack out of a value of the batch, whose tokens are at `place_N`."""
    if isinstance(value, (list, tuple)):
        chosen = [value[row] for row in rows]
        return chosen if isinstance(value, list) else tuple(chosen)
    if not isinstance(value, Tensor):
        return value
    if value.is_nested:
        jagged: Any = value
        flat = jagged.values()
    elif not tokens_BT.is_nested and value.shape[:2] == tokens_BT.shape[:2]:
        flat = value.flatten(0, 1)
    else:
        index_n = torch.tensor(rows, dtype=torch.int64, device=value.device)
        return value.index_select(0, index_n)
    # The batch's values [all tokens, …], laid out as the pack's [1, S, …].
    picked = flat.index_select(0, place_N.to(value.device))
    joined = picked.new_full((pack.tokens, *picked.shape[1:]), _FILLS.get(name, 0))
    return joined.index_copy(0, pack.place_N.to(value.device), picked)[None]


def real_tokens(batch: Batch, rows: int) -> tuple[list[int], list[int]]:
    """Return the place of each row's first token, in its row or in a nested batch, and its length.

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
    """Return where each row begins among all of a nested tensor's, and the lengths."""
    ends = nested.offsets().tolist()
    return ends[:-1], [end - start for start, end in itertools.pairwise(ends)]


def _runs(real_BT: Tensor, width: int) -> tuple[list[int], list[int]]:
    """Return first place and number of the real tokens of each row, which lie side by side."""
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


def segments_of(batch: Any) -> Segments | None:
    """Return the sequences of a microbatch that holds a pack; None if its sequences are rows.

    A pack is a `Pack`, Megatron's `PackedSeqParams`, or a tensor `cu_seqlens`, with
    `cu_seqlens_padded` where sequences are padded. A tensor on a device is read by the host.

    Raises:
        ValueError: the borders do not begin at 0, fall, leave a sequence no room, or do not end
            with the last token.
    """
    found = pack_in(batch)
    if isinstance(found, Pack):
        tokens = field_of(batch, TOKENS)
        if isinstance(tokens, Tensor) and tokens.numel() != found.tokens:
            raise ValueError(
                f"whose Pack has {found.tokens} tokens, and whose {TOKENS!r} has "
                f"{tokens.numel()}: give one for each token of the Pack, padding included"
            )
        return segments_of_pack(found)
    if found is not None:
        padded = getattr(found, "cu_seqlens_q_padded", None)
        return _checked(found.cu_seqlens_q, padded, batch)
    borders = field_of(batch, "cu_seqlens")
    if borders is None:
        return None
    return _checked(borders, field_of(batch, "cu_seqlens_padded"), batch)


def segments_of_pack(pack: Pack) -> Segments:
    """Return the sequences of a pack, which the host knows."""
    starts = itertools.accumulate(pack.segments, initial=0)
    return Segments(starts=tuple(starts)[: len(pack.lengths)], lengths=pack.lengths)


def _checked(borders: Any, padded: Any, batch: Any) -> Segments:
    ends = [int(each) for each in torch.as_tensor(borders).reshape(-1).tolist()]
    places = ends
    if padded is not None:
        places = [int(each) for each in torch.as_tensor(padded).reshape(-1).tolist()]
    for name, found in (("cu_seqlens", ends), ("cu_seqlens_padded", places)):
        if not found or found[0] != 0:
            raise ValueError(f"whose {name} begin with {found[:1]}: let them begin with 0")
        for index, (start, end) in enumerate(itertools.pairwise(found)):
            if end < start:
                raise ValueError(
                    f"whose {name} fall from {start} to {end} in sequence {index}: give rising ones"
                )
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    rooms = [end - start for start, end in itertools.pairwise(places)]
    if len(rooms) != len(lengths):
        raise ValueError(
            f"whose cu_seqlens have {len(lengths)} sequences, and cu_seqlens_padded {len(rooms)}: "
            "give both the same"
        )
    for index, (length, room) in enumerate(zip(lengths, rooms, strict=True)):
        if length > room:
            raise ValueError(
                f"whose sequence {index} has {length} tokens and {room} places: let "
                "cu_seqlens_padded leave it as many or more"
            )
    tokens = field_of(batch, TOKENS)
    if isinstance(tokens, Tensor) and not tokens.is_nested and places[-1] != tokens.numel():
        raise ValueError(
            f"whose cu_seqlens end at {places[-1]}, and which has {tokens.numel()} tokens: let "
            "them end with the last token, padding included"
        )
    return Segments(starts=tuple(places[:-1]), lengths=tuple(lengths))


def packed_counts(batch: Any, segments: Segments) -> Tensor:
    """Return valid sequences and tokens of a pack, float64 [2], as `valid_counts` does of rows.

    `sample_mask` is [n], one for each sequence; `token_mask` has an entry for each of the pack's
    tokens, and the first of each sequence does not count. Empty sequences do not count.
    """
    sample_mask_n, token_mask_T = field_of(batch, SAMPLE_MASK), field_of(batch, TOKEN_MASK)
    masks = [each for each in (sample_mask_n, token_mask_T) if isinstance(each, Tensor)]
    device = masks[0].device if masks else torch.device("cpu")
    lengths_n = torch.tensor(segments.lengths, dtype=torch.int64, device=device)
    there_n = (lengths_n > 0).double()
    if sample_mask_n is not None:
        if sample_mask_n.numel() != len(segments.lengths):
            raise ValueError(
                f"whose {SAMPLE_MASK!r} has {sample_mask_n.numel()} entries for "
                f"{len(segments.lengths)} sequences: give one for each"
            )
        there_n = there_n * sample_mask_n.reshape(-1).double()
    if token_mask_T is None:
        tokens_n = (lengths_n - 1).clamp(min=0).double()
    else:
        ends = [sum(each) for each in zip(segments.starts, segments.lengths, strict=True)]
        end = max(ends, default=0)
        tokens = field_of(batch, TOKENS)
        known = isinstance(tokens, Tensor) and not tokens.is_nested
        whole = tokens.numel() if known else token_mask_T.numel()
        if token_mask_T.numel() != whole or token_mask_T.numel() < end:
            needed = f"which has {whole} tokens" if known else f"whose sequences end at {end}"
            raise ValueError(
                f"whose {TOKEN_MASK!r} has {token_mask_T.numel()} entries, and {needed}: give one "
                "for each token, padding included"
            )
        sums_T = torch.nn.functional.pad(token_mask_T.reshape(-1).double(), (1, 0)).cumsum(0)
        starts_n = torch.tensor(segments.starts, dtype=torch.int64, device=device)
        last = len(sums_T) - 1
        first_n = (starts_n + 1).clamp(max=last)
        tokens_n = (sums_T[starts_n + lengths_n] - sums_T[first_n]) * (lengths_n > 0)
    return torch.stack((there_n, there_n * tokens_n)).sum(1)


def packed_inputs(model: Any, microbatch: Batch) -> dict[str, Any]:
    """Return the arguments that a `GPTModel` is called with for a pack, see `gpt_inputs`."""
    from megatron.core.utils import get_model_config

    tokens, positions = microbatch[TOKENS], microbatch.get(POSITIONS)
    pack = pack_in(microbatch)
    packed = _packed_seq_params(microbatch, pack)
    tokens_1T = tokens[None] if tokens.dim() == 1 else tokens
    if tokens_1T.dim() != 2 or len(tokens_1T) != 1:
        raise ValueError(
            f"gpt_forward() got a pack with {TOKENS!r} of {tuple(tokens.shape)}: give it as "
            "[1, positions] or [positions]"
        )
    if positions is None:
        counted = isinstance(pack, Pack)
        positions = pack.position_ids if counted else _positions(packed, tokens_1T)
    found = {TOKENS: tokens_1T, POSITIONS: positions[None] if positions.dim() == 1 else positions}
    if isinstance(pack, Pack) and 0 < sum(pack.lengths) < pack.tokens:
        found |= padding_inputs(get_model_config(model), pack.mask[None])
    borders = _borders(packed)
    parts = {name: own_positions(value, cu_seqlens=borders) for name, value in found.items()}
    return {**parts, ATTENTION_MASK: None, "packed_seq_params": packed}


def _packed_seq_params(microbatch: Batch, pack: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    if isinstance(pack, Pack):
        borders, longest = pack.cu_seqlens, pack.max_seqlen
    elif pack is not None:
        return pack
    else:
        given = microbatch.get("cu_seqlens_padded")
        given = microbatch["cu_seqlens"] if given is None else given
        borders = given.reshape(-1).to(torch.int32)
        known = microbatch.get("max_seqlen")
        longest = int(borders.diff().amax() if known is None else known)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _borders(packed: Any) -> Any:
    padded = packed.cu_seqlens_q_padded
    return packed.cu_seqlens_q if padded is None else padded


def own_routes(microbatch: Any) -> Tensor:
    """Return a microbatch's routed experts [B, T, L, K] at this rank's `own_positions`."""
    given: Tensor = field_of(microbatch, ROUTED_EXPERTS)
    given = given[None] if given.dim() == 3 else given
    if context_parallel_ranks()[1] == 1:
        return given
    borders = None
    if is_packed(microbatch):
        borders = _borders(_packed_seq_params(microbatch, pack_in(microbatch))).to(given.device)
    return own_positions(given, cu_seqlens=borders)


def _positions(packed: Any, tokens_1T: Tensor) -> Tensor:
    """Count positions [T] from 0 in each sequence, and in the padding after the last one."""
    borders: Tensor = _borders(packed).to(tokens_1T.device, torch.int64)
    place_T = torch.arange(tokens_1T.shape[1], device=tokens_1T.device)
    number_T = torch.searchsorted(borders[1:].contiguous(), place_T, right=True)
    return place_T - borders[number_T]


def has_auxiliary_losses(config: Any) -> bool:
    """Tell if a model with this config has routers or MTP heads, whose losses count positions."""
    routes = getattr(config, "num_moe_experts", None) is not None
    return routes or bool(getattr(config, "mtp_num_layers", None))


def padding_inputs(config: Any, real_BT: Tensor) -> dict[str, Tensor]:
    """Return arguments that tell routers and MTP heads which positions are no padding."""
    from megatron.core.models.gpt import GPTModel

    found: dict[str, Tensor] = {}
    balanced = getattr(config, "moe_router_load_balancing_type", None)
    routes = getattr(config, "num_moe_experts", None) is not None
    if routes and balanced != "quantile_balancing":  # quantiles know no padding
        knows = "padding_mask" in inspect.signature(GPTModel.forward).parameters
        if getattr(config, "moe_router_enable_expert_bias", False):
            # Upstream combines masks of other shapes for the bias.
            name = "expert-bias-knows-padding"
            knows = knows and (is_provided(name) or not absent(name, a_door=False))
        if knows:
            found["padding_mask"] = ~real_BT
    if getattr(config, "mtp_num_layers", None):
        found["loss_mask"] = real_BT.float()
    return found


def context_parallel_ranks() -> tuple[int, int]:
    """Return this rank's place in its context-parallel group, and its size; (0, 1) without one."""
    from megatron.core import parallel_state  # FSDPTrainStep packs without Megatron

    if not parallel_state.model_parallel_is_initialized():
        return 0, 1
    return (
        int(parallel_state.get_context_parallel_rank()),
        int(parallel_state.get_context_parallel_world_size()),
    )


def own_positions(values: Tensor, *, dim: int = 1, cu_seqlens: Tensor | None = None) -> Tensor:
    """Cut whole rows, or a whole pack, down to the positions that this rank computes.

    Without context parallelism these are all. Shift targets before you cut them: the position after
    a part's last one is on another rank.

    Args:
        values: [B, T, …], the same on all context-parallel ranks.
        dim: the dimension of positions.
        cu_seqlens: [n + 1], the borders of a pack's n sequences, padding included; None for rows.

    Returns:
        [B, T / ranks, …]

    Raises:
        ValueError: the positions are no multiple of 2 * ranks.

    Example:
        stats = token_logprobs(logits=output, targets=own_positions(shift_targets(tokens_BT)))
    """
    rank, size = context_parallel_ranks()
    return context_parallel_part(values, rank=rank, size=size, dim=dim, cu_seqlens=cu_seqlens)


def all_positions(part: Tensor, *, dim: int = 1, cu_seqlens: Tensor | None = None) -> Tensor:
    """Gather what `own_positions` has cut, for a loss over whole sequences. A collective.

    All ranks of a context-parallel group take part. In the backward each rank keeps the gradient of
    its own positions, without a collective: all of these ranks compute the same loss of whole
    sequences, and the model's gradients are summed over them.

    Args:
        part: [B, T / ranks, …], this rank's positions.
        dim: the dimension of positions.
        cu_seqlens: as for `own_positions`.

    Returns:
        [B, T, …], the same on all context-parallel ranks.

    Example:
        logprob_BT = all_positions(stats.logprob)  # and the loss says context_parallel = "whole"
    """
    if context_parallel_ranks()[1] == 1:
        return part
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    return context_parallel_whole(part, group=group, cu_seqlens=cu_seqlens, dim=dim)
