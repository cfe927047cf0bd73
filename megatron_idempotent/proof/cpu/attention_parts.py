"""Checks the inputs of core attention, rows or packs, and cuts them into this rank's blocks.

Legend: T positions on this rank, S positions of all context-parallel ranks, B rows, N heads,
G query groups, D channels of a head, Q queries and K keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_idempotent.logprobs.targets import context_parallel_part


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowSpan:
    """Places a row or a packed sequence.

    Example: `RowSpan(start=0, padded=8, queries=6, keys=6)`.
    """

    start: int
    """The first position among those of all sequences."""
    padded: int
    """The number of positions with padding, on all context-parallel ranks."""
    queries: int
    """The number of queries, without padding."""
    keys: int
    """The number of keys, without padding."""
    offset: int = 0
    """The position of the first query, if there are more keys than queries."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueryBlock:
    """Places queries of this rank that follow each other in a segment.

    Example: `QueryBlock(query=0, queries=4, position=12, key=0, keys=16)`, the last 4 of 16.
    """

    query: int
    """The first query's place on this rank."""
    queries: int
    """The number of queries, without padding."""
    position: int
    """The first query's place in the segment."""
    key: int
    """The place of the segment's first key among all keys."""
    keys: int
    """The number of the segment's keys."""


def blocks(segments: Sequence[RowSpan], cp: Part) -> Iterator[QueryBlock]:
    """Yield this rank's part of each segment: one block, or under context parallelism two."""
    for segment in segments:
        own = segment.padded // cp.size
        halves = [(0, own, 0)]
        if cp.size > 1:
            half = own // 2
            halves = [(0, half, cp.rank * half), (half, half, (2 * cp.size - 1 - cp.rank) * half)]
        for first, number, place in halves:
            yield QueryBlock(
                query=segment.start // cp.size + first,
                queries=max(0, min(number, segment.queries - place)),
                position=place + segment.offset,
                key=segment.start,
                keys=segment.keys,
            )


class Part:
    """Knows this rank's part under context parallelism; without it, the whole."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def gather(self, key: Tensor, value: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gather keys and values of all ranks [S, B, G, D], in their order in the sequences.

        The group's ranks take part in one all-gather.
        """
        place_S = torch.arange(len(key) * self.size, device=key.device)
        parts = [
            context_parallel_part(place_S, rank=rank, size=self.size, cu_seqlens=ends)
            for rank in range(self.size)
        ]
        gather: Any = _Gather.apply
        both = gather(torch.cat([key, value], -1), torch.cat(parts), self.group)
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]


class _Gather(torch.autograd.Function):
    """Gathers parts [T, …] over a group, and puts them in order; sums gradients the other way."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, place_S: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(place_S)
        ctx.group = group
        whole = part.new_empty(len(place_S), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        # Places are a permutation, so that each position is written once.
        return torch.empty_like(whole).index_copy_(0, place_S, whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (place_S,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sent = gradient.index_select(0, place_S).to(wide)
        own = sent.new_empty(len(sent) // dist.get_world_size(ctx.group), *sent.shape[1:])
        dist.reduce_scatter_tensor(own, sent, group=ctx.group)
        return own.to(gradient.dtype), None, None


def row_segment(query: Tensor, key: Tensor, cp: Part) -> RowSpan:
    """Check rows, which all have one length, and return that as one segment."""
    own, keys = len(query), len(key)
    if cp.size > 1 and (own != keys or own % 2):
        raise ValueError(
            f"ExactAttention got {own} queries and {keys} keys on one of {cp.size} context-"
            f"parallel ranks: pad rows to a multiple of {2 * cp.size}, and give each rank its part "
            "(context_parallel_part)"
        )
    positions = own * cp.size
    return RowSpan(
        start=0,
        padded=positions,
        queries=positions,
        keys=keys * cp.size,
        offset=max(0, keys - own),
    )


def pack_segments(
    packed: Any, query: Tensor, key: Tensor, cp: Part
) -> tuple[list[RowSpan], Tensor | None]:
    """Check a pack; return its sequences, and their ends with padding [n + 1]."""
    if packed.qkv_format != "thd":
        raise ValueError(
            f"ExactAttention got PackedSeqParams(qkv_format={packed.qkv_format!r}): pass 'thd'"
        )
    given = getattr(packed, "local_cp_size", None)
    if given not in (None, cp.size):
        raise ValueError(
            f"ExactAttention got local_cp_size={given} of {cp.size} context-parallel ranks: groups "
            "that change with each batch are not supported, leave it None"
        )
    if query.dim() != 3 or len(query) != len(key):
        raise ValueError(
            f"ExactAttention got a pack with queries {tuple(query.shape)} and keys "
            f"{tuple(key.shape)}: pass as many of both, [T, heads, channels], of one row"
        )
    real = _ends(packed, "cu_seqlens_q", "cu_seqlens_kv")
    if real is None:
        raise ValueError("ExactAttention got a pack without cu_seqlens_q: give its PackedSeqParams")
    padded = _ends(packed, "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    ends = real if padded is None else padded
    positions = len(query) * cp.size
    segments = _checked(real.tolist(), ends.tolist(), positions, cp)
    longest = max((each.keys for each in segments), default=0)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        allowed = getattr(packed, name, None)
        if allowed is not None and longest > int(allowed):
            raise ValueError(
                f"ExactAttention got {name}={int(allowed)} and a sequence of {longest}: "
                "Transformer Engine would leave out what is longer; give the longest of the pack"
            )
    return segments, ends


def _checked(real: list[int], ends: list[int], positions: int, cp: Part) -> list[RowSpan]:
    if len(real) != len(ends) or real[0] or ends[0]:
        raise ValueError(
            f"ExactAttention got cu_seqlens_q {real} and cu_seqlens_q_padded {ends}: pass as many "
            "of both, from 0 on"
        )
    if ends[-1] != positions if cp.size > 1 else ends[-1] > positions:
        raise ValueError(
            f"ExactAttention got sequences that end at {ends[-1]}, in a pack of {positions} "
            f"positions on {cp.size} context-parallel ranks: let the last one end there"
        )
    segments = []
    for index in range(len(ends) - 1):
        length, padded = real[index + 1] - real[index], ends[index + 1] - ends[index]
        if not 0 <= length <= padded:
            raise ValueError(
                f"ExactAttention got sequence {index} of {length} positions, and of {padded} with "
                "padding: cu_seqlens grow, and padding is not less than nothing"
            )
        if cp.size > 1 and padded % (2 * cp.size):
            raise ValueError(
                f"ExactAttention got sequence {index} of {padded} positions for {cp.size} "
                f"context-parallel ranks: pad each to a multiple of {2 * cp.size}"
            )
        segments.append(RowSpan(start=ends[index], padded=padded, queries=length, keys=length))
    return segments


def _ends(packed: Any, of_queries: str, of_keys: str) -> Tensor | None:
    mine: Tensor | None = getattr(packed, of_queries)
    keys: Tensor | None = getattr(packed, of_keys)
    if mine is None or keys is None:
        return keys if mine is None else mine
    if mine.dim() != 1 or mine.shape != keys.shape or not torch.equal(mine, keys):
        raise ValueError(
            f"ExactAttention got {of_queries}={mine.tolist()} and {of_keys}={keys.tolist()}: pass "
            "the same for both, [sequences + 1]"
        )
    return mine


def own_mask(mask_BNQK: Tensor | None, query: Tensor, key: Tensor, cp: Part) -> Tensor | None:
    """Return the rows of an attention mask (true where hidden) that belong to this rank."""
    if mask_BNQK is None:
        return None
    own, whole = len(query), len(key)
    queries, keys = mask_BNQK.shape[2:] if mask_BNQK.dim() == 4 else (0, 0)
    if queries not in (1, own, own * cp.size) or keys not in (1, whole):
        raise ValueError(
            f"ExactAttention got attention_mask {tuple(mask_BNQK.shape)}: pass [rows, 1, {own} of "
            f"this rank or all {own * cp.size} queries, all {whole} keys]"
        )
    if queries == own * cp.size and cp.size > 1:
        mask_BNQK = context_parallel_part(mask_BNQK, rank=cp.rank, size=cp.size, dim=2)
    return mask_BNQK
