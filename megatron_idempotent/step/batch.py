"""Cuts a batch of any size into microbatches, and counts its valid tokens and sequences.

Legend: B rows of the batch, T positions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from megatron_idempotent.fp8.packing import Pack

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
            f"microbatch() got a {type(batch).__name__} whose {TOKENS!r} is {_told(tokens_BT)}: "
            f"pass a mapping of tensors with {TOKENS!r} of shape [rows, positions]"
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
                f"microbatch() got {name!r} of {_told(mask)}: {SAMPLE_MASK!r} is [rows] and "
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


def _told(value: Any) -> str:
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
