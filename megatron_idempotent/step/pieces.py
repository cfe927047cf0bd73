"""Describes one microbatch as a step runs it: its content, its shape, and what is valid in it.

Legend: B rows, T positions of a row, n sequences of a pack, T of a pack all of its tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_idempotent.fp8.packing import Pack

from .records import COUNTS, POSITIONS, SAMPLE_MASK, TOKEN_MASK, TOKENS, Options

Shape = tuple[int, int]
"""Rows and positions of a microbatch: what a schedule calls micro_batch_size and seq_length."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Says where a pack's sequences are, on the host.

    Example: `Segments(starts=(0, 8), lengths=(5, 3))`.
    """

    starts: tuple[int, ...]
    """The place of each sequence's first token."""
    lengths: tuple[int, ...]
    """The tokens of each sequence, padding left out; 0 for an empty one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Holds one microbatch. Example: `Piece(batch=batch, shape=(4, 512), sequences=4)`."""

    batch: Any
    """The argument of `forward` and the loss."""
    shape: Shape
    sequences: int
    """The number of sequences, masked ones included: rows, or a pack's that are not empty."""
    segments: Segments | None = None
    """The sequences of a pack; None if the sequences are rows."""
    counts: Tensor | None = None
    """Valid sequences and tokens, float64 [2]; None if they are counted for a whole batch."""

    @property
    def positions(self) -> int:
        """The number of positions in all rows."""
        return self.shape[0] * self.shape[1]

    @property
    def tokens(self) -> int:
        """The number of positions without the padding of a pack."""
        return self.positions if self.segments is None else sum(self.segments.lengths)


def ready_pieces(microbatches: Sequence[Any], options: Options) -> list[Piece]:
    """Find shape and counts of microbatches that a caller has made; they are run as they are.

    Raises:
        ValueError: not a sequence of microbatches, or a microbatch whose shape or counts are not
            known; the message has its index.
    """
    if isinstance(microbatches, (str, bytes, Mapping)) or not isinstance(microbatches, Sequence):
        raise ValueError(
            f"microbatch() got a {type(microbatches).__name__} as microbatches: pass a list of them"
        )
    found = []
    for index, batch in enumerate(microbatches):
        try:
            found.append(_piece(batch, options))
        except ValueError as error:
            raise ValueError(f"microbatch() got microbatches[{index}], {error}") from None
    return found


def _piece(batch: Any, options: Options) -> Piece:
    shape = _shape(batch, options.shape)
    segments = segments_of(batch)
    sequences = shape[0] if segments is None else sum(length > 0 for length in segments.lengths)
    if options.counts is not None:
        counts = _given(options.counts(batch))
    elif (given := field_of(batch, COUNTS)) is not None:
        counts = _given(given)
    elif segments is not None:
        check_zeros_and_ones(batch)
        counts = doubtful(packed_counts(batch, segments), batch)
    elif isinstance(field_of(batch, TOKENS), Tensor):
        _check_masks(batch)
        check_zeros_and_ones(batch)
        counts = doubtful(valid_counts(batch), batch)
    else:
        raise ValueError(
            f"a {type(batch).__name__} that does not say how many valid sequences and tokens it "
            f"has: put {COUNTS!r} into it, or make the step with counts="
        )
    return Piece(batch=batch, shape=shape, sequences=sequences, segments=segments, counts=counts)


def _shape(batch: Any, ask: Callable[[Any], Shape] | None) -> Shape:
    if ask is not None:
        found = ask(batch)
        whole = isinstance(found, (tuple, list)) and len(found) == 2
        if not whole or any(type(each) is not int or each < 1 for each in found):
            raise ValueError(f"for which shape= returned {found!r}: give (rows, positions)")
        return found[0], found[1]
    tokens = field_of(batch, TOKENS)
    if not isinstance(tokens, Tensor) or not tokens.dim():
        raise ValueError(
            f"a {type(batch).__name__} whose {TOKENS!r} is "
            f"{'not there' if tokens is None else type(tokens).__name__}: give it that tensor, "
            "[rows, positions] or [positions], or make the step with shape="
        )
    if tokens.is_nested:
        lengths = [len(each) for each in tokens.unbind()]
        return len(lengths), max(lengths, default=0)
    if tokens.dim() == 1:
        return 1, int(tokens.shape[0])
    return int(tokens.shape[0]), int(tokens.shape[1])


def field_of(batch: Any, name: str) -> Any:
    """Returns an item of a mapping or a TensorDict, or an attribute; None if there is none."""
    get = getattr(batch, "get", None)
    if callable(get):
        return get(name, None)  # a TensorDict raises without a default
    return getattr(batch, name, None)


def _given(counts: Any) -> Tensor:
    if isinstance(counts, Tensor):
        if tuple(counts.shape) != (2,):
            raise ValueError(
                f"whose counts have shape {tuple(counts.shape)}: give [2], valid sequences and "
                "tokens"
            )
        if counts.dtype == torch.bool or counts.is_complex():
            raise ValueError(f"whose counts are of {counts.dtype}: give two numbers")
        found = counts.detach().to(torch.float64)
        if not on_host(found):
            return torch.where((found >= 0) & (found <= _MOST), found, math.nan)
        counts = found.tolist()
    pair = isinstance(counts, (tuple, list)) and len(counts) == 2
    if not pair or not all(_is_count(each) for each in counts):
        raise ValueError(
            f"whose counts are {counts!r}: give (valid sequences, valid tokens), two numbers from "
            f"0 to {_MOST:g}"
        )
    return torch.tensor(counts, dtype=torch.float64)


# Above it float64 leaves numbers out, so that it is no count.
_MOST = 2.0**53


def _is_count(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value <= _MOST


def on_host(values: Tensor) -> bool:
    """Returns whether the host can look at the values without a wait for a device."""
    return values.device.type == "cpu"


def check_zeros_and_ones(batch: Any) -> None:
    """Raise `ValueError` if a mask on the host has another value than 0 and 1.

    A step counts what is valid, and a loss may multiply by a mask or ask what is above 0: with any
    other value the two differ without a word.
    """
    for name, mask in _numeric_masks(batch):
        if not on_host(mask):
            continue
        jagged: Any = mask
        values = jagged.values() if mask.is_nested else mask
        wrong = (values != 0) & (values != 1)
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            value = values[tuple(place)].item()
            if mask.is_nested:
                starts = jagged.offsets().tolist()
                row = max(index for index, start in enumerate(starts) if start <= place[0])
                place = [row, place[0] - starts[row]]
            where = ", ".join(
                f"{of} {at}" for of, at in zip(("row", "position"), place, strict=False)
            )
            raise ValueError(
                f"whose {name!r} has {value!r} in {where}: give 1 for what counts and 0 for all "
                "else. Weights belong into a value of another name"
            )


def doubtful(counts: Tensor, batch: Any) -> Tensor:
    """Returns the counts [2], NaN if a mask on a device has another value than 0 and 1.

    The host reads counts at the end of a step, and waits for the device no more often.
    """
    for _, mask in _numeric_masks(batch):
        if not on_host(mask):
            values = mask.values() if mask.is_nested else mask
            wrong = ((values != 0) & (values != 1)).any()
            counts = torch.where(wrong.to(counts.device), math.nan, counts)
    return counts


def _numeric_masks(batch: Any) -> list[tuple[str, Tensor]]:
    masks = ((name, field_of(batch, name)) for name in (SAMPLE_MASK, TOKEN_MASK))
    return [(n, m) for n, m in masks if isinstance(m, Tensor) and m.dtype != torch.bool]


def valid_counts(batch: Any) -> Tensor:
    """Count the valid sequences and tokens of rows, as a step does. For `TrainStep(counts=…)`.

    tokens = sum of token_mask[:, 1:] x sample_mask: the first token of a sequence is never
    predicted. Without a token mask, tokens are sequences x positions, or in nested rows all but
    the first of each; without a sample mask all sequences are valid.

    Args:
        batch: a mapping or an object with `input_ids` [B, T], and perhaps `sample_mask` [B] and
            `token_mask` [B, T].

    Returns:
        float64 [2] on the batch's device: sequences, tokens.

    Example:
        sequences, tokens = valid_counts({"input_ids": tokens_BT, "token_mask": mask_BT})
    """
    tokens_BT = field_of(batch, TOKENS)
    rows = tokens_BT.shape[0]
    sample_mask_B = field_of(batch, SAMPLE_MASK)
    if sample_mask_B is None:
        sample_mask_B = torch.ones(rows, device=tokens_BT.device)
    sample_mask_B = sample_mask_B.double()
    token_mask_BT = field_of(batch, TOKEN_MASK)
    tokens_B: Tensor | int
    if token_mask_BT is not None and token_mask_BT.is_nested:
        tokens_B = torch.stack([each[1:].sum(dtype=torch.float64) for each in token_mask_BT])
    elif token_mask_BT is not None:
        tokens_B = token_mask_BT[:, 1:].sum(1, dtype=torch.float64)
    elif tokens_BT.is_nested:
        predicted = [max(len(each) - 1, 0) for each in tokens_BT.unbind()]
        tokens_B = torch.tensor(predicted, dtype=torch.float64, device=sample_mask_B.device)
    else:
        tokens_B = tokens_BT.shape[1]
    return torch.stack((sample_mask_B, sample_mask_B * tokens_B)).sum(1)


def segments_of(batch: Any) -> Segments | None:
    """Returns the sequences of a microbatch that holds a pack; None if its sequences are rows.

    A pack is a `Pack`, Megatron's `PackedSeqParams`, or a tensor `cu_seqlens`, with
    `cu_seqlens_padded` where sequences are padded. A tensor on a device is read by the host.

    Raises:
        ValueError: the borders do not begin at 0, fall, leave a sequence no room, or do not end
            with the last token.
    """
    for value in _values(batch):
        if isinstance(value, Pack):
            _check_pack(value, batch)
            return segments_of_pack(value)
        if getattr(value, "cu_seqlens_q", None) is not None:
            padded = getattr(value, "cu_seqlens_q_padded", None)
            return _checked(value.cu_seqlens_q, padded, batch)
    borders = field_of(batch, "cu_seqlens")
    if borders is None:
        return None
    return _checked(borders, field_of(batch, "cu_seqlens_padded"), batch)


def segments_of_pack(pack: Pack) -> Segments:
    """Returns the sequences of a pack, which the host knows."""
    starts = itertools.accumulate(pack.segments, initial=0)
    return Segments(starts=tuple(starts)[: len(pack.lengths)], lengths=pack.lengths)


def _check_pack(pack: Pack, batch: Any) -> None:
    tokens = field_of(batch, TOKENS)
    if isinstance(tokens, Tensor) and tokens.numel() != pack.tokens:
        raise ValueError(
            f"whose Pack has {pack.tokens} tokens, and whose {TOKENS!r} has {tokens.numel()}: give "
            "one for each token of the Pack, padding included"
        )


def _values(batch: Any) -> list[Any]:
    if callable(getattr(batch, "values", None)):
        return list(batch.values())
    if dataclasses.is_dataclass(batch):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return []


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
    """Returns valid sequences and tokens of a pack, float64 [2], as `valid_counts` does of rows.

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
        _check_packed_mask(batch, token_mask_T, max(ends, default=0))
        sums_T = torch.nn.functional.pad(token_mask_T.reshape(-1).double(), (1, 0)).cumsum(0)
        starts_n = torch.tensor(segments.starts, dtype=torch.int64, device=device)
        last = len(sums_T) - 1
        first_n = (starts_n + 1).clamp(max=last)
        tokens_n = (sums_T[starts_n + lengths_n] - sums_T[first_n]) * (lengths_n > 0)
    return torch.stack((there_n, there_n * tokens_n)).sum(1)


def _check_packed_mask(batch: Any, token_mask: Tensor, end: int) -> None:
    """Raise `ValueError` unless a mask has an entry for each token, or covers all sequences."""
    tokens = field_of(batch, TOKENS)
    known = isinstance(tokens, Tensor) and not tokens.is_nested
    whole = tokens.numel() if known else token_mask.numel()
    if token_mask.numel() != whole or token_mask.numel() < end:
        needed = f"which has {whole} tokens" if known else f"whose sequences end at {end}"
        raise ValueError(
            f"whose {TOKEN_MASK!r} has {token_mask.numel()} entries, and {needed}: give one for "
            "each token, padding included"
        )


def _check_masks(batch: Any) -> None:
    """Raise `ValueError` unless the masks of rows have the shape of their tokens."""
    tokens_BT = field_of(batch, TOKENS)
    if tokens_BT.is_nested or tokens_BT.dim() < 2:
        return
    wanted = {SAMPLE_MASK: tuple(tokens_BT.shape[:1]), TOKEN_MASK: tuple(tokens_BT.shape[:2])}
    for name, shape in wanted.items():
        mask = field_of(batch, name)
        if isinstance(mask, Tensor) and tuple(mask.shape) != shape:
            raise ValueError(
                f"whose {name!r} has shape {tuple(mask.shape)}: give it {shape}, as its tokens"
            )


class Tables(NamedTuple):
    """Says how many rows a model's tables of embeddings have, by what looks them up."""

    tokens: int | None
    positions: int | None
    """None where positions are not looked up."""


def check_ids(tables: Tables, lists: Sequence[Sequence[Piece]], *, read: bool) -> None:
    """Raise `ValueError` for tokens or positions that the model's tables do not have.

    The host looks at those that it holds, and with `read` waits for those on a device.
    """
    if tables == Tables(None, None):
        return
    for index, piece in enumerate(itertools.chain.from_iterable(lists)):
        told = outside(tables, piece.batch, read=read)
        if told is not None:
            raise ValueError(f"microbatch() got a batch whose microbatch {index} {told}")


def outside(tables: Tables, microbatch: Any, *, read: bool) -> str | None:
    """Describe the first token or position that the tables do not have; None without one."""
    tokens = field_of(microbatch, TOKENS)
    positions = field_of(microbatch, POSITIONS)
    known = tables.positions
    if known is not None and positions is None and isinstance(tokens, Tensor):
        longest = int(tokens.shape[-1])
        if longest > known and segments_of(microbatch) is None:
            return (
                f"has rows of {longest} positions, and the model has {known}: cut them, or build "
                "it with a larger max_sequence_length"
            )
    for name, values, size in (
        (TOKENS, tokens, tables.tokens),
        (POSITIONS, positions, tables.positions),
    ):
        if size is None or not isinstance(values, Tensor) or not values.numel():
            continue
        if not read and not on_host(values):
            continue
        found = values.values() if values.is_nested else values
        least, most = (int(each) for each in found.aminmax())
        if least < 0 or most >= size:
            place = ((found < 0) | (found >= size)).nonzero()[0].tolist()
            *row, position = place
            where = f"row {row[0] if row else 0}, position {position}"
            return (
                f"has {int(found[tuple(place)])} in {name!r} at {where}, and the model's table "
                f"has {size} entries, 0 to {size - 1}"
            )
    return None
