"""Cuts a batch of any size into microbatches, and plans calls of ranks with uneven batches.

Legend: B rows of the batch, T positions.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from megatron_idempotent.fp8.packing import Pack
from megatron_idempotent.megatron.replica_check import checksum

from .messages import ListShape, RankStatus
from .pieces import Piece, check_zeros_and_ones
from .records import SAMPLE_MASK, TOKEN_MASK, TOKENS, Batch

# No rows can be taken out of these, so they are the same for all of them.
_SCALARS = (bool, int, float, str, bytes, type(None))


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
    _refuse_packs(batch)
    _refuse_rowless(batch, rows, shared)
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


def _refuse_packs(batch: Batch) -> None:
    for name, value in batch.items():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Pack):
                raise ValueError(
                    f"microbatch() got {name!r} with a Pack of {len(each.lengths)} sequences and "
                    f"{sum(each.lengths)} tokens, which would count as one sequence of "
                    f"{each.tokens} tokens, and cannot be cut into rows: send a list of packs as "
                    "microbatches=[…], or one sequence a row"
                )


def _refuse_rowless(batch: Batch, rows: int, shared: Collection[str]) -> None:
    for name, value in batch.items():
        if name in shared or isinstance(value, (Tensor, *_SCALARS)):
            continue
        per_row = isinstance(value, (list, tuple))
        if per_row and len(value) == rows:
            continue
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
    return [
        [
            Piece(
                batch=_slice(batch, start, end, shared),
                shape=(end - start, positions),
                sequences=end - start,
            )
            for start, end in each
        ]
        for each in cuts
        if each
    ]


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


def _slice(batch: Batch, start: int, end: int, shared: Collection[str]) -> Batch:
    return {
        name: value[start:end]
        if isinstance(value, (Tensor, list, tuple)) and name not in shared
        else value
        for name, value in batch.items()
    }


def spec(microbatch: Any, name: str = "") -> Any:
    """Describe a microbatch so that another rank can make its `ghost`.

    Tensors, however deep in mappings, dataclasses, lists and tuples, are replaced by a description
    without values; all else is kept. The description of packs and of `cu_seqlens` has their
    borders, without which attention knows no sequences. `name` is the name of a value in its
    microbatch.
    """
    if isinstance(microbatch, Pack):
        return _PACK, microbatch.lengths, microbatch.segments
    if isinstance(microbatch, Tensor) and name.startswith("cu_seqlens"):
        return _BORDERS, microbatch.tolist(), microbatch.dtype
    if isinstance(microbatch, Tensor):
        lengths = [len(each) for each in microbatch.unbind()] if microbatch.is_nested else None
        shape = microbatch.shape if lengths is None else microbatch.values().shape
        return _TENSOR, tuple(shape), microbatch.dtype, lengths
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
            value = jagged.values()
        yield place, _tensor_leaf(value)
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
    if _is_tensor(example):
        return _zeros(example, device)
    if _is_marked(example, _PACK):
        return Pack.laid_out(*example[1:], device=device)
    if _is_marked(example, _BORDERS):
        return torch.tensor(example[1], dtype=example[2], device=device)
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
        lambda each: _zeros(each, device) if _is_tensor(each) else each,
        example,
        is_leaf=_is_tensor,
    )


#: Begins the description of a tensor: its shape, type, and the lengths of a nested one's rows. No
#: class, because plain pickle does not find one that has itself arrived pickled by value.
_TENSOR = "megatron_idempotent tensor"
#: Begin the descriptions of a pack, by its lengths and segments, and of borders, by their values.
_PACK, _BORDERS = "megatron_idempotent pack", "megatron_idempotent borders"


def _is_tensor(value: Any) -> bool:
    return type(value) is tuple and len(value) == 4 and value[0] == _TENSOR


def _is_marked(value: Any, mark: str) -> bool:
    return type(value) is tuple and len(value) == 3 and value[0] == mark


def _zeros(described: tuple[Any, ...], device: Any) -> Tensor:
    _, shape, dtype, lengths = described
    values = torch.zeros(shape, dtype=dtype, device=device)
    if lengths is None:
        return values
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, ends)


def calls(
    lists: Sequence[Sequence[Piece]], said: Sequence[RankStatus], device: object
) -> Iterator[tuple[list[Piece], bool]]:
    """Yields the calls that this rank makes, and whether their microbatches are dummies.

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
    """Describes the difference if ranks of one replica were given different batches; else None."""
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
