"""Describes microbatches, cuts rows into them, and counts their valid sequences and tokens.

Legend: B rows of the batch, T positions of a row, n sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_idempotent.fp8.packing import Pack
from megatron_idempotent.logprobs.errors import not_dense

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

SCALARS = (bool, int, float, str, bytes, type(None))
"""Types of values from which no rows can be taken, so that they are the same for all rows."""

Shape = tuple[int, int]
"""Rows and positions of a microbatch: what a schedule calls micro_batch_size and seq_length."""

CallShape = tuple[int, int, int, int]
"""Microbatches of one call: their number, their largest rows and positions, and a checksum of all
shapes, 0 if all are rows of one shape."""

Groups = tuple[Tensor, Tensor | None]
"""Group ids of sequences [n], and which sequences are valid [n]; None if all are."""


Spans = Sequence[tuple[int, int]]
"""The index of the first token of each sequence of a pack, and its tokens without padding."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """Holds one microbatch of a step: its inputs, shape, sequences and valid counts.

    Example: `Microbatch(inputs=batch, shape=(4, 512))`.
    """

    inputs: Any
    """The argument of `forward` and the loss."""
    shape: Shape
    spans: Spans | None = None
    """The sequences of a pack; None if the sequences are rows."""
    counts: Tensor | None = None
    """Valid sequences and tokens, float64 [2]; None if they are counted for a whole batch."""

    @property
    def positions(self) -> int:
        """The number of positions in all rows."""
        return self.shape[0] * self.shape[1]

    @property
    def sequences(self) -> int:
        """The number of sequences, masked ones included: the rows or, in a pack, all sequences that
        are not empty.
        """
        if self.spans is None:
            return self.shape[0]
        return sum(length > 0 for _, length in self.spans)

    @property
    def entries(self) -> int:
        """The number of sequences, masked ones included: the rows or, in a pack, all sequences,
        also empty ones.
        """
        return self.shape[0] if self.spans is None else len(self.spans)

    @property
    def tokens(self) -> int:
        """The number of positions that are not padding. If the inputs are rows with a `lengths`
        tensor, the number is computed from it, which waits for the device.
        """
        if self.spans is not None:
            return sum(length for _, length in self.spans)
        lengths = field_of(self.inputs, LENGTHS)
        if lengths is None:
            return self.positions
        return int(torch.as_tensor(lengths).clamp(max=self.shape[1]).sum()) or self.positions

    @property
    def may_be_padded(self) -> bool:
        """True if the microbatch shows where its padding is: a pack, or rows with `lengths`."""
        return self.spans is not None or field_of(self.inputs, LENGTHS) is not None


Calls = Sequence[Sequence[Microbatch]]
"""The microbatches of each call of the schedule."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """Holds the microbatches of a batch, by schedule call, and the numbers of its valid sequences
    and tokens.

    Example: `cut_rows(batch, 4, (), grouped=False)`.
    """

    sequences: int = 0
    """The number of sequences, masked ones included."""
    calls: Calls = ()
    counts: Sequence[Tensor] = ()
    """Valid sequences and tokens, float64 [2] each, which add up to the batch's."""
    groups: Sequence[Groups] = ()
    """Group ids of sequences and which of them are valid, if the loss counts groups."""

    @classmethod
    def of_one_call(
        cls, microbatches: Sequence[Microbatch], sequences: int, groups: Sequence[Groups]
    ) -> PreparedBatch:
        """Make a `PreparedBatch` of microbatches that are run in one schedule call.
        Each microbatch keeps its own counts of valid sequences and tokens.
        """
        return cls(
            sequences=sequences,
            calls=[microbatches] if microbatches else (),
            counts=[mb.counts for mb in microbatches if mb.counts is not None],
            groups=groups,
        )


def cut_rows(
    batch: Batch, size: int | None, shared: Collection[str], *, grouped: bool
) -> PreparedBatch:
    """Cut a batch into microbatches of `size` rows, and count its valid rows and tokens; with
    `grouped` also take its group ids.

    Raises:
        ValueError: the batch cannot be cut or counted.
    """
    rows = checked_rows(batch, shared)
    if not rows:
        return PreparedBatch()
    if size is None:
        raise ValueError(
            f"{rows} rows, and begin() no micro_batch_size to cut them by: begin with one or with "
            "max_tokens_per_microbatch, or pass microbatches=[…]"
        )
    if batch[TOKENS].is_nested:
        raise ValueError(
            f"{rows} nested rows, and begin() micro_batch_size={size}, which cuts rows of one "
            "length: begin with max_tokens_per_microbatch, or pass microbatches=[…]"
        )
    return PreparedBatch(
        sequences=rows,
        calls=_split(batch, rows, size, shared),
        counts=[nan_if_wrong(valid_counts(batch), batch)],
        groups=[group_ids(batch, rows, shared)] if grouped else (),
    )


def _split(batch: Batch, rows: int, size: int, shared: Collection[str]) -> Calls:
    """Cut a batch into microbatches of `size` rows, in order; rows left over make one smaller
    microbatch.

    Returns a call for each size, because the messages of a pipeline have one shape per call.
    """
    positions = int(batch[TOKENS].shape[1])
    by_row = {
        name: value
        for name, value in batch.items()
        if isinstance(value, (Tensor, list, tuple)) and name not in shared
    }
    microbatches = [
        Microbatch(
            inputs={**batch, **{name: value[start:end] for name, value in by_row.items()}},
            shape=(end - start, positions),
        )
        for start, end in ((n, min(n + size, rows)) for n in range(0, rows, size))
    ]
    full = rows // size
    return [call for call in (microbatches[:full], microbatches[full:]) if call]


def checked_rows(batch: Any, shared: Collection[str] = (), *, one_more: bool = True) -> int:
    """Check a batch, and return its number of rows, B.

    Values named in `shared` may be anything; all others have B rows, or are scalars. For `one_more`
    see `check_masks`.

    Raises:
        ValueError: the batch is no mapping or has no `input_ids` [B, T], or a value has another
            number of rows, no rows, or is a `Pack`; or a mask is not of zeros and ones.
    """
    tokens_BT = batch.get(TOKENS) if hasattr(batch, "get") else None
    if not isinstance(tokens_BT, Tensor) or tokens_BT.dim() < 2:
        raise ValueError(
            f"a {type(batch).__name__} whose {TOKENS!r} is {kind_of(tokens_BT)}: pass a mapping "
            f"of tensors with {TOKENS!r} of shape [rows, positions]"
        )
    rows = int(tokens_BT.shape[0])
    for name, value in batch.items():
        _check_rows_of(name, value, rows, name in shared)
    with in_batch("a batch "):
        check_masks(batch, one_more=one_more)
    return rows


def _check_rows_of(name: str, value: Any, rows: int, shared: bool) -> None:
    """Raise `ValueError` if `value`, one of the values of a batch, is or lists a `Pack`, or if its
    number of items is not `rows`. That number is not checked for scalars and with `shared`.
    """
    is_listed = isinstance(value, (list, tuple))
    for item in value if is_listed else (value,):
        if isinstance(item, Pack):
            raise ValueError(
                f"{name!r} with a Pack of {len(item.lengths)} sequences and {sum(item.lengths)} "
                f"tokens, which would count as one sequence of {item.tokens} tokens, and cannot be "
                "cut into rows: send a list of packs as microbatches=[…], or one sequence a row"
            )
    if shared or isinstance(value, SCALARS):
        return
    sized = isinstance(value, Tensor) and value.dim() > 0
    if not (sized or is_listed) or len(value) != rows:
        raise ValueError(
            f"{name!r}, {kind_of(value)}, for {rows} rows of {TOKENS!r}: give a tensor, list or "
            f"tuple with an item per row, or if all rows share it, name it in shared=({name!r},) "
            "when you make the step"
        )


def kind_of(value: Any) -> str:
    """Describe a value as text: a tensor by its shape, a list by its length, else by its type."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    items = f" of {len(value)} items" if isinstance(value, (list, tuple)) else ""
    return f"a {type(value).__name__}{items}"


@contextmanager
def in_batch(prefix: str) -> Iterator[None]:
    """Context manager: put `prefix` before the message of a `ValueError` that the block raises.
    `prefix` says where the error is: in an argument of a call, or in a part of a batch.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def field_of(batch: Any, name: str) -> Any:
    """Return the value of this name in a mapping, TensorDict or object; None if it is missing."""
    get = getattr(batch, "get", None)
    if callable(get):
        return get(name, None)  # a TensorDict raises without a default
    return getattr(batch, name, None)


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
    """Return True if the tensor is on the CPU, where it can be read without waiting for a
    device.
    """
    return values.device.type == "cpu"


def check_masks(batch: Any, *, packed: bool = False, one_more: bool = False) -> None:
    """Raise `ValueError` if tokens or masks are no dense tensors, a mask does not fit its tokens,
    or a mask on the CPU has other values than 0 and 1.

    A mask of rows has the shape of its tokens [B, T]. With `one_more` a token mask may have an
    entry more than there are inputs, which are then a sequence without its last token. Nested rows
    have masks of any width, and a flat row or a pack any masks.

    A mask on the host has no other values than 0 and 1. A step counts what is valid, and a loss may
    multiply by a mask or test for values above 0: with any other value the two would silently
    differ.
    """
    tokens_BT = field_of(batch, TOKENS)
    for name, dims in ((TOKENS, 0), (SAMPLE_MASK, 1), (TOKEN_MASK, 2)):
        value = field_of(batch, name)
        if value is None:
            continue
        is_plain = type(value) is Tensor and value.layout is torch.strided and not value.is_meta
        kind = (None if is_plain else not_dense(value)) or (value.is_complex() and value.dtype)
        if kind:
            raise ValueError(f"whose {name!r} is {kind}: give a dense tensor")
        if packed or not dims or tokens_BT.dim() < 2:
            continue
        shape, expected = tuple(value.shape), tuple(tokens_BT.shape[:dims])
        if (tokens_BT.is_nested and len(shape) == dims) or shape == expected:
            continue
        if one_more and dims == 2 and shape == (expected[0], expected[1] + 1):
            continue
        raise ValueError(f"whose {name!r} has shape {shape}: give it {expected}, as its tokens")
    for name, mask, wrong in _wrong_in_masks(batch, host=True):
        if wrong.any():
            dimensions = zip(("row", "position"), _first_index(mask, wrong), strict=False)
            raise ValueError(
                f"whose {name!r} has {flat(mask)[wrong][0].item()!r} in "
                f"{', '.join(f'{dimension} {index}' for dimension, index in dimensions)}: give 1 "
                "for what counts and 0 for all else. Weights belong into a value of another name"
            )


def nan_if_wrong(counts: Tensor, batch: Any) -> Tensor:
    """Return `counts` [2], the valid sequences and tokens of `batch`; NaN instead if a mask of
    `batch` on a device has a value other than 0 and 1. The host does not wait for the device.

    The host reads counts at the end of a step, and waits for the device no more often.
    """
    for _, _, wrong in _wrong_in_masks(batch, host=False):
        counts = torch.where(wrong.any().to(counts.device), math.nan, counts)
    return counts


def _wrong_in_masks(batch: Any, *, host: bool) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, mask, marks) for the sample and token masks that are not bool. With `host` these
    are the masks on the CPU, otherwise those on devices. The marks are True where a value is
    neither 0 nor 1.
    """
    for name in (SAMPLE_MASK, TOKEN_MASK):
        mask = field_of(batch, name)
        if isinstance(mask, Tensor) and mask.dtype != torch.bool and on_host(mask) is host:
            yield name, mask, (flat(mask) != 0) & (flat(mask) != 1)


def flat(values: Any) -> Tensor:
    """Return a nested tensor's rows, concatenated; return any other tensor unchanged."""
    joined: Tensor = values.values() if values.is_nested else values
    return joined


def _first_index(values: Any, wrong: Tensor) -> list[int]:
    """Return the index, one number for each dimension, of the first value that `wrong` marks.
    For a nested tensor, `wrong` is a mask of its concatenated rows, and the index is the number of
    the row and the position in that row.
    """
    index: list[int] = wrong.nonzero()[0].tolist()
    if values.is_nested:
        starts = values.offsets().tolist()
        row = max(number for number, start in enumerate(starts) if start <= index[0])
        return [row, index[0] - starts[row]]
    return index


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
    sample_mask_B = field_of(batch, SAMPLE_MASK)
    if sample_mask_B is None:
        sample_mask_B = torch.ones(tokens_BT.shape[0], device=tokens_BT.device)
    sample_mask_B = sample_mask_B.double()
    token_mask_BT = field_of(batch, TOKEN_MASK)
    tokens_B: Tensor | int
    if token_mask_BT is not None and token_mask_BT.is_nested:
        tokens_B = torch.stack([row[1:].sum(dtype=torch.float64) for row in token_mask_BT])
    elif token_mask_BT is not None:
        tokens_B = token_mask_BT[:, 1:].sum(1, dtype=torch.float64)
    elif tokens_BT.is_nested:
        predicted = [max(len(row) - 1, 0) for row in tokens_BT.unbind()]
        tokens_B = torch.tensor(predicted, dtype=torch.float64, device=sample_mask_B.device)
    else:
        tokens_B = tokens_BT.shape[1]
    return torch.stack((sample_mask_B, sample_mask_B * tokens_B)).sum(1)


class EmbeddingSizes(NamedTuple):
    """Holds the number of rows of a model's embeddings: of its vocabulary, and of positions."""

    tokens: int | None
    """None where the size of the vocabulary is not known."""
    positions: int | None
    """None where positions are not looked up."""


def refuse_faults(calls: Calls, fault_of: Callable[[Microbatch], str | None]) -> None:
    """Raise `ValueError` for the first microbatch for which `fault_of` does not return None.
    The message has the microbatch's index, and the text that `fault_of` returned.
    """
    for index, microbatch in enumerate(itertools.chain.from_iterable(calls)):
        fault = fault_of(microbatch)
        if fault is not None:
            raise ValueError(f"a batch whose microbatch {index} {fault}")


def check_ids(sizes: EmbeddingSizes, calls: Calls, *, read: bool) -> None:
    """Raise `ValueError` for token ids or positions for which the model's embeddings have no row.

    The host looks at those that it holds, and with `read` waits for those on a device.
    """
    if sizes != EmbeddingSizes(None, None):
        refuse_faults(calls, lambda microbatch: _unknown_id(sizes, microbatch.inputs, read=read))


def name_the_token(error: Exception, sizes: EmbeddingSizes, inputs: Any) -> Exception:
    """Return the error of a forward. For an `IndexError` of an embedding return a `ValueError` that
    names the token and its position.

    The embedding's own error, on the host, names neither the token nor its position. Tokens are
    looked at after the failure, because a forward may change its inputs.
    """
    fault = _unknown_id(sizes, inputs, read=True) if isinstance(error, IndexError) else None
    if fault is None:
        return error
    naming = ValueError(f"the microbatch {fault}")
    naming.__cause__ = error
    return naming.with_traceback(error.__traceback__)


def _unknown_id(sizes: EmbeddingSizes, inputs: Any, *, read: bool) -> str | None:
    """Describe the first token id or position for which the embeddings have no row; None without
    one.
    """
    tokens = field_of(inputs, TOKENS)
    positions = field_of(inputs, POSITIONS)
    if sizes.positions is not None and positions is None and isinstance(tokens, Tensor):
        longest = int(tokens.shape[-1])
        if longest > sizes.positions and not is_packed(inputs):
            return (
                f"has rows of {longest} positions, and the model has {sizes.positions}: cut them, "
                "or build it with a larger max_sequence_length"
            )
    for name, values, size in (
        (TOKENS, tokens, sizes.tokens),
        (POSITIONS, positions, sizes.positions),
    ):
        if size is None or not isinstance(values, Tensor):
            continue
        if values.dtype not in (torch.int64, torch.int32) or not 0 < values.dim() <= 2:
            return (
                f"has {name!r} of {values.dtype} with {values.dim()} dimensions, which are looked "
                f"up in a table of {size} entries: give torch.int64 or torch.int32, "
                "[rows, positions]"
            )
        if not values.numel() or not (read or on_host(values)):
            continue
        ids = flat(values)
        smallest, largest = (int(bound) for bound in ids.aminmax())
        if smallest < 0 or largest >= size:
            wrong = (ids < 0) | (ids >= size)
            *row, position = _first_index(values, wrong)
            return (
                f"has {int(ids[wrong][0])} in {name!r} at row {row[0] if row else 0}, position "
                f"{position}, and the model's table has {size} entries, 0 to {size - 1}"
            )
    return None


def group_ids(batch: Any, sequences: int, shared: Collection[str] = ()) -> Groups:
    """Return the group id of each sequence in a batch, and a mask of the valid sequences.
    The mask is None if all sequences are valid.

    Raises:
        ValueError: `group_ids` is missing, in `shared`, or not one integer for each sequence.
    """
    if GROUP_IDS in shared:
        raise ValueError(
            f"{GROUP_IDS!r} that all rows share: give one for each row, and take the name out of "
            "shared="
        )
    ids = field_of(batch, GROUP_IDS)
    if ids is None:
        raise ValueError(
            f"a {type(batch).__name__} without {GROUP_IDS!r}, and a loss or metric that is divided "
            f"by the number of groups: give it the group of each of its {sequences} sequences, "
            "integers [sequences]"
        )
    ids_n = torch.as_tensor(ids)
    if ids_n.is_floating_point() or ids_n.dtype == torch.bool or ids_n.numel() != sequences:
        raise ValueError(
            f"whose {GROUP_IDS!r} are {ids_n.dtype} of shape {tuple(ids_n.shape)} for {sequences} "
            "sequences: give one integer for each"
        )
    mask_n = field_of(batch, SAMPLE_MASK)
    return ids_n.reshape(-1), None if mask_n is None else mask_n.reshape(-1) > 0


def distinct_groups(groups: Iterable[Groups]) -> tuple[int, ...]:
    """Return the ids of all groups that have a valid sequence, each id once. The host waits for the
    device only once.
    """
    valid = [ids_n if mask_n is None else ids_n[mask_n] for ids_n, mask_n in groups]
    if not valid:
        return ()
    device = valid[0].device
    ids = torch.unique(torch.cat([ids_n.to(device, torch.int64) for ids_n in valid]))
    return tuple(ids.tolist())


def call_shape(microbatches: Sequence[Microbatch]) -> CallShape:
    """Describe one schedule call's microbatches: their number, the largest number of rows and of
    positions in a row, and a checksum over the shapes of all, 0 if all are rows of one shape.
    """
    shapes = [microbatch.shape for microbatch in microbatches]
    spans = [microbatch.spans for microbatch in microbatches if microbatch.spans is not None]
    is_uneven = bool(spans) or len(set(shapes)) > 1
    return (
        len(shapes),
        max(rows for rows, _ in shapes),
        max(positions for _, positions in shapes),
        zlib.crc32(repr((shapes, spans)).encode()) if is_uneven else 0,
    )
