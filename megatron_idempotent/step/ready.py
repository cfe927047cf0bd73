"""Checks microbatches that the caller has made, and reads their shapes, packs and counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_idempotent.logprobs.errors import typed

from .loss import call_user, is_number
from .microbatches import (
    COUNTS,
    TOKENS,
    Microbatch,
    PreparedBatch,
    Shape,
    check_masks,
    field_of,
    group_ids,
    in_batch,
    nan_if_wrong,
    on_host,
    valid_counts,
)
from .pack_layout import packed_counts, spans_in

Count = Callable[[Any], Any]

# float64 cannot hold all integers above this, so that a larger number is no count.
_LARGEST_COUNT = 2.0**53


def take_ready(
    ready: Any,
    shape: Callable[[Any], Shape] | None,
    counts: Count | None,
    *,
    grouped: bool,
) -> PreparedBatch:
    """Check microbatches that the caller has made, and return them as one batch, with their shapes
    and numbers of valid sequences and tokens.

    `shape` and `counts` are the step's functions; `grouped` says that groups are counted.

    Raises:
        ValueError: no list, or one of a microbatch that cannot be run or counted, which the message
            names by its index.
    """
    if isinstance(ready, (str, bytes, Mapping)) or not isinstance(ready, Sequence):
        raise ValueError(f"a {type(ready).__name__} as microbatches: pass a list of them")
    microbatches, groups = [], []
    for index, inputs in enumerate(ready):
        with in_batch(f"microbatches[{index}], "):
            microbatches.append(_microbatch(inputs, shape, counts))
            if grouped:
                groups.append(group_ids(inputs, microbatches[-1].entries))
    sequences = sum(microbatch.sequences for microbatch in microbatches)
    return PreparedBatch.of_one_call(microbatches, sequences, groups)


def _microbatch(
    inputs: Any, shape: Callable[[Any], Shape] | None, counts: Count | None
) -> Microbatch:
    size = _shape(inputs) if shape is None else _called_shape(shape, inputs)
    spans = spans_in(inputs)
    if counts is not None:
        counted = _checked_counts(call_user("counts", counts, inputs))
    elif (caller_counts := field_of(inputs, COUNTS)) is not None:
        counted = _checked_counts(caller_counts)
    elif spans is None and not isinstance(field_of(inputs, TOKENS), Tensor):
        raise ValueError(
            f"a {type(inputs).__name__} that does not say how many valid sequences and tokens it "
            f"has: put {COUNTS!r} into it, or make the step with counts="
        )
    else:
        check_masks(inputs, packed=spans is not None)
        valid = valid_counts(inputs) if spans is None else packed_counts(inputs, spans)
        counted = nan_if_wrong(valid, inputs)
    return Microbatch(
        inputs=inputs,
        shape=size,
        spans=spans,
        counts=counted,
    )


def _called_shape(shape: Callable[[Any], Shape], inputs: Any) -> Shape:
    size = call_user("shape", shape, inputs)
    is_pair = isinstance(size, (tuple, list)) and len(size) == 2
    if not is_pair or any(type(number) is not int or number < 1 for number in size):
        raise ValueError(f"for which shape= returned {size!r}: give (rows, positions)")
    return size[0], size[1]


def _shape(inputs: Any) -> Shape:
    tokens = field_of(inputs, TOKENS)
    if not isinstance(tokens, Tensor) or not tokens.dim():
        raise ValueError(
            f"a {type(inputs).__name__} whose {TOKENS!r} is "
            f"{'not there' if tokens is None else type(tokens).__name__}: give it that tensor, "
            "[rows, positions] or [positions], or make the step with shape="
        )
    if tokens.is_nested:
        lengths = [len(row) for row in tokens.unbind()]
        return len(lengths), max(lengths, default=0)
    if tokens.dim() == 1:
        return 1, int(tokens.shape[0])
    return int(tokens.shape[0]), int(tokens.shape[1])


def _checked_counts(counts: Any) -> Tensor:
    if isinstance(counts, Tensor):
        if counts.shape != (2,) or counts.dtype == torch.bool or counts.is_complex():
            raise ValueError(f"whose counts are of {typed(counts)}: give two numbers, [2]")
        counts_2 = counts.detach().to(torch.float64)
        if not on_host(counts_2):
            is_count = (counts_2 >= 0) & (counts_2 <= _LARGEST_COUNT)
            return torch.where(is_count, counts_2, math.nan)
        counts = counts_2.tolist()
    is_pair = isinstance(counts, (tuple, list)) and len(counts) == 2
    if not is_pair or not all(is_number(n) and 0 <= n <= _LARGEST_COUNT for n in counts):
        raise ValueError(
            f"whose counts are {counts!r}: give (valid sequences, valid tokens), two numbers from "
            f"0 to {_LARGEST_COUNT:g}"
        )
    return torch.tensor(counts, dtype=torch.float64)
