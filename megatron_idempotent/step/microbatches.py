"""Cuts a batch of any size into microbatches, counts what is valid, and plans uneven ranks.

Legend: B rows of the batch, T positions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from megatron_idempotent.fp8.packing import Pack

from .messages import RankStatus
from .records import SAMPLE_MASK, TOKEN_MASK, TOKENS, Batch

# No rows can be taken out of these, so they are the same for all of them.
_SCALARS = (bool, int, float, str, bytes, type(None))


def rows_of(batch: Any, shared: Collection[str] = ()) -> int:
    """Check a batch, and return B.

    Values named in `shared` may be anything; all others have B rows, or are scalars.

    Raises:
        ValueError: no mapping, no `input_ids` [B, T], a value of another number of rows or of none,
            or a `Pack`.
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
    return rows


def _refuse_packs(batch: Batch) -> None:
    for name, value in batch.items():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, Pack):
                raise ValueError(
                    f"microbatch() got {name!r} with a Pack of {len(each.lengths)} sequences and "
                    f"{sum(each.lengths)} tokens, which would count as one sequence of "
                    f"{each.tokens} tokens: packs are not supported yet, send one sequence a row"
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


def split(batch: Batch, rows: int, size: int, shared: Collection[str] = ()) -> list[list[Batch]]:
    """Microbatches of `size` rows, in order; what is left over is a smaller one of its own.

    In lists of equal sizes, because the messages of a pipeline have one shape per schedule call.
    """
    whole = rows - rows % size
    lists = [[_slice(batch, start, start + size, shared) for start in range(0, whole, size)]]
    if whole < rows:
        lists.append([_slice(batch, whole, rows, shared)])
    return [microbatches for microbatches in lists if microbatches]


def _slice(batch: Batch, start: int, end: int, shared: Collection[str]) -> Batch:
    return {
        name: value[start:end]
        if isinstance(value, (Tensor, list, tuple)) and name not in shared
        else value
        for name, value in batch.items()
    }


def valid_counts(batch: Batch) -> Tensor:
    """Valid sequences and valid tokens, float64 [2], on the batch's device.

    tokens = sum of token_mask[:, 1:] x sample_mask: the first token of a sequence is never
    predicted. Without a token mask, sequences x positions; without a sample mask all are valid.
    """
    tokens_BT = batch[TOKENS]
    sample_mask_B = batch.get(SAMPLE_MASK)
    if sample_mask_B is None:
        sample_mask_B = torch.ones(tokens_BT.shape[0], device=tokens_BT.device)
    sample_mask_B = sample_mask_B.double()
    token_mask_BT = batch.get(TOKEN_MASK)
    tokens_B: Tensor | int = tokens_BT.shape[1]
    if token_mask_BT is not None:
        tokens_B = token_mask_BT[:, 1:].sum(1, dtype=torch.float64)
    return torch.stack((sample_mask_B, sample_mask_B * tokens_B)).sum(1)


def spec(microbatch: Batch) -> Batch:
    """Describe a microbatch so that another rank can make its `ghost`.

    Tensors, however deep in lists, tuples and dicts, are replaced by (shape, dtype); all else is
    sent along.
    """
    described: Batch = _pytree.tree_map_only(
        Tensor, lambda tensor: (torch.Size(tensor.shape), tensor.dtype), dict(microbatch)
    )
    return described


def ghost(example: Batch, device: Any) -> Batch:
    """Make a microbatch of zeros that looks like a peer's `spec`; nothing in it is valid."""
    batch: dict[str, Any] = _pytree.tree_map(
        lambda leaf: torch.zeros(leaf[0], dtype=leaf[1], device=device) if _is_spec(leaf) else leaf,
        example,
        is_leaf=_is_spec,
    )
    batch[SAMPLE_MASK] = torch.zeros(batch[TOKENS].shape[0], device=device)
    return batch


def _is_spec(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and isinstance(value[0], torch.Size)


def calls(
    lists: Sequence[Sequence[Batch]], said: Sequence[RankStatus], device: object
) -> Iterator[tuple[list[Batch], bool]]:
    """The calls that this rank makes, and whether their microbatches are dummies.

    Ranks that share a model's collectives make calls of the same sizes in the same order: up to
    the fewest microbatches that a rank has, up to the second fewest, and so on. A rank that ran
    out sends dummy microbatches through its model, shaped like those of the fullest rank.
    """
    if not said:
        for microbatches in lists:
            yield list(microbatches), False
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
                example = fullest.specs[place]
                yield [ghost(example, device) for _ in range(number - done)], True
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
    shapes = ", ".join(f"{n} microbatches of {rows} x {t}" for n, rows, t in say.lists)
    return f"{say.doing}({shapes or 'nothing'})"
