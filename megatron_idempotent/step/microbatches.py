"""Makes microbatches of what a caller gives, counts what is valid, and plans the calls of ranks.

Legend: B rows of the batch, T positions of a row, n sequences.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from megatron_idempotent.fp8.packing import Pack
from megatron_idempotent.logprobs.errors import not_dense
from megatron_idempotent.megatron.replica_check import checksum

from .loss import called, is_number, needs_groups

if TYPE_CHECKING:
    from .lifecycle import Options
    from .open_step import RankStatus

Batch = Mapping[str, Any]
"""Tensors, lists and tuples with an item per row; scalars, and what a step shares, are for all."""

TOKENS, SAMPLE_MASK, TOKEN_MASK = "input_ids", "sample_mask", "token_mask"
"""Names in a batch of the rows' tokens [B, T], and of the masks of valid rows [B] and tokens."""

POSITIONS = "position_ids"
"""Name in a batch of each token's position [B, T], if the model is not to count them itself."""

COUNTS = "counts"
"""Name in a ready microbatch of its valid sequences and tokens, if the caller has counted."""

LENGTHS, ATTENTION_MASK = "lengths", "attention_mask"
"""Names in a batch of each row's number of real tokens [B], and of their mask [B, T]; budgets of
tokens need one."""

PACK = "pack"
"""Name in a microbatch of the `Pack` that a step has made of rows."""

GROUP_IDS = "group_ids"
"""Name in a batch of the id of each sequence's group, if a loss is divided by groups."""

ListShape = tuple[int, int, int, int]
"""Microbatches of one call: how many, their largest rows and positions, and a checksum of all
shapes, 0 for rows of one shape."""

# No rows can be taken out of these, so they are the same for all of them.
_SCALARS = (bool, int, float, str, bytes, type(None))

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
        """The number of positions without padding, read from the device for rows with lengths."""
        if self.segments is not None:
            return sum(self.segments.lengths)
        lengths = field_of(self.batch, LENGTHS)
        if lengths is None:
            return self.positions
        return int(torch.as_tensor(lengths).clamp(max=self.shape[1]).sum()) or self.positions

    @property
    def may_be_padded(self) -> bool:
        """True if it is known where padding is."""
        return self.segments is not None or field_of(self.batch, LENGTHS) is not None


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
    """Cut a batch into microbatches, or take microbatches that are ready, as they are.

    Raises:
        ValueError: both a batch and microbatches, or one that cannot be run or counted; the message
            has the index of a ready one.
    """
    grouped = needs_groups(begun_with["loss"])
    if ready is not None:
        if batch is not None:
            raise ValueError(
                "microbatch() got a batch and microbatches: pass rows to be cut, or a list of "
                "microbatches that are run as they are"
            )
        if isinstance(ready, (str, bytes, Mapping)) or not isinstance(ready, Sequence):
            raise ValueError(
                f"microbatch() got a {type(ready).__name__} as microbatches: pass a list of them"
            )
        pieces, groups = [], []
        for index, each in enumerate(ready):
            try:
                piece = _piece(each, options)
                if grouped:
                    segments = piece.segments
                    number = piece.sequences if segments is None else len(segments.lengths)
                    groups.append(group_ids(each, number))
            except ValueError as error:
                raise ValueError(f"microbatch() got microbatches[{index}], {error}") from None
            pieces.append(piece)
        return Share(
            sequences=sum(piece.sequences for piece in pieces),
            lists=[pieces] if pieces else (),
            counts=[piece.counts for piece in pieces if piece.counts is not None],
            groups=groups,
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
    if batch[TOKENS].is_nested:
        raise ValueError(
            f"microbatch() got {rows} nested rows, and begin() micro_batch_size={size}, which cuts "
            "rows of one length: begin with max_tokens_per_microbatch, or pass microbatches=[…]"
        )
    return Share(
        sequences=rows,
        lists=split(batch, rows, size, options.shared),
        counts=[doubtful(valid_counts(batch), batch)],
        groups=groups_of_rows(batch, rows, options.shared) if grouped else (),
    )


def rows_of(batch: Any, shared: Collection[str] = ()) -> int:
    """Check a batch, and return its number of rows, B.

    Values named in `shared` may be anything; all others have B rows, or are scalars.

    Raises:
        ValueError: the batch is no mapping or has no `input_ids` [B, T], or a value has another
            number of rows, no rows, or is a `Pack`; or a mask is not of zeros and ones.
    """
    tokens_BT = batch.get(TOKENS) if hasattr(batch, "get") else None
    if not isinstance(tokens_BT, Tensor) or tokens_BT.dim() < 2:
        raise ValueError(
            f"microbatch() got a {type(batch).__name__} whose {TOKENS!r} is "
            f"{_told_value(tokens_BT)}: pass a mapping of tensors with "
            f"{TOKENS!r} of shape [rows, positions]"
        )
    rows = int(tokens_BT.shape[0])
    other = {
        name: tuple(value.shape)
        for name, value in batch.items()
        if isinstance(value, Tensor)
        and name not in shared
        and (value.dim() == 0 or value.shape[0] != rows)
    }
    if other:
        raise ValueError(
            f"microbatch() got {rows} rows of {TOKENS!r}, and tensors of other shapes: {other}; "
            "the first dimension of every tensor is the rows. Name one that all rows share in "
            "shared=(…) when you make the step"
        )
    for name, value in batch.items():
        _refuse_rowless(name, value, rows, name in shared)
    for name, dims in ((SAMPLE_MASK, 1), (TOKEN_MASK, 2)):
        mask = batch.get(name)
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != dims):
            raise ValueError(
                f"microbatch() got {name!r} of {_told_value(mask)}: {SAMPLE_MASK!r} is [rows] and "
                f"{TOKEN_MASK!r} [rows, positions], of zeros and ones"
            )
    mask_BT = batch.get(TOKEN_MASK)
    # One more than there are inputs, where these are a sequence without its last token.
    allowed = (tokens_BT.shape[1], tokens_BT.shape[1] + 1) if not tokens_BT.is_nested else ()
    if mask_BT is not None and allowed and mask_BT.shape[1] not in allowed:
        raise ValueError(
            f"microbatch() got {TOKEN_MASK!r} of {tuple(mask_BT.shape)} for {TOKENS!r} of "
            f"{tuple(tokens_BT.shape)}: give one for each position"
        )
    try:
        check_zeros_and_ones(batch)
    except ValueError as error:
        raise ValueError(f"microbatch() got a batch {error}") from None
    return rows


def _refuse_rowless(name: str, value: Any, rows: int, shared: bool) -> None:
    """Raise `ValueError` for a value with a pack, or with another number of items than rows."""
    per_row = isinstance(value, (list, tuple))
    for each in value if per_row else (value,):
        if isinstance(each, Pack):
            raise ValueError(
                f"microbatch() got {name!r} with a Pack of {len(each.lengths)} sequences and "
                f"{sum(each.lengths)} tokens, which would count as one sequence of {each.tokens} "
                "tokens, and cannot be cut into rows: send a list of packs as microbatches=[…], or "
                "one sequence a row"
            )
    fits = shared or isinstance(value, (Tensor, *_SCALARS)) or (per_row and len(value) == rows)
    if not fits:
        told = f"a {type(value).__name__}{f' of {len(value)} items' if per_row else ''}"
        raise ValueError(
            f"microbatch() got {name!r}, {told}, for {rows} rows of {TOKENS!r}: give a tensor, "
            "list or tuple with an item per row, or if all rows share it, name it in "
            f"shared=({name!r},) when you make the step"
        )


def _told_value(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def split(batch: Batch, rows: int, size: int, shared: Collection[str] = ()) -> list[list[Piece]]:
    """Cut a batch into microbatches of `size` rows, in order; rows left over are a smaller one.

    Returns a list for each size, because the messages of a pipeline have one shape per schedule
    call.
    """
    whole = rows - rows % size
    cuts = [[(start, start + size) for start in range(0, whole, size)]]
    if whole < rows:
        cuts.append([(whole, rows)])
    positions = int(batch[TOKENS].shape[1])
    by_row = {
        name: value
        for name, value in batch.items()
        if isinstance(value, (Tensor, list, tuple)) and name not in shared
    }
    return [
        [
            Piece(
                batch={**batch, **{name: value[start:end] for name, value in by_row.items()}},
                shape=(end - start, positions),
                sequences=end - start,
            )
            for start, end in each
        ]
        for each in cuts
        if each
    ]


def _piece(batch: Any, options: Options) -> Piece:
    shape = _shape(batch, options.shape)
    segments: Segments | None = None
    if is_packed(batch):
        from .packs import packed_counts, segments_of

        segments = segments_of(batch)
    sequences = shape[0] if segments is None else sum(length > 0 for length in segments.lengths)
    if options.counts is not None:
        counts = _given(called("counts", options.counts, batch))
    elif (given := field_of(batch, COUNTS)) is not None:
        counts = _given(given)
    elif segments is not None:
        check_zeros_and_ones(batch)
        counts = doubtful(packed_counts(batch, segments), batch)
    elif isinstance(field_of(batch, TOKENS), Tensor):
        tokens_BT = field_of(batch, TOKENS)
        whole = not tokens_BT.is_nested and tokens_BT.dim() > 1
        for name, dims in ((SAMPLE_MASK, 1), (TOKEN_MASK, 2)) if whole else ():
            mask, wanted = field_of(batch, name), tuple(tokens_BT.shape[:dims])
            if isinstance(mask, Tensor) and tuple(mask.shape) != wanted:
                raise ValueError(
                    f"whose {name!r} has shape {tuple(mask.shape)}: give it {wanted}, as its tokens"
                )
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
        found = called("shape", ask, batch)
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
    """Return an item of a mapping or a TensorDict, or an attribute; None if there is none."""
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
    if not pair or not all(is_number(each) and 0 <= each <= _MOST for each in counts):
        raise ValueError(
            f"whose counts are {counts!r}: give (valid sequences, valid tokens), two numbers from "
            f"0 to {_MOST:g}"
        )
    return torch.tensor(counts, dtype=torch.float64)


# Above it float64 leaves numbers out, so that it is no count.
_MOST = 2.0**53


def is_packed(batch: Any) -> bool:
    """Return whether a microbatch holds a pack: its sequences are not rows then."""
    return field_of(batch, "cu_seqlens") is not None or pack_in(batch) is not None


def pack_in(batch: Any) -> Any:
    """Return the `Pack` or `PackedSeqParams` among the values of a microbatch; None without one.

    Values are those of a mapping, a TensorDict or a dataclass.
    """
    values: Iterable[Any] = ()
    if callable(getattr(batch, "values", None)):
        values = batch.values()
    elif dataclasses.is_dataclass(batch):
        values = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    for value in values:
        if isinstance(value, Pack) or getattr(value, "cu_seqlens_q", None) is not None:
            return value
    return None


def on_host(values: Tensor) -> bool:
    """Return whether the host can look at the values without a wait for a device."""
    return values.device.type == "cpu"


def check_zeros_and_ones(batch: Any) -> None:
    """Raise `ValueError` if a mask on the host has another value than 0 and 1.

    So do tokens and masks that are no dense tensors. A step counts what is valid, and a loss may
    multiply by a mask or ask what is above 0: with any other value the two differ without a word.
    """
    for name in (TOKENS, SAMPLE_MASK, TOKEN_MASK):
        value = field_of(batch, name)
        if value is None or (
            type(value) is Tensor
            and value.layout is torch.strided
            and not (value.is_meta or value.is_complex())
        ):
            continue
        kind = not_dense(value)
        if kind is not None or value.is_complex():
            raise ValueError(f"whose {name!r} is {kind or value.dtype}: give a dense tensor")
    for name, mask, wrong in _marked_masks(batch, host=True):
        if wrong.any():
            place = _first_place(mask, wrong)
            at = ", ".join(f"{of} {n}" for of, n in zip(("row", "position"), place, strict=False))
            raise ValueError(
                f"whose {name!r} has {_flat(mask)[wrong][0].item()!r} in {at}: give 1 for what "
                "counts and 0 for all else. Weights belong into a value of another name"
            )


def doubtful(counts: Tensor, batch: Any) -> Tensor:
    """Return the counts [2], NaN if a mask on a device has another value than 0 and 1.

    The host reads counts at the end of a step, and waits for the device no more often.
    """
    for _, _, wrong in _marked_masks(batch, host=False):
        counts = torch.where(wrong.any().to(counts.device), math.nan, counts)
    return counts


def _marked_masks(batch: Any, *, host: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield masks of numbers, on the host or on devices, and what is neither 0 nor 1 in each."""
    for name in (SAMPLE_MASK, TOKEN_MASK):
        mask = field_of(batch, name)
        if isinstance(mask, Tensor) and mask.dtype != torch.bool and on_host(mask) is host:
            yield name, mask, (_flat(mask) != 0) & (_flat(mask) != 1)


def _flat(values: Any) -> Tensor:
    """Return the values of all rows of a nested tensor one after the other; others as they are."""
    found: Tensor = values.values() if values.is_nested else values
    return found


def _first_place(values: Any, wrong: Tensor) -> list[int]:
    """Return the place of the first marked value, in its row also if rows are nested."""
    place: list[int] = wrong.nonzero()[0].tolist()
    if values.is_nested:
        starts = values.offsets().tolist()
        row = max(index for index, start in enumerate(starts) if start <= place[0])
        return [row, place[0] - starts[row]]
    return place


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


def explained(error: Exception, tables: Tables, microbatch: Any) -> Exception:
    """Return an error of a forward, or for one of an embedding's the token that it does not have.

    The embedding's own, on the host, says neither the token nor where it is. This looks after the
    fact, because a forward may change what it gets.
    """
    told = outside(tables, microbatch, read=True) if isinstance(error, IndexError) else None
    if told is None:
        return error
    named = ValueError(f"the microbatch {told}")
    named.__cause__ = error
    return named.with_traceback(error.__traceback__)


def outside(tables: Tables, microbatch: Any, *, read: bool) -> str | None:
    """Describe the first token or position that the tables do not have; None without one."""
    tokens = field_of(microbatch, TOKENS)
    positions = field_of(microbatch, POSITIONS)
    known = tables.positions
    if known is not None and positions is None and isinstance(tokens, Tensor):
        longest = int(tokens.shape[-1])
        if longest > known and not is_packed(microbatch):
            return (
                f"has rows of {longest} positions, and the model has {known}: cut them, or build "
                "it with a larger max_sequence_length"
            )
    for name, values, size in (
        (TOKENS, tokens, tables.tokens),
        (POSITIONS, positions, tables.positions),
    ):
        if size is None or not isinstance(values, Tensor):
            continue
        if values.dtype not in (torch.int64, torch.int32) or not 0 < values.dim() <= 2:
            return (
                f"has {name!r} of {values.dtype} with {values.dim()} dimensions, which are looked "
                f"up in a table of {size} entries: give torch.int64 or torch.int32, "
                "[rows, positions]"
            )
        if not values.numel():
            continue
        if not read and not on_host(values):
            continue
        found = _flat(values)
        least, most = (int(each) for each in found.aminmax())
        if least < 0 or most >= size:
            wrong = (found < 0) | (found >= size)
            *row, position = _first_place(values, wrong)
            where = f"row {row[0] if row else 0}, position {position}"
            return (
                f"has {int(found[wrong][0])} in {name!r} at {where}, and the model's table has "
                f"{size} entries, 0 to {size - 1}"
            )
    return None


def groups_of_rows(
    batch: Batch, rows: int, shared: Collection[str]
) -> list[tuple[Tensor, Tensor | None]]:
    """Return the group ids of all rows, and which rows are valid.

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


def group_ids(batch: Any, sequences: int) -> tuple[Tensor, Tensor | None]:
    """Return each sequence's group id [n], and which sequences are valid [n]; None if all are.

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
    """Return the ids of groups with a valid sequence, each once; read from the device once."""
    valid = [ids_n if mask_n is None else ids_n[mask_n] for ids_n, mask_n in found]
    if not valid:
        return ()
    device = valid[0].device
    ids = torch.unique(torch.cat([each.to(device, torch.int64) for each in valid]))
    return tuple(ids.tolist())


def list_shape(pieces: Sequence[Piece]) -> ListShape:
    """Describe the microbatches of one call: how many, their largest shape, a checksum of all."""
    rows = max(piece.shape[0] for piece in pieces)
    positions = max(piece.shape[1] for piece in pieces)
    shapes = [piece.shape for piece in pieces]
    # In short: a list may have hundreds, and what ranks exchange should fit into one gather.
    lengths = [piece.segments.lengths for piece in pieces if piece.segments is not None]
    told = 0
    if lengths or len(set(shapes)) > 1:
        told = zlib.crc32(repr((shapes, lengths)).encode())
    return len(pieces), rows, positions, told


def spec(microbatch: Any, name: str = "") -> Any:
    """Describe a microbatch so that another rank can make its `ghost`.

    Tensors, however deep in mappings, dataclasses, lists and tuples, are replaced by a description
    without values; all else is kept. The description of packs and of `cu_seqlens` has their
    borders, without which attention knows no sequences. `name` is the name of a value in its
    microbatch.
    """
    if isinstance(microbatch, Pack):
        return _MARK, "pack", microbatch.lengths, microbatch.segments
    if isinstance(microbatch, Tensor) and name.startswith("cu_seqlens"):
        return _MARK, "borders", microbatch.tolist(), microbatch.dtype
    if isinstance(microbatch, Tensor):
        lengths = [len(each) for each in microbatch.unbind()] if microbatch.is_nested else None
        return _MARK, "tensor", tuple(_flat(microbatch).shape), microbatch.dtype, lengths
    if hasattr(microbatch, "keys") and hasattr(microbatch, "items"):  # a TensorDict is no Mapping
        return {name: spec(value, str(name)) for name, value in microbatch.items()}
    if dataclasses.is_dataclass(microbatch) and not isinstance(microbatch, type):
        found = copy.copy(microbatch)
        for field in dataclasses.fields(found):
            object.__setattr__(found, field.name, spec(getattr(found, field.name), field.name))
        return found
    described: Any = _pytree.tree_map_only(Tensor, spec, microbatch)
    return described


def fingerprint(batch: Any) -> dict[str, Any]:
    """Describe what is in a batch or a list of microbatches, to tell another one by.

    Returns an item for each tensor, number, string and None in it, by its place: of a tensor shape,
    type and a checksum that stays on its device, so that nothing waits. Objects of other kinds
    count by their type.
    """
    return dict(_leaves(batch, "batch"))


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        if value.is_nested:
            jagged: Any = value
            yield f"{place}.offsets", _tensor_leaf(jagged.offsets())
        yield place, _tensor_leaf(_flat(value))
    elif isinstance(value, _SCALARS):
        yield place, repr(value)
    elif hasattr(value, "keys") and hasattr(value, "items"):
        for name, each in value.items():
            yield from _leaves(each, f"{place}[{name!r}]")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{place}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None), f"{place}.{field.name}")
    else:
        yield place, f"a {type(value).__name__}"


def _tensor_leaf(value: Tensor) -> tuple[Any, ...]:
    values = torch.view_as_real(value) if value.is_complex() else value
    return tuple(value.shape), value.dtype, checksum(values)


def told_leaf(leaf: Any) -> str:
    """Describe an item of a `fingerprint`; this reads a checksum from its device."""
    if leaf is None:
        return "not there"
    if isinstance(leaf, str):
        return leaf
    shape, dtype, sum_of_bits = leaf
    return f"{dtype} of {shape} with checksum {int(sum_of_bits) % 2**64:016x}"


def ghost(example: Any, device: Any) -> Any:
    """Make a microbatch of zeros that looks like a peer's `spec`; nothing in it is valid."""
    if _is_described(example):
        return _made(example, device)
    if isinstance(example, Mapping):
        batch = {name: ghost(value, device) for name, value in example.items()}
        if isinstance(batch.get(TOKENS), Tensor) and SAMPLE_MASK not in batch:
            batch[SAMPLE_MASK] = torch.zeros(batch[TOKENS].shape[0], device=device)
        return batch
    if dataclasses.is_dataclass(example) and not isinstance(example, type):
        found = copy.copy(example)
        for field in dataclasses.fields(found):
            object.__setattr__(found, field.name, ghost(getattr(found, field.name), device))
        return found
    return _pytree.tree_map(
        lambda each: _made(each, device) if _is_described(each) else each,
        example,
        is_leaf=_is_described,
    )


#: Begins what `spec` puts in the place of a tensor or a pack. No class, because plain pickle does
#: not find one that has itself arrived pickled by value.
_MARK = "megatron_idempotent"


def _is_described(value: Any) -> bool:
    return type(value) is tuple and value[:1] == (_MARK,)


def _made(described: tuple[Any, ...], device: Any) -> Any:
    """Return a pack or borders as they were, or zeros of a tensor's shape and type."""
    match described:
        case _, "pack", lengths, segments:
            return Pack.laid_out(lengths, segments, device=device)
        case _, "borders", ends, dtype:
            return torch.tensor(ends, dtype=dtype, device=device)
    _, _, shape, dtype, lengths = described
    values = torch.zeros(shape, dtype=dtype, device=device)
    if lengths is None:
        return values
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, ends)


def calls(
    lists: Sequence[Sequence[Piece]], said: Sequence[RankStatus], device: object
) -> Iterator[tuple[list[Piece], bool]]:
    """Yield the calls that this rank makes, and whether their microbatches are dummies.

    Ranks that share a model's collectives make calls of the same sizes in the same order: up to
    the fewest microbatches that a rank has, up to the second fewest, and so on. A rank that ran
    out sends dummy microbatches through its model, shaped like those of the fullest rank. `said`
    is empty if ranks run by themselves.
    """
    if not said:
        for pieces in lists:
            yield list(pieces), False
        return
    for place in range(max(len(say.lists) for say in said)):
        numbers = [say.lists[place][0] if place < len(say.lists) else 0 for say in said]
        fullest = said[numbers.index(max(numbers))]
        mine = lists[place] if place < len(lists) else []
        done = 0
        for number in sorted(set(numbers) - {0}):
            if done < len(mine):
                yield list(mine[done:number]), False
            else:
                example, shape = fullest.specs[place]
                yield (
                    [
                        Piece(batch=ghost(example, device), shape=shape, sequences=0)
                        for _ in range(number - done)
                    ],
                    True,
                )
            done = number


def differing_replicas(said: Sequence[RankStatus]) -> str | None:
    """Describe the difference if ranks of one replica were given different batches; else None."""
    first: dict[int, RankStatus] = {}
    for say in said:
        other = first.setdefault(say.replica, say)
        if (say.doing, say.lists) != (other.doing, other.lists):
            return (
                f"data-parallel rank {say.replica} was given {_told_share(other)} on one of its "
                f"model parallel ranks and {_told_share(say)} on another; give all of them "
                f"the same batch"
            )
    return None


def _told_share(say: RankStatus) -> str:
    shapes = ", ".join(
        f"{n} microbatches of {'' if not told else 'up to '}{rows} x {t}"
        + (f" (shapes and lengths {told:08x})" if told else "")
        for n, rows, t, told in say.lists
    )
    return f"{say.doing}({shapes or 'nothing'})"
