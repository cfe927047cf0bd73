"""From a batch of any size to microbatches, and what in it counts.

Legend: B rows of the batch, T positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .records import Batch

TOKENS, SAMPLE_MASK, TOKEN_MASK = "input_ids", "sample_mask", "token_mask"


def rows_of(batch: Any) -> int:
    """B, once the batch is found to be one.

    Raises:
        ValueError: no mapping, no `input_ids` [B, T], or tensors of another number of rows.
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
        if isinstance(value, Tensor) and (value.dim() == 0 or value.shape[0] != rows)
    }
    if other:
        raise ValueError(
            f"microbatch() got {rows} rows of {TOKENS!r}, and tensors of other shapes: {other}; "
            "the first dimension of every tensor is the rows"
        )
    for name, dims in ((SAMPLE_MASK, 1), (TOKEN_MASK, 2)):
        mask = batch.get(name)
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != dims):
            raise ValueError(
                f"microbatch() got {name!r} of {_told(mask)}: {SAMPLE_MASK!r} is [rows] and "
                f"{TOKEN_MASK!r} [rows, positions], of zeros and ones"
            )
    return rows


def _told(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def split(batch: Batch, rows: int, size: int) -> list[list[Batch]]:
    """Microbatches of `size` rows, in order; what is left over is a smaller one of its own.

    In lists of equal sizes, because the messages of a pipeline have one shape per schedule call.
    """
    whole = rows - rows % size
    lists = [[_slice(batch, start, start + size) for start in range(0, whole, size)]]
    if whole < rows:
        lists.append([_slice(batch, whole, rows)])
    return [microbatches for microbatches in lists if microbatches]


def _slice(batch: Batch, start: int, end: int) -> Batch:
    return {
        name: value[start:end] if isinstance(value, Tensor) else value
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
    """The microbatch with (shape, dtype) in place of tensors, to make a `ghost` of elsewhere."""
    return {
        name: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for name, value in microbatch.items()
    }


def ghost(example: Batch, device: Any) -> Batch:
    """A microbatch of zeros that looks like a peer's `spec`, of which nothing is valid."""
    batch = {
        name: torch.zeros(value[0], dtype=value[1], device=device) if _is_spec(value) else value
        for name, value in example.items()
    }
    batch[SAMPLE_MASK] = torch.zeros(batch[TOKENS].shape[0], device=device)
    return batch


def _is_spec(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)
