"""Computes exact core attention for rows, packs and context parallelism, put in by the layer spec.

Upstream's local attention takes rows on one context-parallel rank; packs and context parallelism
are left to Transformer Engine, which needs a GPU. `ExactAttention` takes all three. It is
upstream's class with another `forward`: rows without context parallelism give the same bits.

Under context parallelism keys and values are gathered, in one collective per layer, and each rank
computes what its own queries attend to. In the backward their gradients are reduced and scattered,
in float32 where they are narrower.

Legend: T positions on this rank, S positions of all context-parallel ranks, B rows (1 in a pack),
N heads, G query groups, D channels of a head, Q queries and K keys of one block.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

from megatron_idempotent.logprobs.targets import context_parallel_part

__all__ = ["ExactAttention", "with_exact_attention"]

#: The names of causal masks: releases differ in which of them they have.
_CAUSAL = ("causal", "padding_causal", "causal_bottom_right")

_REFUSED = {
    "qk_clip": "it needs the largest logits, which only Transformer Engine returns",
    "log_max_attention_logit": "only Transformer Engine returns the largest logits",
    "hybrid_context_parallel": "its groups change with each batch",
    "dynamic_context_parallel": "its groups change with each batch",
}


class ExactAttention(DotProductAttention):  # type: ignore[misc]
    """Computes core attention in the arithmetic of `DotProductAttention`, for rows, packs and
    context parallelism.

    It takes query [T, B, N, D], key and value [T, B, G, D], or in a pack [T, N, D] and [T, G, D]
    with `PackedSeqParams(qkv_format="thd")`, and returns [T, B, N * D], or [T, N * D]. It may be
    causal or not, and takes sliding windows (-1 for no limit), grouped queries, sinks
    (`softmax_type`), dropout from Megatron's tracker, and recomputation.

    In a pack each sequence attends to itself only. No query attends to padding between sequences,
    given by `cu_seqlens_q_padded`, or to positions after the last one, and their outputs are zero.
    An `attention_mask` is for rows; with a pack it is ignored, as Transformer Engine ignores it.

    With more than one context-parallel rank T is this rank's part of S, cut as
    `context_parallel_part` cuts: each row, or each sequence of a pack, in 2 * ranks pieces. An
    `attention_mask` has the rank's own queries, or all, and all keys: [B, 1, T or S, S].

    Raises:
        ValueError: options, shapes or lengths that do not fit, named with their values.

    Example:
        spec = with_exact_attention(get_gpt_layer_local_spec())
        model = GPTModel(config, spec, vocab_size=128, max_sequence_length=64)
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        for name, reason in _REFUSED.items():
            if getattr(config, name, False):
                raise ValueError(f"ExactAttention got {name}=True: {reason}; leave it off")
        # Upstream's constructor refuses these two, which are read below.
        alone = copy.copy(config)
        alone.context_parallel_size, alone.window_size = 1, None
        super().__init__(alone, layer_number, attn_mask_type, attention_type, *args, **kwargs)
        self.config = config
        kind = getattr(config, "softmax_type", "vanilla")
        if kind != "vanilla" and not hasattr(self, "softmax_offset"):
            raise ValueError(
                f"ExactAttention got softmax_type={kind!r}, which this release's local attention "
                "does not know: use 'vanilla'"
            )
        self._window = _window(config, layer_number)
        self._cp_group = None
        if config.context_parallel_size > 1:
            # Releases name the argument differently: none up to 0.12, `pg_collection` from 0.15.
            groups = kwargs.get("pg_collection") or kwargs.get("model_comm_pgs")
            group = getattr(groups, "cp", None)
            self._cp_group = parallel_state.get_context_parallel_group() if group is None else group
        if self._cp_group is not None and attention_type == "cross":
            raise ValueError(
                "ExactAttention got cross attention with context_parallel_size="
                f"{config.context_parallel_size}: set that to 1, or use self attention"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Compute the attention output of this rank's queries. With context parallelism, all of its
        ranks must call this.
        """
        if attention_bias is not None:
            raise ValueError("ExactAttention got an attention_bias: pass None")
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        causal = kind.name in _CAUSAL
        cp = Part(self._cp_group)
        packed = packed_seq_params is not None
        if packed:
            segments, ends = pack_segments(packed_seq_params, query, key, cp)
            query, key, value = (states.unsqueeze(1) for states in (query, key, value))
            attention_mask = None
        else:
            segments, ends = [row_segment(query, key, cp)], None
        if cp.size > 1:
            key, value = cp.gather(key, value, ends)
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key = key.repeat_interleave(repeats, dim=2)
            value = value.repeat_interleave(repeats, dim=2)
        mask = own_mask(attention_mask, query, key, cp)
        # Blocks of equal sizes from several sequences are computed together.
        alike: dict[tuple[int, int, range], list[QueryBlock]] = {}
        for block in blocks(segments, cp):
            if block.queries:
                keys = self._keys(block, causal if cp.size > 1 and mask is None else None)
                alike.setdefault((block.queries, block.position, keys), []).append(block)
        parts: list[Tensor] = []
        position_parts: list[Tensor] = []
        for (queries, position, keys), blocks_alike in alike.items():
            place_QG = _block_positions([block.query for block in blocks_alike], queries)
            place_KG = _block_positions(
                [block.key + keys.start for block in blocks_alike], len(keys)
            )
            hidden = self._hidden(queries, position, keys, causal, query.device)
            if mask is not None:
                mask_BNQK = mask[:, :, place_QG[:, 0]] if mask.shape[2] > 1 else mask
                hidden = mask_BNQK if hidden is None else mask_BNQK | hidden
            part = self._attend(
                _states_at(query, place_QG),
                _states_at(key, place_KG),
                _states_at(value, place_KG),
                hidden,
            )
            parts.append(part.reshape(place_QG.numel(), query.shape[1], -1))
            position_parts.append(place_QG.flatten())
        context = _in_order(parts, position_parts, query, value)
        if not parts:
            # This rank has padding only. Its backward must still join the gather's collective,
            # and reach every parameter before it.
            context = context + query[:0].sum() + value[:0].sum()
        return context.squeeze(1) if packed else context

    def _keys(self, block: QueryBlock, causal: bool | None) -> range:
        """Return the range of a sequence's keys that contains all that the block's queries may
        attend to; the range of all keys of the sequence if `causal` is None.
        """
        if causal is None:
            return range(block.keys)
        before_query, after_query = self._reach(causal)
        first = max(0, block.position - before_query) if before_query >= 0 else 0
        last = min(block.keys, block.position + block.queries + after_query)
        return range(first, last if after_query >= 0 else block.keys)

    def _reach(self, causal: bool) -> tuple[int, int]:
        """Return how many positions before itself, and how many after itself, a query may attend to
        in this layer; -1 stands for no limit.
        """
        before_query, after_query = self._window or (-1, -1)
        return before_query, 0 if causal else after_query

    def _hidden(
        self, queries: int, position: int, keys: range, causal: bool, device: torch.device
    ) -> Tensor | None:
        """Return a mask [1, 1, queries, keys], True at keys that a query may not attend to because
        of `causal` or the layer's window; None if neither limits queries. `position` is the first
        query's, and `keys` the keys' positions, in their sequence.
        """
        before_query, after_query = self._reach(causal)
        if before_query < 0 and after_query < 0:
            return None
        query_Q = torch.arange(queries, device=device) + position
        key_K = torch.arange(keys.start, keys.stop, device=device)
        ahead_QK = key_K[None, :] - query_Q[:, None]
        hidden_QK = torch.zeros_like(ahead_QK, dtype=torch.bool)
        if after_query >= 0:
            hidden_QK |= ahead_QK > after_query
        if before_query >= 0:
            hidden_QK |= ahead_QK < -before_query
        return hidden_QK[None, None]

    def _attend(
        self, query_QBND: Tensor, key_KBND: Tensor, value_KBND: Tensor, hidden: Tensor | None
    ) -> Tensor:
        """Compute the attention of queries [Q, B, N, D] to keys and values [K, B, N, D], by
        Megatron's operations in Megatron's order; return [Q, B, N * D]. B counts rows, or equal
        blocks of a pack.
        """
        queries, rows, heads, _ = query_QBND.shape
        query = query_QBND.reshape(queries, rows * heads, -1).transpose(0, 1)
        key = key_KBND.reshape(len(key_KBND), rows * heads, -1).transpose(0, 1)
        value = value_KBND.reshape(len(value_KBND), rows * heads, -1).transpose(0, 1)
        scores = torch.baddbmm(
            query.new_empty(1, 1, 1),  # times 0
            query,
            key.transpose(1, 2),
            beta=0.0,
            alpha=self.softmax_scale,
        )
        probabilities = self._softmax(scores.view(rows, heads, queries, -1), hidden)
        if self.config.sequence_parallel:
            probabilities = self.attention_dropout(probabilities)
        else:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                probabilities = self.attention_dropout(probabilities)
        context = torch.bmm(probabilities.view(rows * heads, queries, -1), value)
        context = context.view(rows, heads, queries, -1).permute(2, 0, 1, 3)
        return context.reshape(queries, rows, -1)

    def _softmax(self, scores_BNQK: Tensor, hidden: Tensor | None) -> Tensor:
        options = self.scale_mask_softmax
        widened = options.input_in_float16 and options.softmax_in_fp32
        scores = scores_BNQK.float() if widened else scores_BNQK
        if options.scale is not None:
            scores = scores * options.scale
        if hidden is not None:
            # The least number, because upstream's -10000 is not below every score. Not infinity:
            # a query that sees nothing, which is padding, gets the mean of all and no NaN.
            scores = scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
        sink_N = getattr(self, "softmax_offset", None)
        if sink_N is not None:
            sink = sink_N.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
            scores = torch.cat([scores, sink.to(scores)], dim=-1)
        probabilities = torch.softmax(scores, dim=-1)
        if sink_N is not None:
            probabilities = probabilities[..., :-1]
        return probabilities.to(scores_BNQK.dtype)


def with_exact_attention(spec: Any) -> Any:
    """Return a copy of a layer's or block's spec, with `ExactAttention` as each core attention.

    Args:
        spec: a spec that upstream's functions return: of a layer, `TransformerBlockSubmodules`, or
            of the blocks of MTP.

    Raises:
        ValueError: no core attention is in it.

    Example:
        block_spec = with_exact_attention(get_gpt_decoder_block_spec(config, False))
    """
    spec = copy.deepcopy(spec)
    if not _replace(spec, set()):
        raise ValueError(
            f"with_exact_attention() found no core_attention in {spec!r}: pass the spec of a layer "
            "or a block"
        )
    return spec


def _replace(spec: Any, seen_ids: set[int]) -> int:
    if id(spec) in seen_ids:
        return 0
    seen_ids.add(id(spec))
    if isinstance(spec, (list, tuple)):
        return sum(_replace(part, seen_ids) for part in spec)
    if not dataclasses.is_dataclass(spec) or isinstance(spec, type):
        return 0
    count = 0
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name == "core_attention" and value is not None:
            setattr(spec, field.name, ExactAttention)
            count += 1
        else:
            count += _replace(value, seen_ids)
    return count


def _block_positions(starts: list[int], positions: int) -> Tensor:
    """Return the positions [P, G] of G blocks of equal size P (`positions`), on the host: column g
    counts up from `starts[g]`.
    """
    return torch.arange(positions)[:, None] + torch.tensor(starts)


def _states_at(states_TBND: Tensor, place_PG: Tensor) -> Tensor:
    """Select the query, key or value states [T, B, N, D] of G blocks at the positions `place_PG`.
    Return [P, B, N, D] for one block of rows, or [P, G, N, D] for G blocks of a pack (B = 1).
    """
    positions, number = place_PG.shape
    if number == 1:
        first = int(place_PG[0, 0]) if positions else 0
        return states_TBND[first : first + positions]
    selected = states_TBND.index_select(0, place_PG.flatten().to(states_TBND.device))
    return selected.view(positions, number, *states_TBND.shape[2:])


def _in_order(
    parts: list[Tensor], position_parts: list[Tensor], query: Tensor, value: Tensor
) -> Tensor:
    """Join the attention outputs of this rank's blocks (`parts`) in one tensor [T, B, N * D], each
    at its positions (`position_parts`); positions of padding, which no block has, get zeros.
    """
    positions = len(query)
    place_P = torch.cat(position_parts) if position_parts else torch.arange(0)
    missing = positions - len(place_P)
    if missing:
        parts = [*parts, query.new_zeros(missing, query.shape[1], query.shape[2] * value.shape[3])]
        padding_T = torch.ones(positions, dtype=torch.bool).index_fill_(0, place_P, False)
        place_P = torch.cat([place_P, padding_T.nonzero().flatten()])
    context = parts[0] if len(parts) == 1 else torch.cat(parts)
    if torch.equal(place_P, torch.arange(positions)):
        return context
    return context.index_select(0, place_P.argsort().to(context.device))


def _window(config: Any, layer_number: int) -> tuple[int, int] | None:
    """Return this layer's sliding window: how many positions before itself, and how many after
    itself, a query may attend to (-1 for no limit). None for a layer without a window.
    """
    window = getattr(config, "window_size", None)
    if not window:
        return None
    try:
        from megatron.core.transformer.utils import is_layer_window_attention
    except ImportError:  # before 0.15 each layer has the window
        return int(window[0]), int(window[1])
    skip = config.window_attn_skip_freq
    if not is_layer_window_attention(window, skip, layer_number):
        return None
    return int(window[0]), int(window[1])


# Inputs are checked, and cut into the blocks of this rank.


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowSpan:
    """Locates one row, or one sequence of a pack: the position where it begins, how many positions
    it has with padding, and how many queries and keys it has without padding.

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
    """Describes consecutive queries of this rank in one row or sequence, and the keys of that
    sequence.

    Example: `QueryBlock(query=0, queries=4, position=12, key=0, keys=16)`, the last 4 of 16.
    """

    query: int
    """The index of the first query among this rank's."""
    queries: int
    """The number of queries, without padding."""
    position: int
    """The index of the first query in the segment."""
    key: int
    """The index of the segment's first key among all keys."""
    keys: int
    """The number of the segment's keys."""


def blocks(segments: Sequence[RowSpan], cp: Part) -> Iterator[QueryBlock]:
    """Yield this rank's queries of each row or sequence: one block, or with context parallelism the
    two blocks of which this rank's part of the sequence consists.
    """
    for segment in segments:
        local = segment.padded // cp.size
        halves = [(0, local, 0)]
        if cp.size > 1:
            half = local // 2
            halves = [(0, half, cp.rank * half), (half, half, (2 * cp.size - 1 - cp.rank) * half)]
        for first, number, position in halves:
            yield QueryBlock(
                query=segment.start // cp.size + first,
                queries=max(0, min(number, segment.queries - position)),
                position=position + segment.offset,
                key=segment.start,
                keys=segment.keys,
            )


class Part:
    """Holds this rank's number in the context-parallel group and the group's size (0 and 1 without
    a group), and gathers the keys and values of all ranks of the group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def gather(self, key: Tensor, value: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gather the keys and values of all context-parallel ranks, [S, B, G, D], in sequence
        order.

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
    """All-gathers the states [T, …] of each context-parallel rank's positions, and returns them in
    sequence order. The backward reduce-scatters the gradients, so that each rank gets those of its
    own positions.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, place_S: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(place_S)
        ctx.group = group
        gathered = part.new_empty(len(place_S), *part.shape[1:])
        dist.all_gather_into_tensor(gathered, part.contiguous(), group=group)
        # The indices are a permutation, so that each position is written once.
        return torch.empty_like(gathered).index_copy_(0, place_S, gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (place_S,) = ctx.saved_tensors
        wide = torch.promote_types(gradient.dtype, torch.float32)
        sent = gradient.index_select(0, place_S).to(wide)
        reduced = sent.new_empty(len(sent) // dist.get_world_size(ctx.group), *sent.shape[1:])
        dist.reduce_scatter_tensor(reduced, sent, group=ctx.group)
        return reduced.to(gradient.dtype), None, None


def row_segment(query: Tensor, key: Tensor, cp: Part) -> RowSpan:
    """Check the shapes of rows, which all have one length; return a `RowSpan` of that length, or
    raise `ValueError`.
    """
    queries, keys = len(query), len(key)
    if cp.size > 1 and (queries != keys or queries % 2):
        raise ValueError(
            f"ExactAttention got {queries} queries and {keys} keys on one of {cp.size} context-"
            f"parallel ranks: pad rows to a multiple of {2 * cp.size}, and give each rank its part "
            "(context_parallel_part)"
        )
    positions = queries * cp.size
    return RowSpan(
        start=0,
        padded=positions,
        queries=positions,
        keys=keys * cp.size,
        offset=max(0, keys - queries),
    )


def pack_segments(
    packed: Any, query: Tensor, key: Tensor, cp: Part
) -> tuple[list[RowSpan], Tensor | None]:
    """Check a pack's shapes; return a `RowSpan` for each of its n sequences, and the n + 1
    positions at which the sequences begin and the last one ends, with padding counted.
    """
    if packed.qkv_format != "thd":
        raise ValueError(
            f"ExactAttention got PackedSeqParams(qkv_format={packed.qkv_format!r}): pass 'thd'"
        )
    local_size = getattr(packed, "local_cp_size", None)
    if local_size not in (None, cp.size):
        raise ValueError(
            f"ExactAttention got local_cp_size={local_size} of {cp.size} context-parallel ranks: "
            "groups that change with each batch are not supported, leave it None"
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
    longest = max((segment.keys for segment in segments), default=0)
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
    query_ends: Tensor | None = getattr(packed, of_queries)
    key_ends: Tensor | None = getattr(packed, of_keys)
    if query_ends is None or key_ends is None:
        return key_ends if query_ends is None else query_ends
    if (
        query_ends.dim() != 1
        or query_ends.shape != key_ends.shape
        or not torch.equal(query_ends, key_ends)
    ):
        raise ValueError(
            f"ExactAttention got {of_queries}={query_ends.tolist()} and {of_keys}="
            f"{key_ends.tolist()}: pass the same for both, [sequences + 1]"
        )
    return query_ends


def own_mask(mask_BNQK: Tensor | None, query: Tensor, key: Tensor, cp: Part) -> Tensor | None:
    """Return an attention mask (True where hidden) for this context-parallel rank's queries: those
    queries' rows of a mask for all queries; any other mask, or None, unchanged. Raise `ValueError`
    if the mask has the wrong shape.
    """
    if mask_BNQK is None:
        return None
    local, total = len(query), len(key)
    queries, keys = mask_BNQK.shape[2:] if mask_BNQK.dim() == 4 else (0, 0)
    if queries not in (1, local, local * cp.size) or keys not in (1, total):
        raise ValueError(
            f"ExactAttention got attention_mask {tuple(mask_BNQK.shape)}: pass [rows, 1, {local} "
            f"of this rank or all {local * cp.size} queries, all {total} keys]"
        )
    if queries == local * cp.size and cp.size > 1:
        mask_BNQK = context_parallel_part(mask_BNQK, rank=cp.rank, size=cp.size, dim=2)
    return mask_BNQK
